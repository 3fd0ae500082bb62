"""Frozen models as Ray actors: references, teachers, reward models and judges.

RayPool ──► rows, to the least loaded worker ──► InferenceActor: model, store ──► written column
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import ray

from rlsys.common.supervision import FROZEN_MODELS
from rlsys.controller.worker_protocols import PoolDied, StepRowsRef, Written
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.rewards import RewardFailure
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.text.tokenizer_boundary import TokenizerBoundary

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerDied, loading_failure
from ..cluster.supervised_pool import SupervisedPool, WorkDropped
from ..store.row_transfer import TEXT_COLUMNS, as_rollouts, read_rows, write_column
from ..store.store_actor import StoreAddress, StoreClient

if TYPE_CHECKING:
    from rlsys.engines.inference.frozen_model import InferenceEngine
    from rlsys.engines.inference.judge import JudgeEngine


class Answerer(Protocol):
    """The use that a worker makes of its model."""

    def answer(self, rows: StepRowsRef, store: StoreClient) -> Written:
        """Compute a column of rows. Raises RowsLost, and EngineError if its engine dies."""

    def close(self) -> None:
        """End processes that would outlive the worker."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Values that a model computes of rows, one per token or one per row."""

    engine: InferenceEngine
    writes: str
    per_token: bool

    def answer(self, rows: StepRowsRef, store: StoreClient) -> Written:
        """Compute and write the values of rows."""
        made = self.engine.infer(read_rows(rows, store))
        return write_column(self.writes, made, store, per_token=self.per_token)

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Scores that a judge gives rollouts. `boundary` and `stop` are the policy's."""

    engine: JudgeEngine
    writes: str
    boundary: TokenizerBoundary
    stop: Sequence[str]

    def answer(self, rows: StepRowsRef, store: StoreClient) -> Written:
        """Judge and write the scores of rows."""
        arrays = store.get_batch({name: rows.cells[name] for name in TEXT_COLUMNS})
        rollouts = as_rollouts(rows.origins, arrays, self.boundary, self.stop)
        failures: dict[int, RewardFailure] = {}
        scores: list[float] = []
        for place, verdict in enumerate(self.engine.judge(rollouts)):
            if isinstance(verdict, RewardFailure):
                failures[place] = verdict
                verdict = math.nan
            scores.append(verdict)
        return Written(scalars={self.writes: scores}, failures=failures)

    def close(self) -> None:
        """End the judge's engine."""
        self.engine.close()


@ray.remote(concurrency_groups={"concurrent": 1, **HEARTBEAT_GROUP})
class InferenceActor(Heartbeat):
    """Actor with a frozen model. `writes` is the column that it computes."""

    def __init__(
        self,
        make_answerer: Callable[[], Answerer],
        writes: str,
        store: StoreAddress,
        tracer: Tracer,
    ) -> None:
        self._make_answerer = make_answerer
        self._writes = writes
        self._store = StoreClient(store)
        self._tracer = tracer
        self._answerer: Answerer | None = None  # set by `start`

    def node(self) -> str:
        """Return the id of its node."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def start(self, store: StoreAddress) -> None:
        """Load the model, after the store has a shard on this node."""
        self._store = StoreClient(store)
        self._answerer = self._make_answerer()

    def run(self, rows: StepRowsRef) -> Written:
        """Compute the column of rows and write it."""
        assert self._answerer is not None
        with self._tracer.working("inference", self._writes, rows=len(rows)):
            return self._answerer.answer(rows, self._store)

    def use_store(self, store: StoreAddress) -> None:
        """Use another address of the store after a shard was replaced."""
        self._store = StoreClient(store)

    def close(self) -> None:
        """End the model's processes."""
        if self._answerer is not None:
            self._answerer.close()

    @ray.method(concurrency_group="concurrent")
    def drain_trace(self) -> TraceBatch:
        """Return the trace records since the last call."""
        return self._tracer.drain()


class RayPool:
    """Workers of one frozen model.

    Args:
        start_worker: Starts the actor of a place, by number.
        open_store: Ensures that a node has a shard of the store, and returns the store's address.
        num_workers: Number of workers.
        on_death: Gets a message when a worker was replaced.
        model: Name of the model.
        runs: User code that the workers run, in words.
    """

    def __init__(
        self,
        start_worker: Callable[[int], Worker],
        open_store: Callable[[str], Awaitable[StoreAddress]],
        *,
        num_workers: int,
        on_death: Callable[[str], None],
        model: str = "reference",
        runs: str = "",
    ) -> None:
        self._model = model
        self._runs = runs
        self._open_store = open_store
        self._pool = SupervisedPool(
            start_worker,
            self._prepare,
            num_workers=num_workers,
            policy=FROZEN_MODELS,
            on_death=lambda reason, _: on_death(f"{reason}; another worker replaces it"),
            deadly=(WorkerDied, EngineError),
        )
        self._start_timeout_s = 0.0

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        return self._pool.num_workers

    @property
    def workers(self) -> list[Worker]:
        """Return the current workers."""
        return self._pool.workers

    async def start(self, timeout_s: float) -> None:
        """Start all workers; `timeout_s` is also the limit of their successors.

        Raises the error that keeps them from starting.
        """
        self._start_timeout_s = timeout_s
        try:
            await self._pool.start()
        except WorkerDied as death:
            raise WorkerDied(loading_failure(self._model, death)) from None

    async def run(self, rows: StepRowsRef) -> Written:
        """Compute rows on the least loaded worker; retry on another one if it dies.

        Raises:
            PoolDied: Too many workers in a row died with these rows, or none starts.
        """

        async def ask(worker: Worker) -> Written:
            written: Written = await worker.call("run", rows)
            return written

        try:
            return await self._pool.run(ask, size=len(rows))
        except WorkDropped as dropped:
            cause = f"; a possible cause is your {self._runs}" if self._runs else ""
            raise PoolDied(f"rows of a step are not computed{cause}: {dropped}") from None

    async def _prepare(self, worker: Worker) -> None:
        node_id = await worker.call("node", timeout_s=self._start_timeout_s)
        store = await self._open_store(node_id)
        await worker.call("start", store, timeout_s=self._start_timeout_s)
