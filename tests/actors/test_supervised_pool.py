"""Supervised pool: every work has one outcome, whatever its workers do; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.cluster.calls import Worker, WorkerDied
from actors.cluster.supervised_pool import SupervisedPool, WorkDropped
from rlsys.common.supervision import Decision, PoisonPolicy, Policy, RestartPolicy
from rlsys.controller.simulation.virtual_time import run_in_virtual_time

POLICY = Policy(RestartPolicy(2), PoisonPolicy(3))


class World:
    """A pool whose workers die of guilty work, and sometimes by chance."""

    def __init__(
        self, num_workers: int, *, seed: int = 0, chance: float = 0.0, num_dying: int = 0
    ) -> None:
        self.random = random.Random(seed)
        self.chance = chance
        self.num_dying = num_dying  # workers that will not start
        self.workers: list[FakeWorker] = []
        self.deaths: list[str] = []
        self.num_runs: dict[int, int] = {}
        self.pool = SupervisedPool(
            self.start_worker,
            self.prepare,
            num_workers=num_workers,
            policy=POLICY,
            on_death=self.on_death,
        )

    def start_worker(self, place: int) -> Worker:
        self.workers.append(FakeWorker(place, f"{place}.{len(self.workers)}"))
        return self.workers[-1]

    async def prepare(self, worker: Worker) -> None:
        await asyncio.sleep(5)
        if self.num_dying or self.random.random() < self.chance:
            self.num_dying = max(0, self.num_dying - 1)
            worker.end("bad luck")
        if worker.is_dead:
            raise WorkerDied(f"{worker.name} died during start")

    def on_death(self, reason: str, decision: Decision[int]) -> None:
        self.deaths.append(reason)

    async def work(self, number: int, guilty: set[int]) -> str:
        async def ask(worker: Worker) -> str:
            assert isinstance(worker, FakeWorker)
            self.num_runs[number] = self.num_runs.get(number, 0) + 1
            if number in guilty:
                await asyncio.sleep(1)
                worker.end(f"work {number}")
            return await worker.answer(self.random.uniform(0.5, 3))

        try:
            return await self.pool.run(ask)
        except WorkDropped:
            return "dropped"


class FakeWorker(Worker):
    """Worker without an actor."""

    def __init__(self, place: int, name: str) -> None:
        super().__init__(name, None, timeout_s=1)
        self.place = place

    async def answer(self, seconds: float) -> str:
        """Answer after some time, unless it dies before."""
        died = asyncio.ensure_future(self._died.wait())
        await asyncio.wait([died], timeout=seconds)
        died.cancel()
        if self.is_dead:
            raise WorkerDied(f"{self.name} died")
        return "done"

    def _end_process(self) -> None:
        return


@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.sets(st.integers(0, 11), max_size=3),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 1 << 30),
)
def test_all_work_ends_once_and_guilty_work_is_dropped(
    num_workers: int, num_works: int, guilty: set[int], chance: float, seed: int
) -> None:
    world = World(num_workers, seed=seed, chance=chance)

    async def scenario() -> list[str]:
        return await asyncio.gather(*(world.work(n, guilty) for n in range(num_works)))

    outcomes = run_in_virtual_time(scenario())
    assert all(outcomes[number] == "dropped" for number in guilty if number < num_works)
    assert max(world.num_runs.values(), default=0) <= POLICY.poison.max_deaths
    num_dead = sum(worker.is_dead for worker in world.workers)
    assert len(world.deaths) == len(set(world.deaths)) == num_dead  # each is reported once
    assert len(world.pool.workers) <= num_workers
    for place in range(num_workers):
        alive = [w for w in world.workers if w.place == place and not w.is_dead]
        assert len(alive) <= 1  # a successor starts after a death only


@pytest.mark.parametrize("num_dying", [2, 3])
def test_a_place_whose_workers_do_not_start_is_given_up(num_dying: int) -> None:
    world = World(1, num_dying=num_dying)

    async def scenario() -> None:
        is_given_up = num_dying > POLICY.restart.max_restarts
        with pytest.raises(WorkerDied) if is_given_up else contextlib.nullcontext():
            await world.pool.start()

    run_in_virtual_time(scenario())
    assert len(world.deaths) == 2  # the last one is raised instead
    assert len(world.workers) == 3
    assert [worker.is_dead for worker in world.workers[:2]] == [True, True]


@pytest.mark.parametrize("num_calls", [1, 2, 8])
def test_a_successor_that_dies_while_it_starts_is_reported_once(num_calls: int) -> None:
    world = World(1)

    async def scenario() -> list[str]:
        await world.pool.start()
        world.num_dying = 1
        calls = [world.work(n, set()) for n in range(num_calls)]
        outcomes = asyncio.gather(*calls)
        await asyncio.sleep(0)
        world.workers[0].end("killed")
        return await outcomes

    assert run_in_virtual_time(scenario()) == ["done"] * num_calls
    assert len(world.workers) == 3
    assert len(world.deaths) == 2


@pytest.mark.parametrize("num_dying", [POLICY.restart.max_restarts, 10])
def test_work_is_not_blamed_for_starts_and_ends_when_its_place_gives_up(num_dying: int) -> None:
    # The worker dies with the work. Its successors die before they are ready.
    world = World(1)

    async def scenario() -> list[str]:
        await world.work(9, set())
        world.num_dying = num_dying
        outcomes = asyncio.gather(*(world.work(n, set()) for n in range(4)))
        await asyncio.sleep(0)
        world.workers[0].end("its node is lost")
        return await outcomes

    is_given_up = num_dying > POLICY.restart.max_restarts
    assert run_in_virtual_time(scenario()) == ["dropped" if is_given_up else "done"] * 4
    # The worker was fruitful, so its own death is no restart without progress.
    num_starts = POLICY.restart.max_restarts + 1
    assert len(world.workers) == 1 + num_starts
    assert len(world.deaths) == 1 + num_starts - (not is_given_up)
    assert {world.num_runs[number] for number in range(4)} == {1 if is_given_up else 2}


def test_work_after_a_place_gave_up_tries_one_more_start() -> None:
    world = World(1, num_dying=POLICY.restart.max_restarts + 2)

    async def scenario() -> list[str]:
        return [await world.work(number, set()) for number in range(3)]

    assert run_in_virtual_time(scenario()) == ["dropped", "dropped", "done"]
    assert len(world.workers) == POLICY.restart.max_restarts + 3


def test_a_start_is_shared_by_all_that_wait_for_it() -> None:
    world = World(1)

    async def scenario() -> float:
        await asyncio.gather(world.pool.start(), *(world.work(n, set()) for n in range(8)))
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(scenario()) <= 5 + 3
    assert len(world.workers) == 1


def test_a_worker_that_died_idle_is_replaced_and_no_work_is_blamed() -> None:
    world = World(1)

    async def scenario() -> list[str]:
        outcomes = []
        for number in range(2 * POLICY.poison.max_deaths):
            outcomes.append(await world.work(number, set()))
            world.workers[-1].end("killed")
        return outcomes

    assert run_in_virtual_time(scenario()) == ["done"] * 6
    assert len(world.deaths) == 5  # the last one is noticed by the next work
    assert set(world.num_runs.values()) == {1}


def test_cancelled_work_leaves_no_load() -> None:
    world = World(2)

    async def scenario() -> list[int]:
        first = asyncio.create_task(world.work(0, set()))
        await asyncio.sleep(5.1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await world.work(1, set())
        return [worker.place for worker in world.workers]

    assert run_in_virtual_time(scenario()) == [0]
