"""Checkpoints that are written during training, with simulated workers in virtual time."""

from __future__ import annotations

import asyncio
import errno
from itertools import pairwise
from typing import Any

import pytest

from rlsys.config import AsyncConfig
from rlsys.controller.simulation.simulated_workers import SimulatedDisk
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.state import OpenWork
from tests.controller.test_controller import World, until, world
from tests.errors import error_about


async def trained(w: World, num_steps: int) -> None:
    await until(w, lambda: len(w.observer.steps) >= num_steps)


def slow(write_s: float, seed: int = 0, **changes: Any) -> tuple[World, SimulatedDisk]:
    """Return a run whose checkpoints take `write_s`; a step takes about as long as its sampling."""
    w = world(seed, **changes)
    w.trainer_proxy.step_s = 1.0
    disk = SimulatedDisk(trainer_proxy=w.trainer_proxy, write_s=write_s)
    w.writes = lambda step, work: disk.write(step)
    return w, disk


def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    """The last checkpoint is on disk when the run ends."""
    w, disk = slow(0.0, num_steps=6, checkpoint_every=2)

    async def until_step_3(step: int, work: OpenWork) -> None:
        if step == 2:
            await trained(w, 3)
        await disk.write(step)

    w.writes = until_step_3
    run_in_virtual_time(w.run())
    assert w.checkpoints == [2, 4, 6]


def test_the_next_checkpoint_waits_for_the_one_before() -> None:
    w, disk = slow(100.0, num_steps=3, checkpoint_every=1)
    num_trained: list[int] = []

    async def write(step: int, work: OpenWork) -> None:
        await disk.write(step)
        num_trained.append(len(w.observer.steps))

    w.writes = write
    run_in_virtual_time(w.run())
    assert disk.begun == [1, 2, 3]
    # Step 2 is trained while the first is written, and step 3 while the second is.
    assert num_trained == [2, 3, 3]
    assert w.observer.waited_s["train", "checkpoint"] > 100.0


def test_open_work_stays_until_it_is_read() -> None:
    """Even if its groups are trained meanwhile."""
    w, _ = slow(0.0, num_steps=2, checkpoint_every=1, asynchrony=AsyncConfig(max_staleness=2))
    live: list[int] = []

    async def write(step: int, work: OpenWork) -> None:
        if step == 1:
            assert work.finished
            await trained(w, 2)  # and nothing else is left in the store
            live.append(w.store.bytes_live)

    w.writes = write
    run_in_virtual_time(w.run())
    assert live[0] > 0
    assert w.store.bytes_live == 0


def test_a_death_breaks_the_write_off_and_it_is_made_up_for() -> None:
    """The repeated write has the state of the restarted trainer, and training waits for it."""
    w, disk = slow(30.0, num_steps=6, checkpoint_every=4)

    async def die(w: World) -> None:
        await trained(w, 5)
        w.trainer_proxy.die()

    w.chaos = die
    run_in_virtual_time(w.run())
    assert disk.begun == [4, 5, 6]
    assert w.checkpoints == [5, 6]
    assert w.ledger.num_trained == 6 * 4


def test_a_death_during_the_last_write_is_outlived() -> None:
    w, disk = slow(30.0, num_steps=2)

    async def die(w: World) -> None:
        await until(w, lambda: bool(disk.begun))
        w.trainer_proxy.die()

    w.chaos = die
    run_in_virtual_time(w.run())
    assert disk.begun == [2, 2]
    assert w.checkpoints == [2]


def test_a_death_before_the_end_of_a_write_takes_no_step_beyond_it_back() -> None:
    """A trainer restarts from the newest checkpoint, so it waits until no write is running."""
    w, disk = slow(30.0, num_steps=6, checkpoint_every=4)
    w.trainer_proxy.loses = 3

    async def die(w: World) -> None:
        await trained(w, 5)
        w.trainer_proxy.die()

    w.chaos = die
    run_in_virtual_time(w.run())
    assert disk.begun == [4, 3, 4, 6]
    assert w.checkpoints == [3, 4, 6]


def test_a_full_disk_ends_the_run_with_its_message() -> None:
    w, _ = slow(0.0, num_steps=50, checkpoint_every=1)

    async def full(step: int, work: OpenWork) -> None:
        await asyncio.sleep(2.5)
        raise OSError(errno.ENOSPC, "cannot write step_000001: the disk is full")

    w.writes = full
    with error_about(OSError) as raised:
        run_in_virtual_time(w.run())
    assert raised.value.errno == errno.ENOSPC
    assert w.checkpoints == []
    assert 1 < len(w.observer.steps) < 50


def test_a_run_that_fails_writes_what_it_had_copied() -> None:
    w, _ = slow(60.0, num_steps=4, checkpoint_every=2)
    step = w.trainer_proxy.optimizer_step

    async def not_a_number(**_: Any) -> Any:
        if w.trainer_proxy.version == 2:
            raise FloatingPointError("not a number")
        return await step()

    w.trainer_proxy.optimizer_step = not_a_number  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError):
        run_in_virtual_time(w.run())
    assert w.checkpoints == [2]


