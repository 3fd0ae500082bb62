"""Supervisor: counts by hand, pauses in virtual time, and what holds for any sequence of deaths."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.common.supervision import (
    FROZEN_MODELS,
    REPLICAS,
    REWARD_PROCESSES,
    PoisonPolicy,
    Policy,
    RestartPolicy,
    Supervisor,
    retried,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def policy(
    *, max_restarts: int = sys.maxsize, max_deaths: int = sys.maxsize, isolates: bool = False
) -> Policy:
    return Policy(RestartPolicy(max_restarts), PoisonPolicy(max_deaths, isolates))


def test_a_batch_with_which_three_workers_die_is_dropped_and_the_others_are_retried() -> None:
    supervisor = Supervisor[str](FROZEN_MODELS)
    assert supervisor.died("1", ["a"], place=0).retry == ["a"]
    assert supervisor.died("2", ["a", "b"], place=1).retry == ["a", "b"]
    third = supervisor.died("3", ["a", "b", "c"], place=0)
    assert third.drop == {"a": "3"}
    assert third.retry == ["b", "c"]
    assert supervisor.died("4", ["a"]).retry == ["a"]  # a new item with the same name


def test_items_that_have_ended_have_no_deaths() -> None:
    supervisor = Supervisor[str](policy(max_deaths=2))
    supervisor.died("", ["a"])
    supervisor.ended(["a", "unknown"])
    assert supervisor.died("", ["a"]).retry == ["a"]


def test_progress_of_one_place_does_not_count_for_another() -> None:
    supervisor = Supervisor[str](policy(max_restarts=1))
    assert supervisor.died("x", place="a").gives_up == ""
    assert supervisor.died("y", place="b").gives_up == ""
    supervisor.progressed(place="a")
    assert supervisor.died("z", place="a").gives_up == ""  # its worker had made progress
    assert supervisor.died("y", place="b").gives_up == "y"
    assert [supervisor.died("z", place="a").gives_up for _ in range(2)] == ["", "z"]


def test_pauses_double_from_death_to_death_and_end_with_progress() -> None:
    clock = Clock()
    supervisor = Supervisor[str](REWARD_PROCESSES, clock=clock)
    assert supervisor.pause_s() == 0.0
    pauses = []
    for _ in range(5):
        supervisor.died("no memory")
        pauses.append(supervisor.pause_s())
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0]
    clock.now_s += 7.0
    assert supervisor.pause_s() == 3.0
    clock.now_s += 7.0
    assert supervisor.pause_s() == 0.0
    supervisor.progressed()
    supervisor.died("after progress")
    assert supervisor.pause_s() == 0.0
    supervisor.died("again")
    assert supervisor.pause_s() == 1.0


def test_a_replica_is_given_up_at_its_fifth_death_without_a_rollout() -> None:
    clock = Clock()
    supervisor = Supervisor[int](REPLICAS, clock=clock)
    since_s, given_up = clock.now_s, ""
    while not given_up:
        given_up = supervisor.died("lost", place=3).gives_up
        if not given_up:
            clock.now_s += supervisor.pause_s(place=3)
    assert clock.now_s - since_s == 1.0 + 2.0 + 4.0 + 8.0


def test_isolation_blames_the_items_and_a_death_without_items_blames_the_place() -> None:
    supervisor = Supervisor[str](policy(max_restarts=1, max_deaths=2, isolates=True))
    for _ in range(5):
        assert supervisor.died("", ["a", "b"]).gives_up == ""
    assert supervisor.died("", ["c"]).retry == ["c"]
    assert supervisor.died("", ["c"]).isolate == ["c"]
    assert supervisor.died("exit", ["c"], is_alone=True).drop == {"c": "exit"}
    assert [supervisor.died("idle").gives_up for _ in range(2)] == ["", "idle"]


def test_a_place_without_a_limit_may_die_any_number_of_times() -> None:
    supervisor = Supervisor[str](policy())
    assert not any(supervisor.died("x").gives_up for _ in range(2000))
    assert supervisor.pause_s() == 0.0


def test_an_operation_is_called_again_after_each_deadly_error_until_the_last() -> None:
    calls: list[int] = []
    retries: list[str] = []

    async def work() -> int:
        calls.append(len(calls))
        if len(calls) < 3:
            raise OSError(f"attempt {len(calls)}")
        return len(calls)

    async def on_retry(error: Exception) -> None:
        retries.append(str(error))

    assert asyncio.run(retried(work, policy(max_restarts=2), OSError, on_retry)) == 3
    assert retries == ["attempt 1", "attempt 2"]
    calls.clear()
    with pytest.raises(OSError):  # noqa: PT011 - its number of attempts is checked below
        asyncio.run(retried(work, policy(max_restarts=1), OSError))
    assert len(calls) == 2
    calls.clear()
    with pytest.raises(OSError):  # noqa: PT011 - another error is not retried
        asyncio.run(retried(work, policy(), ValueError))
    assert len(calls) == 1


def test_a_process_that_keeps_dying_alone_does_not_blame_the_place() -> None:
    supervisor = Supervisor[str](policy(max_restarts=0))
    assert supervisor.died("", ["a"], is_alone=True).gives_up == ""
    assert supervisor.died("x").gives_up == "x"


class Pool:
    """Workers that take random items; a worker dies of a guilty item, and sometimes by chance."""

    def __init__(self, limits: Policy, *, guilty: set[int], seed: int, chance: float) -> None:
        self.isolates = limits.poison.isolates
        self.supervisor = Supervisor[int](limits)
        self.guilty = guilty
        self.random = random.Random(seed)
        self.chance = chance
        self.done: list[int] = []
        self.dropped: list[int] = []
        self.num_runs: dict[int, int] = {}

    def play(self, items: set[int]) -> None:
        waiting = set(items)
        while waiting:
            running = set(self.random.sample(sorted(waiting), self.random.randint(1, len(waiting))))
            waiting -= running
            waiting |= self._share(running)

    def _share(self, running: set[int]) -> set[int]:
        """Run items in one worker; return those to retry."""
        left = set(running)
        for item in running:
            self.num_runs[item] = self.num_runs.get(item, 0) + 1
        for item in sorted(running, key=lambda _: self.random.random()):
            if item in self.guilty or self.random.random() < self.chance:
                decision = self.supervisor.died("died", left)
                self.dropped += decision.drop
                for alone in decision.isolate:
                    self._isolate(alone)
                assert left == {*decision.retry, *decision.isolate, *decision.drop}
                return set(decision.retry)
            left.discard(item)
            self._end(item)
        return set()

    def _isolate(self, item: int) -> None:
        self.num_runs[item] += 1
        if item in self.guilty:
            self.dropped += self.supervisor.died("died", [item], is_alone=True).drop
        else:
            self._end(item)

    def _end(self, item: int) -> None:
        self.done.append(item)
        self.supervisor.ended([item])
        self.supervisor.progressed()


@given(
    st.integers(1, 12),
    st.sets(st.integers(0, 11)),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 1 << 30),
)
def test_every_item_ends_once_and_runs_no_more_often_than_its_bound(
    num_items: int, guilty: set[int], max_deaths: int, isolates: bool, chance: float, seed: int
) -> None:
    limits = policy(max_deaths=max_deaths, isolates=isolates)
    pool = Pool(limits, guilty=guilty, seed=seed, chance=chance)
    items = set(range(num_items))
    pool.play(items)
    assert sorted([*pool.done, *pool.dropped]) == sorted(items)  # none lost, none twice
    assert guilty & items <= set(pool.dropped)
    assert max(pool.num_runs.values()) <= max_deaths + isolates
    if isolates:
        assert set(pool.dropped) == guilty & items


@given(st.integers(0, 6), st.lists(st.sampled_from("psd"), max_size=60), st.integers(1, 3))
def test_endless_deaths_are_given_up_and_progress_begins_the_count_anew(
    max_restarts: int, events: list[str], num_places: int
) -> None:
    """p: progress, s: a failed start, d: a death with an item; at each place in turn."""
    supervisor = Supervisor[int](policy(max_restarts=max_restarts, max_deaths=2))
    num_fruitless = [0] * num_places
    has_progressed = [False] * num_places
    for place, event in zip(itertools.cycle(range(num_places)), events, strict=False):
        if event == "p":
            supervisor.progressed(place=place)
            num_fruitless[place], has_progressed[place] = 0, True
            continue
        decision = supervisor.died("reason", [place] if event == "d" else [], place=place)
        num_fruitless[place] += not has_progressed[place]
        has_progressed[place] = False
        assert bool(decision.gives_up) == (num_fruitless[place] > max_restarts)
    for place in range(num_places):
        num_deaths = 1
        while not supervisor.died("reason", place=place).gives_up:
            num_deaths += 1
        assert num_deaths <= max_restarts + 2  # the first one may follow progress


@pytest.mark.parametrize("isolates", [False, True])
def test_an_item_that_is_named_twice_is_counted_once(isolates: bool) -> None:
    supervisor = Supervisor[str](policy(max_deaths=2, isolates=isolates))
    assert supervisor.died("", ["a", "a"]).retry == ["a"]
