"""Which weights a replica samples with: one version at a time, and nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.tinker_server.sampler_scheduling import SamplerScheduler
from tests.tinker_server.clocks import Clock

PATIENCE_S = 1.0


def make() -> tuple[SamplerScheduler[str], Clock]:
    clock = Clock()
    turns: SamplerScheduler[str] = SamplerScheduler(clock, patience_s=PATIENCE_S, max_running=4)
    turns.switched("base")
    return turns, clock


def test_requests_for_the_weights_that_are_there_run_at_once() -> None:
    turns, _ = make()
    turns.add("base", "a")
    turns.add("base", "b")
    assert turns.due() is None
    assert turns.admit() == ["a", "b"]
    assert turns.num_running == 2


def test_others_wait_until_what_runs_has_ended() -> None:
    turns, clock = make()
    turns.add("base", "a")
    turns.admit()
    turns.add("v1", "b")
    clock.now += 0.5
    turns.add("base", "c")
    assert turns.until_over_s == 0.5
    assert turns.admit() == ["c"]  # before the patience is over
    clock.now += 0.5
    turns.add("base", "d")
    assert turns.admit() == []  # behind b now
    assert turns.due() is None  # two are running
    turns.ended(2)
    assert turns.due() == "v1"
    turns.switched("v1")
    assert turns.admit() == ["b"]
    turns.ended(1)
    assert turns.due() == "base"


def test_a_replica_that_does_nothing_takes_other_weights_at_once() -> None:
    turns, _ = make()
    turns.add("v1", "a")
    assert turns.due() == "v1"


def test_what_nobody_waits_for_any_more_does_not_run() -> None:
    turns, _ = make()
    turns.add("v1", "a")
    assert turns.remove("a")
    assert not turns.remove("a")
    assert turns.due() is None
    assert turns.num_waiting == 0


def test_where_weights_are_gone_those_that_wait_for_them_can_be_taken_out() -> None:
    turns, _ = make()
    turns.add("v1", "a")
    turns.add("v2", "b")
    assert turns.due() == "v1"
    turns.switched(None)
    assert turns.take_waiting_for("v1") == ["a"]
    assert turns.due() == "v2"


def test_so_many_run_at_a_time_or_one_that_is_larger() -> None:
    turns, _ = make()
    for name, size in (("a", 3), ("b", 2), ("c", 1)):
        turns.add("base", name, size)
    assert turns.admit() == ["a"]
    turns.ended(1)
    assert turns.admit() == ["b"]
    turns.add("base", "d", 9)
    turns.ended(4)
    assert turns.admit() == ["c"]
    turns.ended(1)
    assert turns.due() is None
    assert turns.admit() == ["d"]


def test_an_old_request_for_the_weights_that_are_there_is_not_held_up_by_one_that_waits() -> None:
    turns, clock = make()
    turns.add("base", "a")
    clock.now += 0.1
    turns.add("v1", "b")
    clock.now += 5.0
    assert turns.due() is None
    assert turns.admit() == ["a"]
    turns.ended(1)
    assert turns.due() == "v1"


def test_requests_that_come_at_the_same_time_have_an_order() -> None:
    turns, clock = make()
    turns.add("v1", "a")
    turns.add("v2", "b")
    clock.now += 5.0
    for key, name in (("v1", "a"), ("v2", "b")):
        assert turns.due() == key
        turns.switched(key)
        assert turns.admit() == [name]
        turns.ended(1)


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.floats(0, 2)), max_size=40), st.randoms())
def test_every_request_runs_under_its_own_weights_and_none_is_lost(arrivals, random) -> None:  # type: ignore[no-untyped-def]
    turns, clock = make()
    wanted: dict[str, str] = {}
    ran: list[str] = []
    running: list[str] = []

    def turn(ends: bool) -> None:
        if (key := turns.due()) is not None:
            assert not running
            turns.switched(key)
        for name in turns.admit():
            assert wanted[name] == turns.current
            running.append(name)
        if running and ends:
            ended = running.pop(random.randrange(len(running)))
            ran.append(ended)
            turns.ended(1)

    for number, (key, wait_s) in enumerate(arrivals):
        wanted[f"{key}{number}"] = key
        turns.add(key, f"{key}{number}")
        clock.now += wait_s
        turn(random.random() < 0.7)
    for _ in range(100 * len(arrivals)):
        clock.now += 0.1
        turn(True)
    assert sorted(ran) == sorted(wanted)
