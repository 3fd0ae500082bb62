"""Samplers of a server: engines in Ray actors that answer single requests.

    RaySampler: SamplerScheduler ─► SamplerActor: engine ─► generations, each of one version
                                └─► SequenceScorer, created when needed: a second copy of the model

An engine that supports it keeps the base model and samples for many adapters in one batch
(AdapterEngine). Adapters are read from the directories to which they were saved. Whole weights,
and adapters with another engine, replace the engine's weights while nothing runs. They come from
the trainer that has just published them if it is on the same node, otherwise from the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlsys.common.background_tasks import report, start_task
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.tinker_server.api_errors import ApiError, PartDied
from rlsys.tinker_server.sample_request import gather_all
from rlsys.tinker_server.sampler_scheduling import SamplerScheduler
from rlsys.tinker_server.server_backend import ScoreRequest, Scores
from rlsys.tinker_server.server_checkpoints import (
    ADAPTER_DIRECTORY,
    SamplerWeights,
    check_undamaged,
)
from rlsys.types import Generation, GenerationRequest, WeightManifest

from ..cluster.calls import Worker, WorkerError, as_future
from ..cluster.long_poll import COLLECT_WAIT_S
from .sampler_successor import Successor

# How long requests for other weights wait for requests for the current ones.
PATIENCE_S = 1.0

# Adapters that are kept in memory for later requests, as a multiple of those that may run at once.
KEPT = 4

# Completions of a sample that are scheduled together. Owners take turns with parts of this size.
PART = 8


@dataclass(eq=False, kw_only=True)
class _WaitingSample:
    """A part of a sample: requests that run at the same time."""

    weights: SamplerWeights
    owner: str
    adapter: int
    requests: Sequence[GenerationRequest]
    answers: dict[str, asyncio.Future[Generation]]
    is_admitted: bool = False
    is_submitted: bool = False
    is_dropped: bool = False  # cancelled when it was admitted and not submitted yet


class RaySampler:
    """A replica for all models of a base model. It is replaced at once when it dies.

    Args:
        start: Starts an actor with a name.
        name: Name of the replica.
        base_key: Key of the weights that it begins with.
        max_running: Completions that it gets at a time, so that others can still be cancelled,
            owners take turns, and calls stay short.
        max_adapters: Adapters in one batch. 0: the engine supports none.
        is_renewed: Whether a new actor replaces one in which requests have failed for probabilities
            that are not finite, before it loads other weights (vllm_engine.py has the reason).
        batch_size: Completions in one batch of the engine, which owners share; None: no limit.
        start_timeout_s: Time limit of a start.
        published: Returns the manifest of weights, by number, that a trainer on this node still
            has in memory, or None.
        warn: Gets one line about each death.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        start: Callable[[str], Worker],
        name: str,
        *,
        base_key: str,
        max_running: int,
        max_adapters: int,
        is_renewed: bool = False,
        batch_size: int | None = None,
        start_timeout_s: float,
        published: Callable[[int, str], WeightManifest | None],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_worker = start
        self._name = name
        self._base_key = base_key
        self._start_timeout_s = start_timeout_s
        self._published = published
        self._max_adapters = max_adapters
        self._is_renewed = is_renewed
        self._has_failed_requests = False  # of probabilities that are not finite
        self._scheduler: SamplerScheduler[_WaitingSample] = SamplerScheduler(
            clock,
            patience_s=PATIENCE_S,
            max_running=max_running,
            max_adapters=max_adapters,
            batch_size=batch_size,
        )
        self._loaded: dict[int, None] = {}  # adapters in the engine, the least recently used first
        self._answers: dict[str, tuple[_WaitingSample, asyncio.Future[Generation]]] = {}
        self._changed = asyncio.Event()
        self._worker: Worker | None = None
        self._node_id = ""
        self._num_starts = 0
        self._undamaged: set[str] = set()  # keys of saved weights that were checked
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._successor = Successor(self._living, warn)

    def load_of(self, weights: SamplerWeights) -> tuple[bool, int]:
        """Return a load to compare: lower means that it samples with these weights sooner."""
        return self._scheduler.current not in (self._whole(weights), None), len(self._answers)

    def _whole(self, weights: SamplerWeights) -> str:
        """Return the key of the whole weights that the engine needs for these weights."""
        is_adapter = bool(weights.lora) and self._max_adapters > 0
        return weights.base_model if is_adapter else weights.key

    async def start(self) -> None:
        """Start the replica.

        Raises:
            PartDied: It died.
            ValueError: The engine cannot run the model.
        """
        await self._living()

    async def sample(
        self, weights: SamplerWeights, requests: Sequence[GenerationRequest], owner: str
    ) -> Sequence[Generation]:
        """Return completions in the order of requests. Cancelling the call aborts them.

        Owners take turns.
        """
        parts = [
            self._add(weights, requests[start : start + PART], owner)
            for start in range(0, len(requests), PART)
        ]
        self._wake()
        if self._task is None or self._task.done():
            self._task = start_task(
                self._serve(), name=f"{self._name} scheduling", fail=self._failed
            )
        try:
            return await gather_all([answer for one in parts for answer in one.answers.values()])
        finally:
            for one in parts:
                self._forget(one)

    def _add(
        self, weights: SamplerWeights, requests: Sequence[GenerationRequest], owner: str
    ) -> _WaitingSample:
        """Add a part of a sample to the waiting ones."""
        loop = asyncio.get_running_loop()
        whole = self._whole(weights)
        part = _WaitingSample(
            weights=weights,
            owner=owner,
            adapter=weights.number if whole != weights.key else 0,
            requests=requests,
            answers={one.request_id: loop.create_future() for one in requests},
        )
        self._answers.update((name, (part, answer)) for name, answer in part.answers.items())
        self._scheduler.add(whole, part, len(requests), owner=owner, adapter=part.adapter)
        return part

    def _forget(self, sample: _WaitingSample) -> None:
        """Abort what has not ended of a part."""
        left = [name for name in sample.answers if name in self._answers]
        if not left:
            return
        if sample.is_submitted:
            if self._worker is not None and not self._worker.is_dead:
                self._worker_call("abort", left)
            return
        if sample.is_admitted:
            sample.is_dropped = True
            self._end(sample, len(sample.requests))
        else:
            self._scheduler.remove(sample)
        for name in left:
            del self._answers[name]
        self._wake()

    def _worker_call(self, method: str, *args: Any) -> None:
        assert self._worker is not None
        as_future(self._worker.start_call(method, *args))

    async def score(self, request: ScoreRequest) -> Sequence[Scores]:
        """Return the scores of each row.

        Raises:
            FloatingPointError: They are not finite.
        """
        weights = request.weights
        _check_exists(weights)
        await self._check_undamaged(weights)
        worker = await self._living()
        try:
            scores: Sequence[Scores] = await worker.call("score", request)
        except (WorkerError, EngineError) as death:
            raise self._died(worker, death) from None
        if not all(np.isfinite(one.logprobs).all() for one in scores):
            raise _not_finite(weights)
        return scores

    async def close(self) -> None:
        """End the replica."""
        self._successor.close()
        for task in (self._task, self._collecting, self._watching):
            if task is not None:
                task.cancel()
        if self._worker is not None:
            with contextlib.suppress(WorkerError, EngineError):
                await self._worker.call("close", timeout_s=5.0)
            self._worker.kill()

    async def _living(self) -> Worker:
        async with self._starting:
            if self._worker is None or self._worker.is_dead:
                name = f"{self._name}.{self._num_starts}" if self._num_starts else self._name
                self._num_starts += 1
                worker = self._start_worker(name)
                try:
                    self._node_id = await worker.call("start", timeout_s=self._start_timeout_s)
                except (WorkerError, EngineError, FloatingPointError) as death:
                    raise self._died(worker, death) from None
                self._worker = worker
                self._has_failed_requests = False
                self._watching = start_task(
                    self._watch(worker), name=f"{name} watch", fail=self._failed
                )
                self._loaded.clear()
                self._scheduler.switched(self._base_key)
            return self._worker

    async def _watch(self, worker: Worker) -> None:
        """Wait until the worker dies, also while no request needs it, and replace it."""
        try:
            await worker.watch()
        except WorkerError:
            self._fail(worker, PartDied(f"{worker.name} died: {worker.cause}"))

    async def _serve(self) -> None:
        """Admit requests and switch weights, until no request waits."""
        while self._scheduler.num_waiting:
            self._changed.clear()
            worker = None
            try:
                worker = await self._living()
                await self._serve_once(worker)
            except (PartDied, WorkerError, EngineError) as death:
                self._fail(worker, death)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._scheduler.patience_left_s):
                    await self._changed.wait()

    async def _serve_once(self, worker: Worker) -> None:
        if (key := self._scheduler.due()) is not None:
            if self._is_renewed and self._has_failed_requests:
                worker = await self._renewed(worker)
            if key != self._scheduler.current:
                await self._switch(worker, key)
        admitted = self._scheduler.admit()
        for sample in admitted:
            sample.is_admitted = True
        loaded = [one for one in admitted if await self._has_adapter(worker, one)]
        ready = [one for one in loaded if not one.is_dropped]
        if not ready:
            return
        for sample in ready:
            sample.is_submitted = True
        await worker.call("submit", [one for sample in ready for one in self._turns(sample)])
        if self._collecting is None or self._collecting.done():
            self._collecting = start_task(self._collect(worker), name=self._name, fail=self._failed)

    async def _renewed(self, worker: Worker) -> Worker:
        """Replace a worker that runs nothing; requests wait for the new one."""
        assert self._watching is not None
        self._watching.cancel()  # it does not die
        self._worker = None
        worker.kill()
        return await self._living()

    def _turns(self, sample: _WaitingSample) -> list[GenerationRequest]:
        """Return the requests of a sample for the engine.

        In the engine's queue, requests of an owner with fewer running completions come first.
        """
        priority = -self._scheduler.num_running_of(sample.owner)
        return [replace(one, adapter=sample.adapter, priority=priority) for one in sample.requests]

    async def _has_adapter(self, worker: Worker, sample: _WaitingSample) -> bool:
        """Load the adapter of an admitted sample. If that fails, only the sample fails."""
        weights = sample.weights
        if not sample.adapter:
            return True
        if sample.adapter in self._loaded:
            self._loaded[sample.adapter] = self._loaded.pop(sample.adapter)  # used last
            return True
        try:
            _check_exists(weights)
            await self._check_undamaged(weights)
            assert weights.directory is not None
            await worker.call("add_adapter", sample.adapter, weights.directory / ADAPTER_DIRECTORY)
        except (ValueError, OSError) as error:
            if not sample.is_dropped:
                self._fail_one(sample, error)
                self._end(sample, len(sample.requests))
            self._wake()
            return False
        self._loaded[sample.adapter] = None
        idle = [one for one in self._loaded if one not in self._scheduler.running_adapters]
        for one in idle[: max(0, len(self._loaded) - KEPT * self._max_adapters)]:
            del self._loaded[one]
            await worker.call("drop_adapter", one)
        return True

    def _end(self, sample: _WaitingSample, count: int) -> None:
        self._scheduler.ended(count, owner=sample.owner, adapter=sample.adapter)

    async def _switch(self, worker: Worker, key: str) -> None:
        """Load weights. If they are missing, the requests for them fail, and nothing changes."""
        weights = self._scheduler.waiting_for(key)[0].weights
        if weights.key != key:  # an adapter of the base model
            weights = SamplerWeights(base_model=weights.base_model)
        self._scheduler.switched(None)
        try:
            _check_exists(weights)
            if not await self._load_published(worker, weights):
                await self._check_undamaged(weights)
                await worker.call("take_saved", weights.number, weights.directory)
        except (ValueError, OSError, DamagedWeightsError) as error:
            for sample in self._scheduler.take_waiting_for(key):
                self._fail_one(sample, error)
            return
        self._scheduler.switched(key)

    async def _check_undamaged(self, weights: SamplerWeights) -> None:
        """Check saved weights, once.

        Raises:
            ApiError: They are damaged.
        """
        if weights.directory is not None and weights.key not in self._undamaged:
            await check_undamaged(weights.path, weights.directory)
            self._undamaged.add(weights.key)

    async def _load_published(self, worker: Worker, weights: SamplerWeights) -> bool:
        """Load published weights, if a trainer on this node still has them."""
        manifest = self._published(weights.number, self._node_id)
        if manifest is None:
            return False
        try:
            await worker.call("take_published", manifest)
        except (FileNotFoundError, DamagedWeightsError):  # no longer published
            return False
        return True

    async def _collect(self, worker: Worker) -> None:
        while self._scheduler.num_running:
            try:
                found: list[Generation] = await worker.call(
                    "collect", timeout_s=COLLECT_WAIT_S + worker.timeout_s
                )
            except (WorkerError, EngineError) as death:
                self._fail(worker, self._died(worker, death))
                return
            for generation in found:
                sample, answer = self._answers.pop(generation.request_id)
                self._has_failed_requests |= bool(generation.failure)
                if not answer.done() and generation.failure:
                    answer.set_exception(_not_finite(sample.weights))
                elif not answer.done():
                    answer.set_result(generation)
                self._end(sample, 1)
            if found:
                self._successor.progressed()
            self._wake()

    def _died(self, worker: Worker, error: Exception) -> PartDied:
        worker.end(str(error))
        has_name = isinstance(error, WorkerError)
        return PartDied(str(error) if has_name else f"{worker.name} died: {error}")

    def _fail(self, worker: Worker | None, death: Exception) -> None:
        """Fail everything that runs or waits on a dead replica. None: none could be started."""
        if worker is not self._worker and worker is not None:
            return  # reported already
        error = death if isinstance(death, PartDied) else PartDied(str(death))
        if worker is not None:
            worker.end(str(death))
            self._successor.died(str(error))
        self._worker = None
        for sample in {id(one): one for one, _ in self._answers.values()}.values():
            self._scheduler.remove(sample)
            self._fail_one(sample, error)
        self._scheduler.stopped()
        self._wake()

    def _failed(self, error: BaseException) -> None:
        """Fail everything that runs or waits after an error of this class, and end the worker."""
        report(error)
        self._fail(self._worker, PartDied(f"{self._name} was ended after an error: {error!r}"))

    def _fail_one(self, sample: _WaitingSample, error: Exception) -> None:
        for name, answer in sample.answers.items():
            self._answers.pop(name, None)
            if not answer.done():
                answer.set_exception(error)

    def _wake(self) -> None:
        self._changed.set()


def _not_finite(weights: SamplerWeights) -> FloatingPointError:
    return FloatingPointError(
        f"the probabilities of {weights.key} are not finite: the training has diverged, or the "
        "weights are too large for the sampler's precision. Load an earlier checkpoint, and lower "
        "the learning rate."
    )


def _check_exists(weights: SamplerWeights) -> None:
    if weights.directory is not None and not weights.directory.is_dir():
        raise ApiError(
            "path",
            weights.path,
            rule="the weights were deleted; of those without a name only the newest are kept",
            fix="Save them under a name, with save_weights_for_sampler.",
            status=404,
        )
