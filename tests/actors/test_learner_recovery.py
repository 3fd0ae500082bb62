"""The real trainer over deaths: its next steps are those of a trainer that nobody disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.calls import Worker
from actors.layouts import Layouts
from actors.learner import RayLearner
from actors.snapshots import SnapshotKeepers
from actors.store import StoreAddress
from actors.trainer import TrainerActor
from rlsys.checkpoint import Checkpoint
from rlsys.mesh import Layout
from rlsys.observe.trace import Tracer
from rlsys.types import MicroBatch, StepResult
from rlsys.workers import LearnerDied
from scripts.ranks import on_ranks
from tests.actors.no_rows import NO_ROWS
from tests.clusters import NODE_OPTIONS, joined_cluster
from tests.engines.training_harness import make_engine, make_rows, tiny_model

TIMEOUT_S = 300.0
NUM_PARTS = 3


class SelfSupplied:
    """A real engine that trains on rows of its own: those of its step, part and rank."""

    def __init__(self, rank: int, world_size: int, directory: Path) -> None:
        self._engine = make_engine(
            directory / "model", rank=rank, world_size=world_size, warmup_steps=3
        )
        self._rank, self._world_size = rank, world_size
        self._num_parts = 0
        with (directory / f"pid-{rank}").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def accumulate(self, _: MicroBatch) -> None:
        rows = make_rows(6, seed=NUM_PARTS * self._engine.policy_version + self._num_parts)
        self._num_parts = (self._num_parts + 1) % NUM_PARTS
        self._engine.accumulate(MicroBatch(rows=rows[self._rank :: self._world_size]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class EngineFactory:
    num_ranks: int
    directory: Path

    def __call__(self, rank: int, host: str, port: int) -> Any:
        import torch

        from rlsys.engines.training.ranks import init_process_group

        torch.set_num_threads(1)
        if self.num_ranks > 1:
            init_process_group(rank, self.num_ranks, host, port, "cpu", TIMEOUT_S)
        return SelfSupplied(rank, self.num_ranks, self.directory)


def undisturbed(rank: int, world_size: int, directory: Path) -> list[StepResult]:
    engine = SelfSupplied(rank, world_size, directory)
    results = []
    for _ in range(4):
        for _ in range(NUM_PARTS):
            engine.accumulate(MicroBatch(rows=[]))
        results.append(engine.optimizer_step())
    return results


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with joined_cluster(__file__, num_cpus=0) as cluster:
        yield cluster


@contextlib.contextmanager
def hired(
    directory: Path, num_ranks: int, newest_checkpoint: Callable[[], Checkpoint | None]
) -> Iterator[RayLearner]:
    """Its ranks keep their places in one placement group, as those of a run do."""
    group = placement_group([{"CPU": 1}] * num_ranks)

    def hire(rank: int) -> Worker:
        actor: Any = TrainerActor
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        handle = actor.options(num_cpus=1, scheduling_strategy=place).remote(
            rank,
            EngineFactory(num_ranks, directory),
            1,
            StoreAddress(shards=(), timeout_s=TIMEOUT_S),
            Tracer(f"trainer-{rank}", max_pending=0),
        )
        return Worker(
            f"trainer-{rank}", handle, timeout_s=TIMEOUT_S, heartbeat_timeout_s=60.0, ordered=True
        )

    learner = RayLearner(
        hire,
        SnapshotKeepers(timeout_s=TIMEOUT_S, heartbeat_timeout_s=60.0),
        layouts=Layouts([Layout(dp_shard=num_ranks)]),
        num_snapshots=3,
        start_timeout_s=TIMEOUT_S,
        newest_checkpoint=newest_checkpoint,
        warm_start_dir=directory / "warm_start",
    )
    try:
        yield learner
    finally:
        learner.close()
        for rank in learner.ranks:
            rank.kill()
        remove_placement_group(group)  # else it is reserved anew on the next test's node


async def step(learner: RayLearner, num_ranks: int) -> StepResult:
    parts = [learner.accumulate([[NO_ROWS] * num_ranks]) for _ in range(NUM_PARTS)]
    accumulated = [asyncio.create_task(part) for part in parts]
    stepped = asyncio.create_task(learner.optimizer_step())
    await asyncio.gather(*accumulated, stepped)
    return stepped.result()


async def step_for_ever(learner: RayLearner) -> None:
    while True:
        await step(learner, 1)


def pid(directory: Path, rank: int) -> int:
    return int((directory / f"pid-{rank}").read_text().split()[-1])


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_the_steps_after_a_death_are_those_of_an_undisturbed_run(
    cluster: Any, tmp_path: Path, num_ranks: int
) -> None:
    tiny_model(tmp_path / "model")
    expected = [
        (result.metrics, result.num_tokens)
        for result in on_ranks(num_ranks, undisturbed, tmp_path)[0]
    ]
    node = cluster.add_node(num_cpus=num_ranks, **NODE_OPTIONS)

    async def run() -> None:
        with hired(tmp_path, num_ranks, lambda: None) as learner:
            await learner.start()
            found = [await step(learner, num_ranks)]
            os.kill(pid(tmp_path, num_ranks - 1), signal.SIGKILL)  # between steps
            with pytest.raises(LearnerDied):
                await step(learner, num_ranks)
            assert await learner.restart(1) == 1
            found += [await step(learner, num_ranks), await step(learner, num_ranks)]
            await asyncio.create_task(learner.accumulate([[NO_ROWS] * num_ranks]))
            os.kill(pid(tmp_path, 0), signal.SIGKILL)  # within one
            with pytest.raises(LearnerDied):
                await step(learner, num_ranks)
            assert await learner.restart(3) == 3
            found.append(await step(learner, num_ranks))
        assert [(result.metrics, result.num_tokens) for result in found] == expected

    try:
        asyncio.run(run())
    finally:
        cluster.remove_node(node)


def test_a_lost_node_costs_what_came_after_the_newest_checkpoint(
    cluster: Any, tmp_path: Path
) -> None:
    """The rank's place is reserved anew on the node that is left."""
    tiny_model(tmp_path / "model")
    checkpoint = Checkpoint(1, tmp_path / "step_000001")
    first = cluster.add_node(num_cpus=1, **NODE_OPTIONS)

    async def run() -> None:
        newest = lambda: checkpoint if checkpoint.path.exists() else None  # noqa: E731
        with hired(tmp_path, 1, newest) as learner:
            await learner.start()
            assert learner.node_id == first.node_id
            await step(learner, 1)
            await learner.save(checkpoint.trainer_dir)
            second = await step(learner, 1)
            third = await step(learner, 1)
            other = cluster.add_node(num_cpus=1, **NODE_OPTIONS)
            cluster.remove_node(first, allow_graceful=False)
            with pytest.raises(LearnerDied):
                await step_for_ever(learner)  # its processes may answer for a moment longer
            assert await learner.restart(99) == 1
            assert learner.node_id == other.node_id
            assert (await step(learner, 1)).metrics == second.metrics
            assert (await step(learner, 1)).metrics == third.metrics

    asyncio.run(run())
