"""Reward functions in processes that an actor supervises, and the pool of these actors.

    controller ──► RayScorer ──► RewardActor (one of several) ──► RewardRunner ──► processes
                       └──◄ results in parts, as they arrive ◄──┘

An actor runs no user code itself, so it always answers in time. An actor that does not answer has
died, and another one takes over its rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rlsys.common.background_tasks import start_task
from rlsys.common.supervision import REWARD_WORKERS
from rlsys.controller.worker_protocols import (
    ReportScores,
    RowsLost,
    Score,
    Scored,
    ScoreTask,
    Unreadable,
)
from rlsys.rewards import RewardFailure, RewardResult, RewardRunner
from rlsys.rewards.process.partial_results import PartialResults
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.text.tokenizer_boundary import TokenizerBoundary

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerDied, WorkerError
from ..cluster.supervised_pool import SupervisedPool, WorkDropped
from ..store.row_transfer import TEXT_COLUMNS, as_rollouts
from ..store.store_actor import StoreAddress, StoreClient

# Longest time until an actor answers with the results so far.
ANSWER_WITHIN_S = 10.0

# Limit for such an answer on a very busy machine.
ANSWER_LIMIT_S = 60.0

# How long a result waits for others to be sent with.
GATHER_S = 0.05

# Smallest piece of a batch: a call costs as much as some cheap rewards.
MIN_PIECE = 16

# Errors of a call: the process or its node has died, it hangs, or it could not start.
CALL_ERRORS = (WorkerError, ValueError, OSError)


class _WorkerLost(RuntimeError):
    """The actor lives but cannot score its rollouts, because of this error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredPart:
    """New scores of a piece, by the task's place in it."""

    scores: Mapping[int, Score]
    is_last: bool


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class RewardActor(Heartbeat):
    """Actor that scores rollouts in supervised processes."""

    def __init__(
        self,
        make_runner: Callable[[], RewardRunner],
        tokenizer: Any,
        stop: Sequence[str],
        store: StoreAddress,
        tracer: Tracer,
    ) -> None:
        self._tracer = tracer
        self._make_runner = make_runner
        self._runner: RewardRunner | None = None
        self._boundary = TokenizerBoundary(tokenizer)
        self._stop = stop
        self._store = StoreClient(store)
        self._pieces: dict[int, PartialResults[Score]] = {}
        self._work: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the reward functions once.

        Raises:
            ValueError: They cannot be loaded.
        """
        runner = self._make_runner()
        await runner.start()
        self._runner = runner

    async def drain_trace(self) -> TraceBatch:
        """Return the trace records since the last call."""
        return self._tracer.drain()

    async def score(self, number: int, tasks: list[ScoreTask]) -> ScoredPart:
        """Start to score a piece with a new `number`; `more` returns later results."""
        piece = PartialResults[Score](len(tasks))
        self._pieces[number] = piece
        work = start_task(self._score(number, tasks, piece), fail=piece.fail)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return await self.more(number)

    async def more(self, number: int) -> ScoredPart:
        """Return the results since the last answer."""
        piece = self._pieces[number]
        scores = await piece.take(at_most_s=ANSWER_WITHIN_S, gather_s=GATHER_S)
        is_last = piece.is_complete
        if is_last:
            del self._pieces[number]
        return ScoredPart(scores=scores, is_last=is_last)

    async def _score(
        self, number: int, tasks: Sequence[ScoreTask], piece: PartialResults[Score]
    ) -> None:
        by_shard: dict[str, list[int]] = {}
        for place, task in enumerate(tasks):
            by_shard.setdefault(task.cell[0].shard, []).append(place)
        self._tracer.begin("score", number, rollouts=len(tasks))  # pieces overlap
        self._tracer.job_begins()
        try:
            await asyncio.gather(
                *(self._score_shard(tasks, places, piece) for places in by_shard.values())
            )
            await piece.complete()
        except Exception as error:  # noqa: BLE001 - `more` raises it
            piece.fail(error)
        finally:
            self._tracer.job_ends()
            self._tracer.end("score", number)

    async def _score_shard(
        self, tasks: Sequence[ScoreTask], places: Sequence[int], piece: PartialResults[Score]
    ) -> None:
        """Score the tasks at `places`, whose rows are in one shard of the store."""
        assert self._runner is not None
        own = [tasks[place] for place in places]
        try:
            columns = await self._store.get_async([task.cell for task in own], TEXT_COLUMNS)
        except RowsLost:
            for place in places:
                piece.add(place, Unreadable())
            return
        rollouts = as_rollouts(own, columns, self._boundary, self._stop)

        def add(i: int, outcome: RewardResult | RewardFailure) -> None:
            piece.add(places[i], Scored(outcome=outcome))

        self._runner.submit(rollouts, on_result=add, fail=piece.fail)


class RayScorer:
    """Pool of reward actors.

    A batch is divided into pieces, each for the actor with the fewest pending rollouts.
    `start_worker` starts the actor with a number. `on_death` gets a message when an actor was
    replaced.
    """

    def __init__(
        self,
        start_worker: Callable[[int], Worker],
        *,
        num_workers: int,
        on_death: Callable[[str], None],
    ) -> None:
        numbers = itertools.count()
        self._pool = SupervisedPool(
            lambda place: start_worker(next(numbers)),
            self._prepare,
            num_workers=num_workers,
            policy=REWARD_WORKERS,
            on_death=lambda reason, _: on_death(f"{reason}; another worker replaces it"),
            deadly=(WorkerDied, _WorkerLost),
        )
        self._start_timeout_s = ANSWER_LIMIT_S
        self._num_pieces = 0

    @property
    def workers(self) -> list[Worker]:
        """Return the current actors."""
        return self._pool.workers

    async def start(self, timeout_s: float) -> None:
        """Start all actors; `timeout_s` is also the limit of their successors.

        Raises the error that keeps them from starting.
        """
        self._start_timeout_s = timeout_s
        try:
            await self._pool.start()
        except _WorkerLost as lost:
            raise lost.error from None

    async def score(self, tasks: Sequence[ScoreTask], tell: ReportScores) -> None:
        """Score tasks; `tell` gets the scores in parts, by the task's place.

        Errors of reward functions and deaths of actors become failed scores.
        """
        num_pieces = max(1, min(self._pool.num_workers, len(tasks) // MIN_PIECE))
        async with asyncio.TaskGroup() as pieces:
            for i in range(num_pieces):
                places = range(i, len(tasks), num_pieces)
                pieces.create_task(self._score_piece({p: tasks[p] for p in places}, tell))

    async def _score_piece(self, left: dict[int, ScoreTask], tell: ReportScores) -> None:
        """Score the tasks `left`, by place."""

        async def ask(worker: Worker) -> None:
            async for scores in self._ask(worker, left):
                for place in scores:
                    del left[place]
                tell(scores)

        try:
            await self._pool.run(ask, size=len(left))
        except WorkDropped as dropped:
            message = f"the rollout is not scored: {dropped}"
            failure = RewardFailure(kind="crash", reward="reward worker", message=message)
            tell(dict.fromkeys(left, Scored(outcome=failure)))

    async def _ask(
        self, worker: Worker, left: Mapping[int, ScoreTask]
    ) -> AsyncIterator[dict[int, Score]]:
        places = list(left)
        self._num_pieces = number = self._num_pieces + 1
        part = await _part(worker, "score", number, list(left.values()))
        while True:
            yield {places[i]: score for i, score in part.scores.items()}
            if part.is_last:
                return
            part = await _part(worker, "more", number)

    async def _prepare(self, worker: Worker) -> None:
        with _deadly_errors():
            await worker.call("start", timeout_s=self._start_timeout_s)


async def _part(worker: Worker, method: str, *args: Any) -> ScoredPart:
    with _deadly_errors():
        part: ScoredPart = await worker.call(method, *args, timeout_s=ANSWER_LIMIT_S)
    return part


@contextlib.contextmanager
def _deadly_errors() -> Iterator[None]:
    """Raise WorkerDied or _WorkerLost for an error of a call."""
    try:
        yield
    except WorkerDied:
        raise
    except CALL_ERRORS as error:
        raise _WorkerLost(error) from error
