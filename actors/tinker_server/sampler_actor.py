"""A generation engine that answers whoever asks, rather than a store: for servers.

RaySampler: Turns ─► SamplerActor: engine ─► generations, each of one version of the weights
                 └─► Scorer, from the first question on: a second copy of the model

Weights come from the trainer that has just published them, where it is on the same node; else from
the directory that they were saved to.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlsys.common.background_tasks import report, start_task
from rlsys.engines.generation.generation_protocol import EngineError, GenerationEngine
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.reallocation.transport.weight_views import Weights
from rlsys.tinker_server.api_errors import PartDied
from rlsys.tinker_server.sample_request import gathered
from rlsys.tinker_server.sampler_scheduling import SamplerScheduler
from rlsys.tinker_server.server_backend import Scores
from rlsys.tinker_server.server_checkpoints import SamplerWeights, check_whole
from rlsys.types import Generation, GenerationRequest, Int32Array, WeightManifest

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerError

if TYPE_CHECKING:
    from rlsys.tinker_server.saved_weights import SequenceScorer

# How long one `collect` waits for a completion to end. Not a limit: the next call goes on waiting.
COLLECT_WAIT_S = 5.0

# How long completions that have ended wait for others to travel with.
GATHER_S = 0.01

# Requests for other weights wait so long for those that are sampled with now.
PATIENCE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class SamplerFactory:
    """Of what an actor builds in its own process."""

    make_engine: Callable[[], GenerationEngine]
    base_path: str
    dtype: str
    device: str
    pass_tokens: int  # of a forward pass of the scorer


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class SamplerActor(Heartbeat):
    """Takes weights only while it samples nothing: `SamplerScheduler` sees to it."""

    def __init__(self, make: SamplerFactory) -> None:
        self._make = make
        self._engine = make.make_engine()
        self._switch = WeightSwitch(self._engine)
        self._collecting: asyncio.Task[list[Generation]] | None = None
        self._scorer: SequenceScorer | None = None
        self._scoring = asyncio.Lock()

    async def start(self) -> str:
        """Load the base model; returns the id of the node."""
        await self._engine.start()
        return str(ray.get_runtime_context().get_node_id())

    async def submit(self, requests: list[GenerationRequest]) -> None:
        self._switch.submit(requests)

    async def abort(self, request_ids: list[str]) -> None:
        await self._switch.abort(request_ids)

    async def collect(self) -> list[Generation]:
        """Those that have ended; none after a while: call again."""
        found = await self._ended_within(COLLECT_WAIT_S)
        deadline = time.monotonic() + GATHER_S
        while found and (left_s := deadline - time.monotonic()) > 0:
            found += await self._ended_within(left_s)
        return found

    async def _ended_within(self, timeout_s: float) -> list[Generation]:
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._switch.collect())
        done, _ = await asyncio.wait([self._collecting], timeout=timeout_s)
        if not done:
            return []
        task, self._collecting = self._collecting, None
        return task.result()

    async def take_published(self, manifest: WeightManifest) -> None:
        """Raises MemoryGone if the trainer has given the version up, DamagedWeightsError if it is
        not what was published.
        """
        with await asyncio.to_thread(Weights, manifest) as weights:
            await self._switch.switch(weights.local)

    async def take_saved(self, number: int, directory: Path | None) -> None:
        """The weights in a directory, or those of the base model, under a number."""
        from rlsys.reallocation.transport.weight_views import stage_whole
        from rlsys.tinker_server.saved_weights import saved_tensors

        def staged() -> Any:
            found = saved_tensors(self._make.base_path, directory, dtype=self._make.dtype)
            return stage_whole(number, found)

        stage, manifest = await asyncio.to_thread(staged)
        try:
            await self._switch.switch(manifest)
        finally:
            stage.close()

    async def score(
        self, key: str, directory: Path | None, rows: list[Int32Array], top_k: int
    ) -> list[Scores]:
        """Beside what is sampled, in a thread of its own."""
        async with self._scoring:
            return await asyncio.to_thread(self._scores, key, directory, rows, top_k)

    def _scores(
        self, key: str, directory: Path | None, rows: list[Int32Array], top_k: int
    ) -> list[Scores]:
        from rlsys.tinker_server.saved_weights import SequenceScorer

        make = self._make
        if self._scorer is None:
            self._scorer = SequenceScorer(
                make.base_path, dtype=make.dtype, device=make.device, max_tokens=make.pass_tokens
            )
        self._scorer.take(key, directory)
        logprobs = self._scorer.logprobs(rows)
        tops = self._scorer.top_k(rows, top_k) if top_k else [None] * len(rows)
        return [
            Scores(logprobs=of_row, top_k=top) for of_row, top in zip(logprobs, tops, strict=True)
        ]

    async def close(self) -> None:
        await self._engine.close()


@dataclass(eq=False, kw_only=True)
class _Asked:
    weights: SamplerWeights
    requests: Sequence[GenerationRequest]
    answers: dict[str, asyncio.Future[Generation]]
    is_submitted: bool = False


class RaySampler:
    """One replica for all models of a base model; started anew when it has died. `base_key`: of the
    weights that it begins with; `max_running`: completions that it is given at a time, so that the
    rest can still be cancelled, and calls stay short. `published` gives
    the manifest of weights that a trainer on this node still holds, by number; None: of none.
    """

    def __init__(
        self,
        start: Callable[[str], Worker],
        name: str,
        *,
        base_key: str,
        max_running: int,
        start_timeout_s: float,
        published: Callable[[int, str], WeightManifest | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start_worker = start
        self._name = name
        self._base_key = base_key
        self._start_timeout_s = start_timeout_s
        self._published = published
        self._turns: SamplerScheduler[_Asked] = SamplerScheduler(
            clock, patience_s=PATIENCE_S, max_running=max_running
        )
        self._answers: dict[str, tuple[_Asked, asyncio.Future[Generation]]] = {}
        self._changed = asyncio.Event()
        self._worker: Worker | None = None
        self._node_id = ""
        self._num_lives = 0
        self._whole: set[str] = set()  # saved weights that were read without a fault
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None

    def load_of(self, key: str) -> tuple[bool, int]:
        """The less, the sooner it samples with these weights."""
        return self._turns.current not in (key, None), len(self._answers)

    async def start(self) -> None:
        """Raises PartDied, or ValueError for a model that the engine cannot run."""
        await self._living()

    async def sample(
        self, weights: SamplerWeights, requests: Sequence[GenerationRequest]
    ) -> Sequence[Generation]:
        loop = asyncio.get_running_loop()
        answers = {one.request_id: loop.create_future() for one in requests}
        asked = _Asked(weights=weights, requests=requests, answers=answers)
        self._answers.update((name, (asked, answer)) for name, answer in answers.items())
        self._turns.add(weights.key, asked, len(requests))
        self._wake()
        if self._task is None or self._task.done():
            self._task = start_task(self._serve(), name=f"{self._name} turns", fail=self._failed)
        try:
            return await gathered(list(answers.values()))
        finally:
            self._forget(asked)

    def _forget(self, asked: _Asked) -> None:
        """Nobody waits for it any more: what has not ended is aborted."""
        left = [name for name in asked.answers if name in self._answers]
        if not asked.is_submitted:
            self._turns.remove(asked)
            for name in left:
                del self._answers[name]
        elif left and self._worker is not None and not self._worker.is_dead:
            self._worker_call("abort", left)

    def _worker_call(self, method: str, *args: Any) -> None:
        assert self._worker is not None
        call = asyncio.ensure_future(self._worker.start_call(method, *args))
        call.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    async def score(
        self, weights: SamplerWeights, rows: Sequence[Int32Array], top_k: int
    ) -> Sequence[Scores]:
        _check_there(weights)
        await self._check_whole(weights)
        worker = await self._living()
        try:
            scores: Sequence[Scores] = await worker.call(
                "score", weights.key, weights.directory, list(rows), top_k
            )
        except (WorkerError, EngineError) as death:
            raise self._died(worker, death) from None
        return scores

    async def close(self) -> None:
        for task in (self._task, self._collecting):
            if task is not None:
                task.cancel()
        if self._worker is not None:
            with contextlib.suppress(WorkerError, EngineError):
                await self._worker.call("close", timeout_s=5.0)
            self._worker.kill()

    async def _living(self) -> Worker:
        async with self._starting:
            if self._worker is None or self._worker.is_dead:
                name = f"{self._name}.{self._num_lives}" if self._num_lives else self._name
                self._num_lives += 1
                worker = self._start_worker(name)
                try:
                    self._node_id = await worker.call("start", timeout_s=self._start_timeout_s)
                except (WorkerError, EngineError) as death:
                    raise self._died(worker, death) from None
                self._worker = worker
                self._turns.switched(self._base_key)
            return self._worker

    async def _serve(self) -> None:
        """Admits requests and takes weights, until nothing is asked any more."""
        while self._turns.num_waiting:
            self._changed.clear()
            worker = None
            try:
                worker = await self._living()
                await self._serve_once(worker)
            except (PartDied, WorkerError, EngineError) as death:
                self._fail(worker, death)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._turns.until_over_s):
                    await self._changed.wait()

    async def _serve_once(self, worker: Worker) -> None:
        if (key := self._turns.due()) is not None:
            await self._switch(worker, key)
        admitted = self._turns.admit()
        if not admitted:
            return
        for one in admitted:
            one.is_submitted = True
        await worker.call("submit", [one for asked in admitted for one in asked.requests])
        if self._collecting is None or self._collecting.done():
            self._collecting = start_task(self._collect(worker), name=self._name, fail=self._failed)

    async def _switch(self, worker: Worker, key: str) -> None:
        """Where the weights are gone, those that wait for them fail, and nothing is switched."""
        (weights,) = {one.weights for one in self._turns.waiting_for(key)}
        self._turns.switched(None)
        try:
            _check_there(weights)
            if not await self._took_published(worker, weights):
                await self._check_whole(weights)
                await worker.call("take_saved", weights.number, weights.directory)
        except (ValueError, OSError, DamagedWeightsError) as error:
            for asked in self._turns.take_waiting_for(key):
                self._fail_one(asked, error)
            return
        self._turns.switched(key)

    async def _check_whole(self, weights: SamplerWeights) -> None:
        """Saved weights, once. Raises Refused for damaged ones."""
        if weights.directory is not None and weights.key not in self._whole:
            await check_whole(weights.path, weights.directory)
            self._whole.add(weights.key)

    async def _took_published(self, worker: Worker, weights: SamplerWeights) -> bool:
        manifest = self._published(weights.number, self._node_id)
        if manifest is None:
            return False
        try:
            await worker.call("take_published", manifest)
        except (FileNotFoundError, DamagedWeightsError):  # the trainer has gone on, or has ended
            return False
        return True

    async def _collect(self, worker: Worker) -> None:
        while self._turns.num_running:
            try:
                found: list[Generation] = await worker.call(
                    "collect", timeout_s=COLLECT_WAIT_S + worker.timeout_s
                )
            except (WorkerError, EngineError) as death:
                self._fail(worker, self._died(worker, death))
                return
            for generation in found:
                _, answer = self._answers.pop(generation.request_id)
                if not answer.done():
                    answer.set_result(generation)
            self._turns.ended(len(found))
            self._wake()

    def _died(self, worker: Worker, error: Exception) -> PartDied:
        worker.end(str(error))
        is_told = isinstance(error, WorkerError)
        return PartDied(str(error) if is_told else f"{worker.name} died: {error}")

    def _fail(self, worker: Worker | None, death: Exception) -> None:
        """All that runs on a replica that is dead, and all that waits; None: none would start."""
        if worker is not self._worker and worker is not None:
            return  # told already
        if worker is not None:
            worker.end(str(death))
        self._worker = None
        error = death if isinstance(death, PartDied) else PartDied(str(death))
        for asked in {id(one): one for one, _ in self._answers.values()}.values():
            self._turns.remove(asked)
            self._fail_one(asked, error)
        self._turns.ended(self._turns.num_running)
        self._wake()

    def _failed(self, error: BaseException) -> None:
        """Fail what runs and waits, and end the worker: nobody serves it any more."""
        report(error)
        self._fail(self._worker, PartDied(f"{self._name} is not served any more: {error!r}"))

    def _fail_one(self, asked: _Asked, error: Exception) -> None:
        for name, answer in asked.answers.items():
            self._answers.pop(name, None)
            if not answer.done():
                answer.set_exception(error)

    def _wake(self) -> None:
        self._changed.set()


def _check_there(weights: SamplerWeights) -> None:
    if weights.directory is not None and not weights.directory.is_dir():
        raise ValueError(
            f"{weights.path} is gone: of sampler weights without a name those of the newest saves "
            "are kept; save them under a name, with save_weights_for_sampler."
        )