def test_a_cancelled_run_gives_the_write_up() -> None:
    w, disk = slow(1000.0, num_steps=4, checkpoint_every=2)

    async def run() -> None:
        running = asyncio.create_task(w.run())
        await until(w, lambda: bool(disk.begun))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert disk.ended == [2]

    run_in_virtual_time(run())
    assert w.checkpoints == []


def test_a_run_that_dies_at_its_last_step_but_one_has_a_recent_checkpoint() -> None:
    """Steps take at least 60 s; by default a checkpoint is at most 10 minutes and one step old."""
    w, disk = slow(5.0, num_steps=100)
    w.trainer_proxy.step_s = 60.0
    begun_s: dict[int, float] = {}

    async def write(step: int, work: OpenWork) -> None:
        begun_s[step] = asyncio.get_running_loop().time()
        await disk.write(step)

    w.writes = write

    async def until_it_dies() -> None:
        run = asyncio.create_task(w.run())
        await asyncio.sleep(0)
        await trained(w, 99)
        died_s = asyncio.get_running_loop().time()
        run.cancel()
        await asyncio.wait([run])
        assert w.checkpoints == disk.begun
        assert 8 <= len(w.checkpoints) <= 10
        assert died_s - begun_s[w.checkpoints[-1]] <= 600 + 2 * 70

    run_in_virtual_time(until_it_dies())


def test_time_between_checkpoints_counts_from_the_last() -> None:
    """Steps of 7 s and checkpoints every 20 s: after each third step, or fourth if they wait."""
    w, _ = slow(0.0, num_steps=10, checkpoint_every="20s", asynchrony=AsyncConfig(max_staleness=0))
    for replica in w.replicas:
        replica.latency_s = lambda: 1.0
    w.trainer_proxy.step_s = 7.0
    run_in_virtual_time(w.run())
    steps = w.checkpoints
    assert steps[-1] == 10
    assert all(2 <= later - earlier <= 4 for earlier, later in pairwise([0, *steps[:-1]]))


@pytest.mark.parametrize("every", [0, "20s", 2])
def test_a_copy_belongs_to_the_step_that_it_is_taken_after(every: int | str) -> None:
    """SimulatedDisk asserts that two writes never overlap."""
    for seed in range(5):
        w, _ = slow(3.0, seed=seed, num_steps=12, checkpoint_every=every, num_replicas=2)
        w.trainer_proxy.step_s = 7.0
        run_in_virtual_time(w.run())
        assert w.checkpoints[-1] == 12


def test_steps_that_are_trained_again_are_checkpointed_again() -> None:
    w, _ = slow(0.0, num_steps=12, checkpoint_every="20s")
    w.trainer_proxy.step_s = 7.0
    w.trainer_proxy.loses = 2

    async def die(w: World) -> None:
        await trained(w, 8)
        w.trainer_proxy.die()

    w.chaos = die
    run_in_virtual_time(w.run())
    assert w.checkpoints[-1] == 12
    assert w.ledger.num_trained == 12 * 4


def test_a_checkpoint_is_written_after_the_step_in_which_it_was_requested() -> None:
    w, _ = slow(0.0, num_steps=6, checkpoint_every=100)
    w.is_checkpoint_requested = lambda: len(w.observer.steps) >= 2 and not w.checkpoints
    run_in_virtual_time(w.run())
    first, last = w.checkpoints
    assert first in (2, 3)  # step 3 may have been sent to the trainer before the question
    assert last == 6


@pytest.mark.parametrize("write_s", [0.0, 2.0, 100.0])
def test_a_request_is_answered_by_one_checkpoint_however_long_the_write_takes(
    write_s: float,
) -> None:
    w, disk = slow(write_s, num_steps=8, checkpoint_every=100)
    w.is_checkpoint_requested = lambda: len(w.observer.steps) >= 2 and not disk.ended
    run_in_virtual_time(w.run())
    assert len(disk.begun) == 2
    assert disk.begun[-1] == 8


def test_a_request_during_a_write_is_answered_after_it() -> None:
    w, disk = slow(2.0, num_steps=20, checkpoint_every=5)
    w.is_checkpoint_requested = lambda: len(disk.begun) >= 1 and len(disk.ended) < 2
    run_in_virtual_time(w.run())
    first, requested, *others = disk.begun
    assert first == 5
    assert 5 < requested < 10
    assert others == [10, 15, 20]


def test_a_run_that_writes_only_the_last_checkpoint_ignores_requests() -> None:
    w, _ = slow(0.0, num_steps=3, checkpoint_every=0)
    w.is_checkpoint_requested = lambda: True
    run_in_virtual_time(w.run())
    assert w.checkpoints == [3]
