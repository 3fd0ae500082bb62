"""Trainers of a server of the Tinker API: processes with the base model and one engine per model.

    TrainerPool ─► TrainerHost, one group of ranks ─► PrimitiveTrainerActor, one per rank
                      ▲                                 └─► PrimitiveEngine, one per model
    RayTrainer, one per model ── one call at a time

Models with adapters share a host: they use the same frozen weights, and each has its own adapters,
gradient and optimizer. So each of them computes what it would compute alone. The owners of the
models take turns. A pass over many tokens is several calls, so that others need not wait for all of
it.

A host has one rank. A model that is trained as a whole, or in a layout of several ranks, has a host
of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.algorithms.loss_inputs import LossFn
from rlsys.common.background_tasks import report, start_task
from rlsys.controller.worker_protocols import TrainerDied
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.datum_rows import DataRows, turns
from rlsys.tinker_server.server_backend import PassResult, StepParams
from rlsys.tinker_server.trainer_scheduling import TrainerScheduler
from rlsys.types import WeightManifest

from ..cluster.calls import Worker, WorkerError, as_future, end_all
from ..trainer.rank_group import RankGroup
from ..trainer.trainer_proxy import absolute, finish
from .primitive_trainer_actor import (
    EngineFactory,
    LostModel,
    PrimitiveTrainerActor,
    RefusedCommand,
    ServedModel,
)

# Tokens of one call of a pass, as a multiple of trainer.micro_batch_tokens.
PASSES_PER_TURN = 2
# Targets of one call of a pass, for several targets per position: about 0.2 s on a CPU.
MAX_TURN_TARGETS = 1 << 21


@dataclass(eq=False, kw_only=True)
class _Call:
    """A call of all ranks."""

    method: str
    arguments: Sequence[Sequence[Any]]  # of each rank
    timeout_s: float | None
    answer: asyncio.Future[Any]


class TrainerHost:
    """A group of ranks and the models in it. Calls run in the order of TrainerScheduler.

    If a rank fails, all ranks are ended, and the models with them. `warn` gets one line about it.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[Worker],
        *,
        is_shared: bool,
        start_timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self.name = name
        self._warn = warn
        self._watching: asyncio.Task[None] | None = None
        self.is_shared = is_shared
        self.models: dict[str, str] = {}  # the owner of each
        self._ranks = RankGroup(workers)
        self._start_timeout_s = start_timeout_s
        self._starting: asyncio.Future[None] | None = None
        self._scheduler: TrainerScheduler[_Call] = TrainerScheduler()

    @property
    def is_dead(self) -> bool:
        """Return whether a rank has failed, or the host was closed."""
        return self._ranks.failure is not None

    @property
    def has_started(self) -> bool:
        """Return whether all ranks have started."""
        return self._starting is not None and self._starting.done()

    async def start(self) -> None:
        """Wait until all ranks have started. The first call starts them."""
        if self._starting is None:
            self._starting = as_future(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        limit_s = self._start_timeout_s
        self._watching = start_task(self._watch(), name=f"{self.name} watch", fail=report)
        places = await self.call("rendezvous", timeout_s=limit_s)
        _, host, port = places[0]
        await self.call("start", host, port, timeout_s=limit_s)

    async def _watch(self) -> None:
        """Wait until a rank fails, also between calls, and report it."""
        try:
            await self._ranks.watch()
        except Exception as failure:  # noqa: BLE001 - calls raise it
            lost = f"with {', '.join(self.models)}" if self.models else "without models"
            self._warn(f"{self._reason(failure).rstrip('.')}; the trainer is lost {lost}")

    def _reason(self, failure: Exception) -> str:
        reason = str(failure)
        if self.name in reason:
            return reason
        return f"the trainer of {self.name} failed: {reason}"

    async def call(
        self, method: str, *args: Any, model: str = "", timeout_s: float | None = None
    ) -> list[Any]:
        """Return the answers of all ranks to a call of a model, or of the host itself."""
        each = [args] * len(self._ranks.ranks)
        return await self.call_each(method, each, model=model, timeout_s=timeout_s)

    async def call_each(
        self,
        method: str,
        arguments: Sequence[Sequence[Any]],
        *,
        model: str = "",
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Return the answers of all ranks, each called with its own arguments.

        A caller that is cancelled does not end a running call.

        Raises:
            PartDied: A rank has failed.
        """
        answer = as_future(asyncio.get_running_loop().create_future())
        call = _Call(method=method, arguments=arguments, timeout_s=timeout_s, answer=answer)
        self._scheduler.add(call, owner=self.models.get(model, ""))
        self._run_next()
        try:
            found: list[Any] = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._scheduler.remove(call)
            raise
        return found

    def _run_next(self) -> None:
        call = self._scheduler.take()
        if call is not None:
            as_future(self._run(call)).add_done_callback(self._ended)

    def _ended(self, run: asyncio.Future[Any]) -> None:
        self._scheduler.ended()
        if not run.cancelled():  # the event loop has ended
            self._run_next()

    async def _run(self, call: _Call) -> None:
        """Run a call and set its answer."""
        try:
            found = await self._answers(call.method, call.arguments, call.timeout_s)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            call.answer.set_exception(error)
        else:
            call.answer.set_result(found)

    async def _answers(
        self, method: str, arguments: Sequence[Sequence[Any]], timeout_s: float | None
    ) -> list[Any]:
        try:
            return await self._ranks.each(method, arguments, timeout_s=timeout_s)
        except (TrainerDied, WorkerError, ValueError, FloatingPointError, OSError) as error:
            raise PartDied(self._reason(error)) from error

    async def close(self) -> None:
        """End all ranks."""
        if self._watching is not None:
            self._watching.cancel()
        if not self.is_dead:
            self._ranks.failure = PartDied(f"the trainer of {self.name} was closed")
        await end_all(self._ranks.ranks)


def start_host(
    served: ServedModel, name: str, is_shared: bool, *, warn: Callable[[str], None]
) -> TrainerHost:
    """Return a host whose ranks are Ray actors."""
    cluster = served.cluster
    factory = EngineFactory(served=served, is_shared=is_shared)
    options = {"num_cpus": 0, "num_gpus": served.trainer.num_gpus}
    workers = [
        Worker(
            f"trainer-{rank} of {name}",
            PrimitiveTrainerActor.options(**options).remote(rank, factory),  # type: ignore[attr-defined]
            timeout_s=cluster.call_timeout_s,
            heartbeat_timeout_s=cluster.heartbeat_timeout_s,
            ordered=True,
        )
        for rank in range(served.trainer.parallel.num_ranks)
    ]
    return TrainerHost(
        name,
        workers,
        is_shared=is_shared,
        start_timeout_s=cluster.start_timeout_s,
        warn=warn,
    )


class TrainerPool:
    """All hosts of a server. A host without models ends, except the last shared one.

    `start` returns a new host with a name, for one model or for several.
    """

    def __init__(
        self, served: ServedModel, start: Callable[[ServedModel, str, bool], TrainerHost]
    ) -> None:
        self._served = served
        self._start = start
        self._hosts: list[TrainerHost] = []
        self._num_shared = 0
        self._leaving: set[asyncio.Task[None]] = set()

    def host_for(self, model: str, lora: str, owner: str) -> TrainerHost:
        """Return the host of a new model: the fullest one that has room, or a new one."""
        served = self._served
        is_shared = (
            bool(lora) and served.trainer.parallel.num_ranks == 1 and served.models_per_trainer > 1
        )
        self._hosts = [one for one in self._hosts if not one.is_dead]
        rooms = [
            one
            for one in self._hosts
            if is_shared and one.is_shared and len(one.models) < served.models_per_trainer
        ]
        host = max(rooms, key=lambda one: len(one.models), default=None)
        if host is None:
            self._num_shared += is_shared
            name = f"host-{self._num_shared}" if is_shared else model
            host = self._start(served, name, is_shared)
            self._hosts.append(host)
        host.models[model] = owner
        return host

    async def leave(self, model: str, host: TrainerHost) -> None:
        """Remove a model from its host, whose memory is freed when its turn comes."""
        host.models.pop(model, None)
        if host.is_dead:
            return
        others = [
            one for one in self._hosts if one.is_shared and not one.is_dead and one is not host
        ]
        if host.models or (host.is_shared and not others):
            task = start_task(_dropped(host, model), fail=report, returns=True)
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            return
        self._hosts.remove(host)
        await host.close()

    async def close(self) -> None:
        """End all hosts."""
        for task in self._leaving:
            task.cancel()
        for host in self._hosts:
            await host.close()


async def _dropped(host: TrainerHost, model: str) -> None:
    with contextlib.suppress(PartDied):
        await host.call("drop", model, model=model)


class RayTrainer:
    """Implementation of rlsys.tinker_server.server_backend.Trainer: a model in a host.

    If a rank fails, the host is ended, and its models with it. Clients continue with another model
    from a checkpoint.
    """

    def __init__(
        self, name: str, served: ServedModel, lora: str, seed: int, owner: str, pool: TrainerPool
    ) -> None:
        self.name = name
        self.version = 0
        self.is_closed = False
        self.published: WeightManifest | None = None  # still in the ranks' memory
        self._served = served
        self._layout = served.trainer.parallel
        self._lora = lora
        self._seed = seed
        self._owner = owner
        self._pool = pool
        self._host = pool.host_for(name, lora, owner)

    async def start(self) -> None:
        """Create the model in its host.

        Raises:
            PartDied: A rank has failed.
            ValueError: The model cannot have these adapters.
        """
        is_new = not self._host.has_started
        try:
            await self._open()
        except PartDied:
            if is_new or not self._host.is_dead:
                raise
            # It died between two calls.
            self._host = self._pool.host_for(self.name, self._lora, self._owner)
            await self._open()

    async def _open(self) -> None:
        limit_s = self._served.cluster.start_timeout_s
        await self._host.start()
        arguments = self.name, self._lora, self._seed
        self._results(await self._host.call("open", *arguments, model=self.name, timeout_s=limit_s))

    async def forward_backward(self, data: DataRows, loss: LossFn, *, backward: bool) -> PassResult:
        """Run a pass, in which the data-parallel ranks share the rows."""
        num_data, num_ranks = self._layout.num_data, self._layout.num_ranks
        found: dict[int, Any] = {}
        total = 0.0
        max_tokens = PASSES_PER_TURN * self._served.trainer.micro_batch_tokens * num_data
        max_targets = MAX_TURN_TARGETS * num_data
        for num_targets, rows in turns(data, max_tokens=max_tokens, max_targets=max_targets):
            shares = [list(rows[share::num_data]) for share in range(num_data)]
            arguments = [
                [self.name, shares[self._layout.data_index(rank)], loss, num_targets, backward]
                for rank in range(num_ranks)
            ]
            outputs = self._results(
                await self._host.call_each("forward_backward", arguments, model=self.name)
            )
            for rank in range(num_ranks):
                if self._layout.counts(rank):
                    found |= outputs[rank].logprobs
                    total += outputs[rank].loss
        logprobs = []
        for number, shape in enumerate(data.shapes):
            wide = found[number].reshape(shape[0], -1)
            logprobs.append(np.ascontiguousarray(wide[:, : int(np.prod(shape[1:]))]).reshape(shape))
        return PassResult(logprobs=logprobs, loss=total)

    async def discard(self) -> None:
        """Discard the accumulated gradients."""
        await self._call("discard")

    async def optim_step(self, params: StepParams) -> dict[str, float]:
        """Take an optimizer step and return its metrics."""
        metrics: dict[str, float] = self._results(await self._call("optim_step", params))[0]
        self.version = round(metrics["policy_version"])
        return metrics

    async def save(self, directory: Path) -> None:
        """Save parameters and moments into an empty directory."""
        parts = self._results(await self._call("save", absolute(directory)))
        await asyncio.to_thread(finish, directory, parts)

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        """Load parameters, and with `optimizer` the moments."""
        answers = await self._call("load", absolute(directory), optimizer)
        self.version = self._results(answers)[0]

    async def save_for_sampler(self, directory: Path, number: int | None) -> None:
        """Save weights for a sampler, and publish them under `number`, if it is given."""
        if self._lora and self._served.samples_adapters:
            number = None  # samplers read the adapter
        if number is not None:
            self.published = None  # its memory is reused
        found = self._results(await self._call("save_for_sampler", absolute(directory), number))
        if number is not None:
            self.published = found[0]

    async def close(self) -> None:
        """Remove the model from its host."""
        self.is_closed, self.published = True, None
        await self._pool.leave(self.name, self._host)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._host.call(method, self.name, *args, model=self.name)

    def _results(self, answers: list[Any]) -> list[Any]:
        """Return the answers of all ranks, or raise the error of a refused command.

        Raises:
            PartDied: The model is lost.
        """
        for answer in answers:
            if isinstance(answer, RefusedCommand):
                raise answer.error
            if isinstance(answer, LostModel):
                raise PartDied(f"the trainer of {self.name} failed: {answer.reason}")
        return answers
