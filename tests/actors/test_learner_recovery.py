"""Real trainers over deaths: their next steps equal those of an undisturbed trainer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from actors.cluster.calls import Worker
from actors.cluster.placement import Need, Place, places_on_live_nodes
from actors.store.store_actor import StoreAddress
from actors.trainer.elastic import Layouts
from actors.trainer.memory_checkpoints import SnapshotHolders
from actors.trainer.trainer_actor import TrainerActor
from actors.trainer.trainer_proxy import RayTrainerProxy
from rlsys.config.parallel_layout import ParallelLayout, parse_layouts
from rlsys.controller.worker_protocols import TrainerDied
from rlsys.runs.checkpoint import Checkpoint
from rlsys.runs.observe.trace import Tracer
from rlsys.types import MicroBatch, StepResult
from scripts.ranks import on_ranks
from tests.actors.no_rows import NO_ROWS
from tests.clusters import NODE_OPTIONS, joined_cluster
from tests.engines.training_harness import make_engine, make_rows, tiny_model

TIMEOUT_S = 300.0
NUM_PARTS = 3


class SelfSupplied:
    """Real engine that trains on its own rows, determined by step, part and rank."""

    def __init__(self, rank: int, world_size: int, directory: Path, layout: str = "") -> None:
        self._layout = ParallelLayout.parse(layout or f"dp{world_size}")
        self._engine = make_engine(
            directory / "model",
            layout=str(self._layout),
            rank=rank,
            world_size=world_size,
            warmup_steps=3,
        )
        self._rank = rank
        self._num_parts = 0
        with (directory / f"pid-{rank}").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def accumulate(self, _: MicroBatch) -> None:
        rows = make_rows(6, seed=NUM_PARTS * self._engine.policy_version + self._num_parts)
        self._num_parts = (self._num_parts + 1) % NUM_PARTS
        share = rows[self._layout.data_index(self._rank) :: self._layout.num_data]
        self._engine.accumulate(MicroBatch(rows=share))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class EngineFactory:
    layout: ParallelLayout
    directory: Path

    def __call__(self, rank: int, host: str, port: int) -> Any:
        import torch

        from rlsys.engines.training.ranks import init_process_group

        torch.set_num_threads(1)
        num_ranks = self.layout.num_ranks
        if num_ranks > 1:
            init_process_group(rank, num_ranks, host, port, "cpu", TIMEOUT_S)
        return SelfSupplied(rank, num_ranks, self.directory, str(self.layout))


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
def started_workers(
    directory: Path,
    layout: str,
    newest_checkpoint: Callable[[], Checkpoint | None],
    *,
    lost: Collection[int] = (),
    messages: list[str] | None = None,
) -> Iterator[RayTrainerProxy]:
    """Start ranks with their places in one placement group, as in a run.

    `lost` contains the numbers of places that count as lost, `messages` collects the reports.
    """
    own = parse_layouts(layout)
    group = placement_group([{"CPU": 1}] * own[0].num_ranks)
    places = [
        Place(
            need=Need(name=f"trainer-{rank}", num_cpus=1, num_gpus=0, fix=""),
            group=group,
            index=rank,
        )
        for rank in range(own[0].num_ranks)
    ]
    layouts = Layouts(
        own,
        lambda: {
            one: node for one, node in places_on_live_nodes(places).items() if one not in lost
        },
    )

    def start_worker(rank: int) -> Worker:
        actor: Any = TrainerActor
        handle = actor.options(**places[layouts.places[rank]].options).remote(
            rank,
            EngineFactory(layouts.current, directory),
            1,
            StoreAddress(shards=(), timeout_s=TIMEOUT_S),
            Tracer(f"trainer-{rank}", max_pending=0),
        )
        return Worker(
            f"trainer-{rank}", handle, timeout_s=TIMEOUT_S, heartbeat_timeout_s=60.0, ordered=True
        )

    trainer_proxy = RayTrainerProxy(
        start_worker,
        SnapshotHolders(timeout_s=TIMEOUT_S, heartbeat_timeout_s=60.0),
        layouts=layouts,
        report=lambda line: None if messages is None else messages.append(line),
        num_snapshots=3,
        start_timeout_s=TIMEOUT_S,
        newest_checkpoint=newest_checkpoint,
        warm_start_dir=directory / "warm_start",
    )
    try:
        yield trainer_proxy
    finally:
        trainer_proxy.close()
        for rank in trainer_proxy.ranks:
            rank.kill()
        remove_placement_group(group)  # else Ray reserves it again on the next test's node


async def step(trainer_proxy: RayTrainerProxy, num_ranks: int) -> StepResult:
    parts = [trainer_proxy.accumulate([[NO_ROWS] * num_ranks]) for _ in range(NUM_PARTS)]
    accumulated = [asyncio.create_task(part) for part in parts]
    stepped = asyncio.create_task(trainer_proxy.optimizer_step())
    await asyncio.gather(*accumulated, stepped)
    return stepped.result()


async def step_for_ever(trainer_proxy: RayTrainerProxy) -> None:
    while True:
        await step(trainer_proxy, trainer_proxy.num_data)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for an effect of Ray."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pid(directory: Path, rank: int) -> int:
    return int((directory / f"pid-{rank}").read_text().split()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
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
        with started_workers(tmp_path, f"dp{num_ranks}", lambda: None) as trainer_proxy:
            await trainer_proxy.start()
            found = [await step(trainer_proxy, num_ranks)]
            os.kill(pid(tmp_path, num_ranks - 1), signal.SIGKILL)  # between steps
            with pytest.raises(TrainerDied):
                await step(trainer_proxy, num_ranks)
            assert await trainer_proxy.restart(1) == 1
            found += [await step(trainer_proxy, num_ranks), await step(trainer_proxy, num_ranks)]
            await asyncio.create_task(trainer_proxy.accumulate([[NO_ROWS] * num_ranks]))
            os.kill(pid(tmp_path, 0), signal.SIGKILL)  # within one
            with pytest.raises(TrainerDied):
                await step(trainer_proxy, num_ranks)
            assert await trainer_proxy.restart(3) == 3
            found.append(await step(trainer_proxy, num_ranks))
        assert [(result.metrics, result.num_tokens) for result in found] == expected

    try:
        asyncio.run(run())
    finally:
        cluster.remove_node(node)


@pytest.mark.slow
def test_a_lost_node_costs_what_came_after_the_newest_checkpoint(
    cluster: Any, tmp_path: Path
) -> None:
    # Ray reserves the rank's place on the remaining node.
    tiny_model(tmp_path / "model")
    checkpoint = Checkpoint(1, tmp_path / "step_000001")
    first = cluster.add_node(num_cpus=1, **NODE_OPTIONS)
    nodes = [first]

    async def run() -> None:
        newest = lambda: checkpoint if checkpoint.path.exists() else None  # noqa: E731
        with started_workers(tmp_path, "dp1", newest) as trainer_proxy:
            await trainer_proxy.start()
            assert trainer_proxy.node_id == first.node_id
            await step(trainer_proxy, 1)
            await trainer_proxy.save(checkpoint.trainer_dir)
            second = await step(trainer_proxy, 1)
            third = await step(trainer_proxy, 1)
            other = cluster.add_node(num_cpus=1, **NODE_OPTIONS)
            nodes.append(other)
            nodes.remove(first)
            cluster.remove_node(first, allow_graceful=False)
            with pytest.raises(TrainerDied):
                await step_for_ever(trainer_proxy)  # its processes may answer for a moment longer
            assert await trainer_proxy.restart(99) == 1
            assert trainer_proxy.node_id == other.node_id
            assert (await step(trainer_proxy, 1)).metrics == second.metrics
            assert (await step(trainer_proxy, 1)).metrics == third.metrics

    try:
        asyncio.run(run())
    finally:
        for node in nodes:
            cluster.remove_node(node)


def assert_same_steps(found: list[StepResult], expected: list[StepResult]) -> None:
    """Compare steps up to rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-3, abs=1e-5)
        assert (one.policy_version, one.num_tokens) == (other.policy_version, other.num_tokens)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_continues_without_a_lost_place_and_grows_when_it_returns(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All snapshots are in the memory of one node, so that of the lost rank is still there.
    monkeypatch.setattr("actors.trainer.elastic.PATIENCE_S", 0.5)
    monkeypatch.setattr("actors.trainer.elastic.WATCH_EVERY_S", 0.1)
    tiny_model(tmp_path / "model")
    expected = on_ranks(1, undisturbed, tmp_path)[0]
    node = cluster.add_node(num_cpus=2, **NODE_OPTIONS)
    lost: set[int] = set()
    messages: list[str] = []

    async def run() -> None:
        with started_workers(
            tmp_path, "dp2,dp1", lambda: None, lost=lost, messages=messages
        ) as trainer_proxy:
            await trainer_proxy.start()
            found = [await step(trainer_proxy, 2)]
            lost.add(0)
            os.kill(pid(tmp_path, 0), signal.SIGKILL)
            with pytest.raises(TrainerDied):
                await step(trainer_proxy, 2)
            assert await trainer_proxy.restart(1) == 1
            assert (trainer_proxy.num_data, len(trainer_proxy.ranks)) == (1, 1)
            assert not trainer_proxy.can_grow_now
            found.append(await step(trainer_proxy, 1))
            os.kill(pid(tmp_path, 0), signal.SIGKILL)  # a death in the smaller layout
            with pytest.raises(TrainerDied):
                await step(trainer_proxy, 1)
            assert await trainer_proxy.restart(2) == 2
            found.append(await step(trainer_proxy, 1))
            lost.clear()
            await asyncio.to_thread(wait_until, lambda: trainer_proxy.can_grow_now)
            await trainer_proxy.snapshot()
            assert await trainer_proxy.restart(3) == 3
            assert (trainer_proxy.num_data, len(trainer_proxy.ranks)) == (2, 2)
            found.append(await step(trainer_proxy, 2))
            assert_same_steps(found, expected)

    try:
        asyncio.run(run())
    finally:
        cluster.remove_node(node)
    [smaller, larger] = messages
    assert smaller.startswith("policy changed its layout from dp2 to dp1; ")
    assert smaller.endswith(" s, 0.0 KiB between nodes")
    assert larger.startswith("policy changed its layout from dp1 to dp2; ")
    assert larger.endswith(" between nodes")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["dp2x1,dp1", "dp2,dp1"])
