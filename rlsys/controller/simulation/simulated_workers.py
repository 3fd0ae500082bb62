"""Simulated trainers, scorers, pools and disks, which only take time and can fail on demand.

In: latencies in seconds, drawn by functions. Out: the protocols of
rlsys.controller.worker_protocols. Replicas are in simulated_replicas.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rlsys.controller.worker_protocols import (
    ReportScores,
    RolloutMetadata,
    RowsLost,
    Scored,
    ScoreTask,
    StepRowsRef,
    TrainerDied,
    Written,
)
from rlsys.dataflow.store.blocks import BlockRef, layout_of
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import Prompt, StepResult, WeightManifest

T = TypeVar("T")

NUM_PROMPT_TOKENS = 4

LEASES = itertools.count(1 << 20)  # ids for blocks of other writers than replicas


@dataclass(kw_only=True)
class SimulatedPrompts:
    """An endless queue of equal prompts, with `num_rows` in an epoch."""

    num_rows: int = 1 << 30

    def row(self, index: int) -> int:
        """Return the row of a prompt."""
        return index % self.num_rows

    def at(self, index: int) -> Prompt:
        """Return a prompt."""
        return Prompt(
            index=index,
            row=self.row(index),
            token_ids=(1,) * NUM_PROMPT_TOKENS,
            text="?",
            metadata={},
        )


@dataclass(kw_only=True)
class SharedDevices:
    """The users of shared devices; raises AssertionError if both sides use them at once."""

    replicas: set[str] = field(default_factory=set)
    trainers: set[str] = field(default_factory=set)
    num_turns: int = 0  # of training

    def generation_takes(self, name: str) -> None:
        """Record that a replica takes memory."""
        assert not self.trainers, f"{name} takes memory while {sorted(self.trainers)} train"
        self.replicas.add(name)

    def training_takes(self, name: str) -> None:
        """Record that a trainer takes memory."""
        assert not self.replicas, f"{name} takes memory while {sorted(self.replicas)} have some"
        self.num_turns += name not in self.trainers
        self.trainers.add(name)

    def release(self, name: str) -> None:
        """Record that a worker has released its memory."""
        self.replicas.discard(name)
        self.trainers.discard(name)


@dataclass(kw_only=True)
class SimulatedScorer:
    """A scorer that rewards each rollout by `outcome`, after `latency_s`."""

    latency_s: Callable[[], float] = lambda: 0.0
    outcome: Callable[[ScoreTask], RewardResult | RewardFailure] = lambda task: RewardResult(
        total=float(task.index), components={}
    )

    async def score(self, tasks: Sequence[ScoreTask], report: ReportScores) -> None:
        """Score all tasks and report them together."""
        await asyncio.sleep(self.latency_s())
        report({i: Scored(outcome=self.outcome(task)) for i, task in enumerate(tasks)})


@dataclass(kw_only=True)
class SimulatedPool:
    """A frozen model that writes one score per row."""

    writes: str
    latency_s: Callable[[], float] = lambda: 0.0
    num_workers: int = 1
    losing: Callable[[], bool] = lambda: False  # whether rows cannot be read this time
    failure: Callable[[RolloutMetadata], RewardFailure | None] = lambda origin: None  # of a judge
    num_rows: int = 0

    async def run(self, rows: StepRowsRef) -> Written:
        """Write a score for each row: its group id."""
        await asyncio.sleep(self.latency_s())
        if self.losing():
            raise RowsLost("their shard is gone")
        self.num_rows += len(rows)
        failures = {
            place: failure
            for place, origin in enumerate(rows.origins)
            if (failure := self.failure(origin)) is not None
        }
        scores = [
            math.nan if place in failures else float(group_id)
            for place, group_id in enumerate(rows.group_ids)
        ]
        return Written(scalars={self.writes: scores}, failures=failures)


@dataclass(kw_only=True)
class SimulatedTrainer:
    """A trainer that counts steps and records the rows of each."""

    row_s: float = 0.0
    step_s: float = 0.0  # time of an optimizer step
    publish_s: float = 0.0
    busy_s: float = 0.0  # so far
    answer_s: float = 0.0  # travel time of an answer, during which the next call runs
    restart_s: float = 5.0
    loses: int = 0  # optimizer steps that a restart cannot restore
    version: int = 0
    held: int | None = None  # the version of the newest copy
    deaths: int = 0
    num_data: int = 1
    num_stages: int = 1
    attention_tokens: float = 4096.0
    trained: list[list[StepRowsRef]] = field(default_factory=lambda: [[]])  # by step, and the next
    updates: int = 0  # number of updates; several may make a version
    inferred: list[tuple[str, int, list[int]]] = field(default_factory=list)
    """Columns that were inferred, with the version and the group ids."""
    idle_s: list[float] = field(default_factory=list)  # idle time before each part
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    devices: SharedDevices | None = None  # shared with the replicas
    name: str = "trainer-0"
    _busy_until_s: float | None = None
    _died: asyncio.Event = field(default_factory=asyncio.Event)

    def die(self) -> None:
        """Fail all running calls, and later ones until a restart."""
        self.deaths += 1
        self._died.set()
        if self.devices is not None:
            self.devices.release(self.name)

    def infer_s(self, share: StepRowsRef) -> float:
        """Return the time of a forward pass over the rows of one rank."""
        return self.row_s * len(share)

    def train_s(self, share: StepRowsRef) -> float:
        """Return the time of the forward and backward passes over the rows of one rank."""
        return self.row_s * len(share)

    async def take(self, seconds: float) -> None:
        """Take a time for computing."""
        await asyncio.sleep(seconds)

    async def infer(
        self, writes: str, shares: Sequence[StepRowsRef], *, adapters: bool = True
    ) -> Sequence[Written]:
        """Write the column of each share."""

        async def work() -> list[Written]:
            async with self._carrying_out():
                await self.take(max(map(self.infer_s, shares)))
                return [self._write(writes, share) for share in shares]

        return await self._answer(work())

    async def compute(self, stage: str, rows: StepRowsRef) -> Written:
        """Write the columns in the name of the stage."""
        return (await self.infer(stage, [rows]))[0]

    def _write(self, writes: str, rows: StepRowsRef) -> Written:
        """Write one token for each row."""
        if not len(rows):
            return Written()
        self.inferred.append((writes, self.version, list(rows.group_ids)))
        values = [np.zeros(1, np.float32) for _ in range(len(rows))]
        columns = dict.fromkeys(writes.split(" and "), values)
        return Written(block=BlockRef("shard", next(LEASES), 0, layout_of(columns)))

    async def accumulate(self, micro_batches: Sequence[Sequence[StepRowsRef]]) -> None:
        """Record the rows of micro-batches."""

        async def work() -> None:
            async with self._carrying_out() as idle_s:
                self.idle_s.append(idle_s)
                for shares in micro_batches:
                    await self.take(max(map(self.train_s, shares)))
                    self.trained[-1] += shares

        await self._answer(work())

    async def optimizer_step(self, *, last: bool = True) -> StepResult:
        """Count an update, and a version if it is the last one."""

        async def work() -> StepResult:
            async with self._carrying_out():
                await self.take(self.step_s)
                self.updates += 1
                if last:
                    self.version += 1
                    self.trained.append([])
                return StepResult(policy_version=self.version, metrics={}, num_tokens=0)

        return await self._answer(work())

    async def publish(self) -> WeightManifest:
        """Return the manifest of the current version."""

        async def work() -> WeightManifest:
            async with self._carrying_out():
                await self.take(self.publish_s)
                return WeightManifest(version=self.version)

        return await self._answer(work())

    async def watch(self) -> None:
        """Wait until the trainer dies; then raise TrainerDied."""
        await self._died.wait()
        raise TrainerDied("trainer-0 died")

    async def hold(self) -> None:
        """Record the current version as the held one."""

        async def work() -> None:
            async with self._carrying_out():
                self.held = self.version

        await self._answer(work())

    async def release(self) -> None:
        """Release the shared devices."""

        async def work() -> None:
            async with self._carrying_out():
                assert self.devices is not None
                self.devices.release(self.name)

        await self._answer(work())

    async def restart(self, step: int) -> int:
        """Restore the newest state of at most `step` steps."""
        self._died.set()  # after lost rows no rank has died: forget running calls too
        if self.devices is not None:
            self.devices.training_takes(self.name)
        await asyncio.sleep(self.restart_s)
        self._died = asyncio.Event()
        self._lock = asyncio.Lock()
        self.version = max(0, min(step, self.version) - self.loses)
        self.loses = 0
        self.trained = [*self.trained[: self.version], []]
        return self.version

    async def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        died = asyncio.create_task(self._died.wait())
        task = asyncio.create_task(self._answered(work))
        await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            task.cancel()
            await asyncio.wait({task})
            raise TrainerDied("trainer-0 died")
        died.cancel()
        return task.result()

    async def _answered(self, work: Coroutine[Any, Any, T]) -> T:
        answer = await work
        await asyncio.sleep(self.answer_s)
        return answer

    @contextlib.asynccontextmanager
    async def _carrying_out(self) -> AsyncIterator[float]:
        """Run one call at a time, in order; yield the idle time before it."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if self.devices is not None:
                self.devices.training_takes(self.name)
            now = clock()
            yield now - (now if self._busy_until_s is None else self._busy_until_s)
            self._busy_until_s = clock()
            self.busy_s += self._busy_until_s - now


@dataclass(kw_only=True)
class SimulatedDisk:
    """A slow disk for checkpoints, which needs the trainer with the copy until the write ends."""

    trainer_proxy: SimulatedTrainer
    write_s: float = 0.0
    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    async def write(self, step: int) -> None:
        """Write the checkpoint of a step."""
        assert len(self.begun) == len(self.ended), "two checkpoints are written at once"
        assert self.trainer_proxy.held == step, "the copy belongs to another step"
        self.begun.append(step)
        died = asyncio.ensure_future(self.trainer_proxy._died.wait())
        try:
            await asyncio.wait([died], timeout=self.write_s)
            if died.done():
                raise TrainerDied("trainer-0 died during write")
        finally:
            died.cancel()
            self.ended.append(step)


def exponential(rng: random.Random, mean_s: float) -> Callable[[], float]:
    """Return a function that draws exponentially distributed times."""
    return lambda: rng.expovariate(1 / mean_s)
