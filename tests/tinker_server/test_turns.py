"""Scheduling of a replica: one version at a time, and no request starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.tinker_server.sampler_scheduling import SamplerScheduler
from tests.tinker_server.clocks import Clock

PATIENCE_S = 1.0


def make() -> tuple[SamplerScheduler[str], Clock]:
    clock = Clock()
    scheduler: SamplerScheduler[str] = SamplerScheduler(clock, patience_s=PATIENCE_S, max_running=4)
    scheduler.switched("base")
    return scheduler, clock


def test_requests_for_the_weights_that_are_there_run_at_once() -> None:
    scheduler, _ = make()
    scheduler.add("base", "a")
    scheduler.add("base", "b")
    assert scheduler.due() is None
    assert scheduler.admit() == ["a", "b"]
    assert scheduler.num_running == 2


def test_other_requests_wait_until_running_ones_have_ended() -> None:
    scheduler, clock = make()
    scheduler.add("base", "a")
    scheduler.admit()
    scheduler.add("v1", "b")
    clock.now += 0.5
    scheduler.add("base", "c")
    assert scheduler.patience_left_s == 0.5
    assert scheduler.admit() == ["c"]  # before the patience is over
    clock.now += 0.5
    scheduler.add("base", "d")
    assert scheduler.admit() == []  # behind b now
    assert scheduler.due() is None  # two are running
    scheduler.ended(2)
    assert scheduler.due() == "v1"
    scheduler.switched("v1")
    assert scheduler.admit() == ["b"]
    scheduler.ended(1)
    assert scheduler.due() == "base"


def test_a_replica_that_does_nothing_takes_other_weights_at_once() -> None:
    scheduler, _ = make()
    scheduler.add("v1", "a")
    assert scheduler.due() == "v1"


def test_removed_requests_do_not_run() -> None:
    scheduler, _ = make()
    scheduler.add("v1", "a")
    assert scheduler.remove("a")
    assert not scheduler.remove("a")
    assert scheduler.due() is None
    assert scheduler.num_waiting == 0


def test_requests_for_missing_weights_can_be_removed() -> None:
    scheduler, _ = make()
    scheduler.add("v1", "a")
    scheduler.add("v2", "b")
    assert scheduler.due() == "v1"
    scheduler.switched(None)
    assert scheduler.take_waiting_for("v1") == ["a"]
    assert scheduler.due() == "v2"


def test_so_many_run_at_a_time_or_one_that_is_larger() -> None:
    scheduler, _ = make()
    for name, size in (("a", 3), ("b", 2), ("c", 1)):
        scheduler.add("base", name, size)
    assert scheduler.admit() == ["a"]
    scheduler.ended(1)
    assert scheduler.admit() == ["b"]
    scheduler.add("base", "d", 9)
    scheduler.ended(4)
    assert scheduler.admit() == ["c"]
    scheduler.ended(1)
    assert scheduler.due() is None
    assert scheduler.admit() == ["d"]


def test_an_old_request_for_the_weights_that_are_there_is_not_held_up_by_one_that_waits() -> None:
    scheduler, clock = make()
    scheduler.add("base", "a")
    clock.now += 0.1
    scheduler.add("v1", "b")
    clock.now += 5.0
    assert scheduler.due() is None
    assert scheduler.admit() == ["a"]
    scheduler.ended(1)
    assert scheduler.due() == "v1"


def test_requests_that_come_at_the_same_time_have_an_order() -> None:
    scheduler, clock = make()
    scheduler.add("v1", "a")
    scheduler.add("v2", "b")
    clock.now += 5.0
    for key, name in (("v1", "a"), ("v2", "b")):
        assert scheduler.due() == key
        scheduler.switched(key)
        assert scheduler.admit() == [name]
        scheduler.ended(1)


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.floats(0, 2)), max_size=40), st.randoms())
def test_every_request_runs_under_its_own_weights_and_none_is_lost(arrivals, random) -> None:  # type: ignore[no-untyped-def]
    scheduler, clock = make()
    wanted: dict[str, str] = {}
    ran: list[str] = []
    running: list[str] = []

    def turn(ends: bool) -> None:
        if (key := scheduler.due()) is not None:
            assert not running
            scheduler.switched(key)
        for name in scheduler.admit():
            assert wanted[name] == scheduler.current
            running.append(name)
        if running and ends:
            ended = running.pop(random.randrange(len(running)))
            ran.append(ended)
            scheduler.ended(1)

    for number, (key, wait_s) in enumerate(arrivals):
        wanted[f"{key}{number}"] = key
        scheduler.add(key, f"{key}{number}")
        clock.now += wait_s
        turn(random.random() < 0.7)
    for _ in range(100 * len(arrivals)):
        clock.now += 0.1
        turn(True)
    assert sorted(ran) == sorted(wanted)
