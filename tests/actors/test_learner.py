"""Trainer ranks as real processes that are killed, suspended and restarted.

The engine is a fake: its state is a row of numbers that records the micro-batches of each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.cluster.calls import Worker, WorkerDied, WorkerError
from actors.store.store_actor import StoreAddress
from actors.trainer.elastic import Layouts
from actors.trainer.memory_checkpoints import SnapshotHolders
from actors.trainer.trainer_actor import TrainerActor
from actors.trainer.trainer_proxy import RayTrainerProxy
from rlsys.common.user_functions import FunctionFailed
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.controller.worker_protocols import TrainerDied
from rlsys.engines.training.snapshot import SnapshotFile, snapshot_bytes
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.runs.checkpoint import Checkpoint
from rlsys.runs.observe.trace import Tracer
from rlsys.types import MicroBatch, StepResult, WeightManifest
from tests.actors.no_rows import NO_ROWS
from tests.clusters import joined_cluster
from tests.tiers import rest_slow

TIMEOUT_S = 300.0


class CountingEngine:
    """Engine whose state is the number of parts in each step so far.

    It writes a mark for each call. Files in `marks` make one rank die at its start, or its next
    call hang, as in a collective that another rank has left, or raise.
    """

    def __init__(self, rank: int, marks: Path) -> None:
        self._rank = rank
        self._marks = marks
        self._state = {"parts": torch.zeros(16)}
        self._num_parts = 0
        self.policy_version = 0
        self._mark("pid", str(os.getpid()))
        if self._requested("die") is not None:
            os._exit(1)

    def accumulate(self, micro_batch: MicroBatch) -> None:
        self._mark("accumulate")
        self._hang_if_requested()
        if error := self._requested("raise"):
            errors = {
                "nan": FloatingPointError,
                "own": FunctionFailed,
                "bug": KeyError,
                "gloo": RuntimeError,
                "damaged": DamagedWeightsError,
            }
            raise errors[error](f"gloo of rank {self._rank}")
        self._num_parts += 1

    def optimizer_step(self, *, last: bool = True) -> StepResult:
        self._mark("optimizer_step")
        self._state["parts"][self.policy_version] = self._num_parts
        self._num_parts = 0
        self.policy_version += 1
        parts = [int(count) for count in self._state["parts"][: self.policy_version]]
        metrics = {f"parts/{step}": float(count) for step, count in enumerate(parts)}
        return StepResult(policy_version=self.policy_version, metrics=metrics, num_tokens=0)

    attention_tokens = 4096.0

    def snapshot_bytes(self, num_snapshots: int) -> int:
        return snapshot_bytes(self._state, num_snapshots)

    def open_snapshots(self, path: str, name: str) -> Any:
        return SnapshotFile(path, name, self._state)

    def snapshot(self, file: Any) -> None:
        self._mark("snapshot")
        file.write(self.policy_version, self._state)

    def restore(self, file: Any, step: int) -> None:
        file.read(step, self._state)
        self.policy_version = step

    def sft_step(self, *_: Any, learning_rate: float) -> float:
        self._state["parts"][15] += 1
        return 0.0

    def reset_optimizer(self) -> None:
        pass

    def hold(self, file: Any) -> Any:
        file.write(self.policy_version, self._state)
        self._held = file.hold(self.policy_version)
        return SimpleNamespace(write=self.write, release=file.release)

    def write(self, directory: Path) -> bytes:
        """Write the held state."""
        # imports torch, which takes a second
        from torch.distributed.checkpoint.metadata import Metadata

        self._mark("write")
        parts = " ".join(map(str, self._held["parts"].tolist()))
        directory.mkdir(parents=True, exist_ok=True)
        if self._requested("wait-write") is not None:
            wait_until((self._marks / "go").exists)
        (directory / f"{self._rank}").write_text(parts)
        return pickle.dumps((Metadata({}), []))

    def release(self) -> None:
        self._mark("release")

    def take_back(self) -> None:
        self._mark("take_back")

    def load(self, directory: Path) -> None:
        parts = [float(part) for part in (directory / f"{self._rank}").read_text().split()]
        self._state["parts"].copy_(torch.tensor(parts))
        name = directory.parent.name  # directory of a checkpoint, named after its step
        self.policy_version = int(name) if name.isdigit() else 0

    def export(self, directory: Path) -> None:
        self._mark("export")
        self._hang_if_requested()
        directory.write_text(str(self.policy_version))

    def close(self) -> None:
        pass

    def _hang_if_requested(self) -> None:
        if self._requested("hang") is not None:
            time.sleep(10 * TIMEOUT_S)

    def _requested(self, what: str) -> str | None:
        """Return the text of a request once, then None."""
        path = self._marks / f"{what}-{self._rank}"
        if not path.exists():
            return None
        text = path.read_text()
        path.unlink()
        return text

    def _mark(self, name: str, text: str = "") -> None:
        with (self._marks / f"{name}-{self._rank}").open("a") as file:
            file.write(text + "\n")


@dataclass(frozen=True)
class EngineFactory:
    marks: Path

    def __call__(self, rank: int, host: str, port: int) -> Any:
        return CountingEngine(rank, self.marks)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for the effect of another process."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class World:
    """Trainer and the marks of its engines."""

    num_ranks: int
    marks: Path
    trainer_proxy: RayTrainerProxy
    holders: SnapshotHolders
    checkpoints: list[Checkpoint] = field(default_factory=list)

    async def step(self, num_parts: int) -> list[int]:
        """Take a step of so many parts; return the parts of all steps so far.

        All calls are sent at once, as the controller does.
        """
        parts = [
            self.trainer_proxy.accumulate([[NO_ROWS] * self.num_ranks]) for _ in range(num_parts)
        ]
        accumulated = [asyncio.create_task(part) for part in parts]
        stepped = asyncio.create_task(self.trainer_proxy.optimizer_step())
        await asyncio.gather(*accumulated, stepped)
        result = stepped.result()
        assert result.policy_version == len(result.metrics)
        return [int(count) for count in result.metrics.values()]

    async def num_sft_steps(self) -> int:
        directory = self.marks / f"saved-{time.monotonic_ns()}"
        await self.trainer_proxy.save(directory)
        return int(float((directory / "0").read_text().split()[15]))

    def pid(self, rank: int) -> int:
        return int((self.marks / f"pid-{rank}").read_text().split()[-1])

    def count(self, name: str) -> int:
        path = self.marks / name
        return len(path.read_text().splitlines()) if path.exists() else 0

    async def until(self, name: str, count: int) -> None:
        """Wait until a rank has started this call so many times."""
        await asyncio.to_thread(wait_until, lambda: self.count(name) >= count)

    def request(self, name: str, text: str = "") -> None:
        (self.marks / name).write_text(text)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with joined_cluster(__file__, num_cpus=2):
        yield


@contextlib.asynccontextmanager
async def running(
    marks: Path,
    *,
    num_ranks: int = 1,
    snapshot_every: int = 1,
    heartbeat_s: float = TIMEOUT_S,
) -> AsyncIterator[World]:
    def start_worker(rank: int) -> Worker:
        actor: Any = TrainerActor
        handle = actor.options(num_cpus=0).remote(
            rank,
            EngineFactory(marks),
            snapshot_every,
            StoreAddress(shards=(), timeout_s=TIMEOUT_S),
            Tracer(f"trainer-{rank}", max_pending=0),
        )
        return Worker(
            f"trainer-{rank}",
            handle,
            timeout_s=TIMEOUT_S,
            heartbeat_timeout_s=heartbeat_s,
            ordered=True,
        )

    holders = SnapshotHolders(timeout_s=TIMEOUT_S, heartbeat_timeout_s=TIMEOUT_S)
    checkpoints: list[Checkpoint] = []
    trainer_proxy = RayTrainerProxy(
        start_worker,
        holders,
        layouts=Layouts([ParallelLayout(dp_shard=num_ranks)]),
        num_snapshots=3 if snapshot_every else 0,
        start_timeout_s=TIMEOUT_S,
        newest_checkpoint=lambda: checkpoints[-1] if checkpoints else None,
        warm_start_dir=marks / "warm_start",
    )
    await trainer_proxy.start()
    try:
        yield World(num_ranks, marks, trainer_proxy, holders, checkpoints)
    finally:
        trainer_proxy.close()
        for rank in trainer_proxy.ranks:
            rank.kill()


def test_a_rank_killed_between_steps_goes_on_from_the_last_one(
    cluster: None, tmp_path: Path
) -> None:
    async def run() -> None:
        async with running(tmp_path, num_ranks=2) as world:
            assert await world.step(1) == [1]
            assert await world.step(2) == [1, 2]
            os.kill(world.pid(1), signal.SIGKILL)
            with pytest.raises(TrainerDied) as died:
                await world.trainer_proxy.watch()  # no call is pending
            assert "trainer-1 died" in str(died.value)
            with pytest.raises(TrainerDied) as died:
                await world.step(1)
            assert "trainer-1 died" in str(died.value)
            with pytest.raises(TrainerDied) as died:
                await world.trainer_proxy.publish()
            assert "trainer-1 died" in str(died.value)
            assert await world.trainer_proxy.restart(2) == 2
            assert await world.step(3) == [1, 2, 3]

    asyncio.run(run())


@pytest.mark.slow
def test_a_second_death_restores_the_snapshot_of_the_second_life(
    cluster: None, tmp_path: Path
) -> None:
    async def run() -> None:
        async with running(tmp_path, num_ranks=2) as world:
            for step, killed in ((1, 1), (2, 0)):
                assert await world.step(step) == [*range(1, step + 1)]
                os.kill(world.pid(killed), signal.SIGKILL)
                with pytest.raises(TrainerDied) as died:
                    await world.step(1)
                assert f"trainer-{killed} died" in str(died.value)
                assert await world.trainer_proxy.restart(step) == step
            assert await world.step(1) == [1, 2, 1]

    asyncio.run(run())


@pytest.mark.slow
def test_weights_that_two_replicas_found_damaged_are_published_again(
    cluster: None, tmp_path: Path
) -> None:
    async def run() -> None:
        async with running(tmp_path) as world:
            await world.step(1)
            pid = world.pid(0)
            one, other = WeightManifest(version=0, shares=()), WeightManifest(version=1, shares=())
            for manifest in (one, other):
                world.trainer_proxy.mark_corrupt(manifest, "1 bucket")
            await world.step(1)  # one report may be the replica's own fault
            world.trainer_proxy.mark_corrupt(other, "1 bucket")
            with pytest.raises(TrainerDied) as died:
                await world.trainer_proxy.watch()
            assert str(died.value).endswith(": 1 bucket")
            assert await world.trainer_proxy.restart(2) == 2
            assert world.pid(0) != pid

    asyncio.run(run())


@pytest.mark.slow
def test_the_next_call_brings_a_released_state_back(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, num_ranks=2) as world:
            await world.step(1)
            assert world.count("take_back-1") == 0
            await world.trainer_proxy.release()
            assert world.count("release-0") == world.count("release-1") == 1
            assert await world.step(3) == [1, 3]
            assert world.count("take_back-0") == world.count("take_back-1") == 1
            await world.trainer_proxy.release()
            assert await world.trainer_proxy.restart(2) == 2
            assert await world.step(1) == [1, 3, 1]
            assert world.count("take_back-0") == 1  # a new process has nothing to bring back

    asyncio.run(run())


@pytest.mark.slow
def test_a_rank_killed_in_a_step_discards_the_step(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, num_ranks=2) as world:
            await world.step(1)
            world.request("hang-0")
            world.request("hang-1")
            step = asyncio.create_task(world.step(2))
            await world.until("accumulate-0", 2)
            await world.until("accumulate-1", 2)
            os.kill(world.pid(0), signal.SIGKILL)
            with pytest.raises(TrainerDied) as died:
                await step
            assert "trainer-0 died" in str(died.value)
            assert await world.trainer_proxy.restart(1) == 1
            assert await world.step(4) == [1, 4]

    asyncio.run(run())


@pytest.mark.slow
def test_a_stopped_rank_has_died(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, heartbeat_s=10.0) as world:
            await world.step(1)
            stopped = world.pid(0)
            os.kill(stopped, signal.SIGSTOP)
            with pytest.raises(TrainerDied) as died:
                await world.step(1)
            assert "trainer-0 died" in str(died.value)
            assert "heartbeat_timeout_s" in str(died.value)
            assert await world.trainer_proxy.restart(1) == 1
            assert await world.step(2) == [1, 2]
            # Ray ends it in the background.
            await asyncio.to_thread(wait_until, lambda: not Path(f"/proc/{stopped}").exists())

    asyncio.run(run())


@pytest.mark.slow
def test_a_snapshot_holder_that_dies_is_replaced(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as world:
            await world.step(1)
            pid = int(world.holders.slots[0].path.split("/")[2])
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(world.holders.lost.next(), TIMEOUT_S)
            assert await world.step(2) == [1, 2]  # the ranks do not notice
            # One at the start and one per step; the fourth is in the new holder.
            await world.until("snapshot-0", 4)
            os.kill(world.pid(0), signal.SIGKILL)
            with pytest.raises(TrainerDied):
                await world.step(1)
            assert await world.trainer_proxy.restart(2) == 2
            assert await world.step(3) == [1, 2, 3]

    asyncio.run(run())


@pytest.mark.slow
def test_without_snapshots_the_newest_checkpoint_or_the_initial_state_is_used(
    cluster: None, tmp_path: Path
) -> None:
    async def run() -> None:
        async with running(tmp_path, snapshot_every=0) as world:
            await world.step(1)
            await die(world)
            assert await world.trainer_proxy.restart(0) == 0
            await world.step(2)
            await world.trainer_proxy.save(tmp_path / "1" / "trainer")
            world.checkpoints.append(Checkpoint(1, tmp_path / "1"))
            await world.step(3)
            await die(world)
            assert await world.trainer_proxy.restart(1) == 1
            assert await world.step(4) == [2, 4]

    asyncio.run(run())


@pytest.mark.slow
def test_a_checkpoint_newer_than_the_snapshot_is_used(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, snapshot_every=2) as world:
            for num_parts in (1, 2, 3):
                await world.step(num_parts)
            await die(world)
            assert await world.trainer_proxy.restart(2) == 2
            assert await world.step(4) == [1, 2, 4]
            await world.trainer_proxy.save(tmp_path / "3" / "trainer")
            world.checkpoints.append(Checkpoint(3, tmp_path / "3"))
            await die(world)
            assert await world.trainer_proxy.restart(3) == 3
            # Nothing of the discarded history is left: the next snapshot is that of step 4.
            assert await world.step(5) == [1, 2, 4, 5]
            await die(world)
            assert await world.trainer_proxy.restart(4) == 4
            assert await world.step(6) == [1, 2, 4, 5, 6]

    asyncio.run(run())


@pytest.mark.slow
def test_a_death_during_the_save_leaves_the_older_state(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as world:
            await world.step(1)
            world.request("wait-write-0")
            saving = asyncio.create_task(world.trainer_proxy.save(tmp_path / "1" / "trainer"))
            await world.until("write-0", 1)
            os.kill(world.pid(0), signal.SIGKILL)
            with pytest.raises(TrainerDied) as died:
                await saving
            assert "trainer-0 died during write" in str(died.value)
            assert await world.trainer_proxy.restart(1) == 1

    asyncio.run(run())


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(cluster: None, tmp_path: Path) -> None:
    # Over more steps than there are snapshots; the held state is written.
    async def run() -> None:
        async with running(tmp_path, num_ranks=2) as world:
            await world.step(1)
            world.request("wait-write-0")
            await world.trainer_proxy.hold()
            writing = asyncio.create_task(world.trainer_proxy.write(tmp_path / "1" / "trainer"))
            await world.until("write-0", 1)
            for number in (2, 3, 4, 5):
                await world.step(number)
            assert not writing.done()
            world.request("go")
            await writing
            parts = (tmp_path / "1" / "trainer" / "0").read_text().split()
            assert [float(part) for part in parts[:3]] == [1.0, 0.0, 0.0]
            assert (tmp_path / "1" / "trainer" / ".metadata").exists()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("snapshot_every", rest_slow([1, 0]))
def test_a_rank_killed_while_it_writes_aborts_the_write(
    cluster: None, tmp_path: Path, snapshot_every: int
) -> None:
    async def run() -> None:
        async with running(tmp_path, snapshot_every=snapshot_every) as world:
            await world.step(1)
            await world.trainer_proxy.save(tmp_path / "1" / "trainer")
            world.checkpoints.append(Checkpoint(1, tmp_path / "1"))
            await world.step(2)
            world.request("wait-write-0")
            await world.trainer_proxy.hold()
            writing = asyncio.create_task(world.trainer_proxy.write(tmp_path / "2" / "trainer"))
            await world.until("write-0", 2)
            assert await world.step(3) == [1, 2, 3]
            os.kill(world.pid(0), signal.SIGKILL)
            with pytest.raises(TrainerDied) as died:
                await writing
            assert "trainer-0 died during write" in str(died.value)
            reached = 3 if snapshot_every else 1
            assert await world.trainer_proxy.restart(3) == reached
            assert await world.step(4) == [*[1, 2, 3][:reached], 4]
            await world.trainer_proxy.save(tmp_path / "2" / "trainer")

    asyncio.run(run())


@pytest.mark.slow
def test_ranks_that_fail_finish_what_they_write(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as world:
            await world.step(1)
            world.request("wait-write-0")
            await world.trainer_proxy.hold()
            writing = asyncio.create_task(world.trainer_proxy.write(tmp_path / "1" / "trainer"))
            await world.until("write-0", 1)
            world.request("raise-0", "nan")
            with pytest.raises(FloatingPointError):
                await world.step(2)
            with pytest.raises(FloatingPointError):
                await world.trainer_proxy.publish()
            world.request("go")
            await writing
            assert (tmp_path / "1" / "trainer" / ".metadata").exists()
            assert world.trainer_proxy.ranks[0].is_dead

    asyncio.run(run())


@pytest.mark.slow
def test_training_continues_after_a_checkpoint_cannot_be_written(
    cluster: None, tmp_path: Path
) -> None:
    async def run() -> None:
        async with running(tmp_path) as world:
            await world.step(1)
            (tmp_path / "file").touch()
            with pytest.raises(NotADirectoryError):
                await world.trainer_proxy.save(tmp_path / "file" / "trainer")
            assert await world.step(2) == [1, 2]
            await world.trainer_proxy.save(tmp_path / "2" / "trainer")

    asyncio.run(run())


@pytest.mark.slow
def test_the_result_of_a_warm_start_is_the_initial_state(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as world:
            lives = 0

            async def supervised_steps() -> None:
                nonlocal lives
                lives += 1
                for number in range(3):
                    await world.trainer_proxy.sft_step([[1]], [1], 0.1)
                    if lives == 1 and number == 1:
                        os.kill(world.pid(0), signal.SIGKILL)

            await world.trainer_proxy.warm_start(supervised_steps)
            assert lives == 2
            assert await world.num_sft_steps() == 3
            await die(world)
            assert await world.trainer_proxy.restart(0) == 0
            assert await world.num_sft_steps() == 3
            # All nodes that had snapshots are gone.
            world.holders.close()
            await world.step(1)
            await die(world)
            assert await world.trainer_proxy.restart(1) == 0
            assert await world.num_sft_steps() == 3
            assert await world.step(2) == [2]

    asyncio.run(run())


@pytest.mark.slow
def test_start_and_export_are_retried_after_a_death(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "die-0").touch()
        async with running(tmp_path) as world:
            await world.step(1)
            world.request("hang-0")
            exporting = asyncio.create_task(world.trainer_proxy.export_final(tmp_path / "hf"))
            await world.until("export-0", 1)
            os.kill(world.pid(0), signal.SIGKILL)
            await exporting
            assert world.count("export-0") == 2
            assert (tmp_path / "hf").read_text() == "1"

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "errors",
    [
        (
            ("nan", FloatingPointError, ("gloo of rank 1",)),
            ("bug", WorkerError, ("trainer-1.accumulate ", "KeyError")),
            ("gloo", TrainerDied, ("trainer-1 ", ": gloo of rank 1")),
        ),
        (
            ("own", FunctionFailed, ("gloo of rank 1",)),
            ("damaged", TrainerDied, ("trainer-1 ", ": gloo of rank 1")),
        ),
    ],
    ids=["first", "others"],
)
def test_an_error_of_a_rank_keeps_its_type(
    cluster: None, tmp_path: Path, errors: Sequence[tuple[str, type[Exception], Sequence[str]]]
) -> None:
    # Later calls are not carried out: the step would lack a part.
    async def run() -> None:
        async with running(tmp_path, num_ranks=2) as world:
            for kind, error, parts in errors:
                world.request("raise-1", kind)
                with pytest.raises(error) as raised:
                    await world.step(3)
                assert all(part in str(raised.value) for part in parts)
                with pytest.raises(error) as raised:
                    await world.trainer_proxy.publish()
                assert all(part in str(raised.value) for part in parts)
                assert world.count("optimizer_step-1") == 0
                assert await world.trainer_proxy.restart(0) == 0
            assert await world.step(1) == [1]

    asyncio.run(run())


async def die(world: World) -> None:
    os.kill(world.pid(0), signal.SIGKILL)
    with pytest.raises(TrainerDied):
        await world.step(1)


class StillbornWorker(Worker):
    """Worker whose process dies at every call."""

    def start_call(
        self, method: str, *args: Any, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        async def answer() -> None:
            raise WorkerDied(f"{self.name} died during {method}: out of memory")

        return answer()

    def end(self, cause: str) -> None:
        """Do nothing: the process is gone."""


def test_the_error_of_ranks_that_die_while_loading_names_their_model(tmp_path: Path) -> None:
    trainer_proxy = RayTrainerProxy(
        lambda rank: StillbornWorker(f"critic-{rank}", None, timeout_s=1),
        SnapshotHolders(timeout_s=1, heartbeat_timeout_s=1),
        model="critic",
        layouts=Layouts([ParallelLayout()]),
        num_snapshots=0,
        start_timeout_s=1,
        newest_checkpoint=lambda: None,
        warm_start_dir=tmp_path,
    )
    with pytest.raises(TrainerDied) as died:
        asyncio.run(trainer_proxy.start())
    assert "'critic'" in str(died.value)
    assert "(critic-0 died during" in str(died.value)


def test_a_holder_that_is_gone_when_a_state_moves_is_an_error() -> None:
    holders = SnapshotHolders(timeout_s=1, heartbeat_timeout_s=1)
    move: Any = SimpleNamespace(senders={"here": ["there"]})
    with pytest.raises(WorkerDied) as death:
        holders.weight_deltas(move, None)
    assert death.value.worker == "snapshots-there"


@pytest.mark.slow
def test_training_continues_after_a_model_cannot_be_exported(cluster: None, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as world:
            assert await world.step(1) == [1]
            with pytest.raises(IsADirectoryError):
                await world.trainer_proxy.export(tmp_path)
            assert await world.step(2) == [1, 2]
            await world.trainer_proxy.export(tmp_path / "hf")
            assert (tmp_path / "hf").read_text() == "2"

    asyncio.run(run())