def test_a_node_less_and_a_node_more(cluster: Any, tmp_path: Path, layout: str) -> None:
    # One of two copies is left, or one of two shards is lost and a checkpoint has both.
    tiny_model(tmp_path / "model")
    expected = on_ranks(1, undisturbed, tmp_path)[0]
    nodes = [cluster.add_node(num_cpus=1, **NODE_OPTIONS) for _ in range(2)]
    checkpoint = Checkpoint(1, tmp_path / "step_000001")
    messages: list[str] = []
    from_memory = layout == "dp2x1,dp1"

    async def run() -> None:
        newest = lambda: checkpoint if checkpoint.path.exists() else None  # noqa: E731
        with started_workers(tmp_path, layout, newest, messages=messages) as trainer_proxy:
            await trainer_proxy.start()
            await step(trainer_proxy, 2)
            await trainer_proxy.save(checkpoint.trainer_dir)
            found = [await step(trainer_proxy, 2)]
            (own,) = (one for one in nodes if one.node_id == trainer_proxy.node_id)
            nodes.remove(own)
            cluster.remove_node(own, allow_graceful=False)  # rank 0's
            with contextlib.suppress(ProcessLookupError):  # Ray ends it some steps later
                os.kill(pid(tmp_path, 0), signal.SIGKILL)
            with pytest.raises(TrainerDied):
                await step_for_ever(trainer_proxy)
            restored = await trainer_proxy.restart(2)
            assert restored == (2 if from_memory else 1)
            assert trainer_proxy.node_id == nodes[0].node_id
            if restored == 1:
                found = [await step(trainer_proxy, 1)]
            found.append(await step(trainer_proxy, 1))
            nodes.append(cluster.add_node(num_cpus=1, **NODE_OPTIONS))
            await asyncio.to_thread(wait_until, lambda: trainer_proxy.can_grow_now)
            await trainer_proxy.snapshot()
            assert await trainer_proxy.restart(3) == 3
            found.append(await step(trainer_proxy, 2))
            assert_same_steps(found, expected[1:])

    try:
        asyncio.run(run())
    finally:
        for node in nodes:
            cluster.remove_node(node)
    smaller, larger = messages
    before = layout.partition(",")[0]
    assert smaller.startswith(f"policy changed its layout from {before} to dp1; ")
    assert smaller.endswith(" s, 0.0 KiB between nodes" if from_memory else " step_000001")
    assert larger.startswith(f"policy changed its layout from dp1 to {before}; ")
    assert larger.endswith(" between nodes")
