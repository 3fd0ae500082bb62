"""Scheduling of a replica: owners take turns, and no request starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.tinker_server.sampler_scheduling import ACTIVE_S, SamplerScheduler
from tests.tinker_server.clocks import Clock

PATIENCE_S = 1.0


def make(
    *, max_adapters: int = 2, batch_size: int | None = None
) -> tuple[SamplerScheduler[str], Clock]:
    clock = Clock()
    scheduler: SamplerScheduler[str] = SamplerScheduler(
        clock,
        patience_s=PATIENCE_S,
        max_running=4,
        max_adapters=max_adapters,
        batch_size=batch_size,
    )
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


def test_adapters_of_the_base_model_run_at_the_same_time() -> None:
    scheduler, _ = make()
    for number in (1, 2):
        scheduler.add("base", f"of {number}", owner=f"client-{number}", adapter=number)
    scheduler.add("base", "of the base model", owner="client-3")
    assert scheduler.admit() == ["of 1", "of 2", "of the base model"]
    assert scheduler.running_adapters == {1, 2}
    scheduler.ended(1, owner="client-1", adapter=1)
    assert scheduler.running_adapters == {2}


def test_adapters_beyond_the_limit_wait_and_get_their_turn() -> None:
    scheduler, _ = make(max_adapters=2)
    for number in (1, 2, 3):
        scheduler.add("base", f"of {number}", owner=f"client-{number}", adapter=number)
    assert scheduler.admit() == ["of 1", "of 2"]
    scheduler.add("base", "of 1 again", owner="client-1", adapter=1)
    assert scheduler.admit() == []  # behind client-3, which has nothing running
    assert scheduler.due() is None
    scheduler.ended(1, owner="client-2", adapter=2)
    assert scheduler.admit() == ["of 3", "of 1 again"]


def test_a_flood_of_one_client_delays_another_by_what_runs_already() -> None:
    scheduler, _ = make()
    for number in range(1000):
        scheduler.add("base", f"flood {number}", owner="flood")
    assert len(scheduler.admit()) == 4
    scheduler.add("base", "one", owner="other")
    scheduler.add("base", "two", owner="other")
    scheduler.ended(1, owner="flood")
    assert scheduler.admit() == ["one"]
    scheduler.ended(1, owner="flood")
    assert scheduler.admit() == ["two"]  # "flood" has two running, "other" one
    assert scheduler.num_running_of("flood") == 2


def test_a_flood_leaves_room_for_clients_that_are_active() -> None:
    scheduler, clock = make(batch_size=4)
    for number in range(1000):
        scheduler.add("base", f"flood {number}", owner="flood")
    assert len(scheduler.admit()) == 4  # no other owner is active
    scheduler.add("base", "one", owner="other")
    scheduler.ended(4, owner="flood")
    assert len(scheduler.admit()) == 3
    assert scheduler.num_running_of("flood") == 2
    scheduler.ended(1, owner="other")
    assert scheduler.admit() == []
    scheduler.add("base", "two", owner="other")
    assert scheduler.admit() == ["two"]  # without waiting for the flood
    scheduler.ended(1, owner="other")
    clock.now += ACTIVE_S
    assert len(scheduler.admit()) == 2  # the other has left


def test_owners_that_sample_at_the_same_time_have_equal_shares() -> None:
    scheduler, _ = make(batch_size=4, max_adapters=4)
    for number in range(8):
        scheduler.add("base", f"flood {number}", owner="flood")
    assert len(scheduler.admit()) == 4
    for name in ("x", "y", "z"):
        scheduler.add("base", name, owner=name)
    scheduler.ended(3, owner="flood")
    assert scheduler.admit() == ["x", "y", "z"]
    scheduler.ended(1, owner="x")
    assert scheduler.admit() == []  # three owners, so each has one of four
    scheduler.ended(1, owner="y")
    assert scheduler.admit() == ["flood 4"]  # two owners
    scheduler.ended(1, owner="z")
    assert scheduler.admit() == []  # the others may come back, so half of the batch is theirs


def test_an_owner_keeps_its_share_while_its_completions_run() -> None:
    scheduler, clock = make(batch_size=4)
    scheduler.add("base", "long", owner="other")
    assert scheduler.admit() == ["long"]
    clock.now += 2 * ACTIVE_S
    for number in range(8):
        scheduler.add("base", f"flood {number}", owner="flood")
    assert len(scheduler.admit()) == 2


def test_a_request_larger_than_a_share_runs_when_its_owner_has_nothing_else() -> None:
    scheduler, _ = make(batch_size=4)
    scheduler.add("base", "other", owner="other")
    scheduler.add("base", "large", 3, owner="large")
    assert scheduler.admit() == ["other", "large"]
    scheduler.add("base", "next", 3, owner="large")
    scheduler.ended(1, owner="other")
    scheduler.ended(2, owner="large")
    assert scheduler.admit() == []
    scheduler.ended(1, owner="large")
    assert scheduler.admit() == ["next"]


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    scheduler, _ = make()
    scheduler.add("base", "small", 2, owner="a")
    assert scheduler.admit() == ["small"]
    scheduler.add("base", "large", 3, owner="b")
    scheduler.add("base", "small too", 2, owner="a")
    assert scheduler.admit() == []
    scheduler.ended(2, owner="a")
    assert scheduler.admit() == ["large"]


def test_a_dead_replica_runs_nothing() -> None:
    scheduler, _ = make()
    scheduler.add("base", "a", 3, owner="x", adapter=1)
    scheduler.admit()
    scheduler.stopped()
    assert (scheduler.num_running, scheduler.running_adapters) == (0, set())


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ABC"), st.sampled_from("xyz"), st.integers(0, 3), st.floats(0, 2)
        ),
        max_size=40,
    ),
    st.randoms(),
    st.sampled_from([None, 4]),
)
def test_every_request_runs_under_its_own_weights_and_none_is_lost(  # type: ignore[no-untyped-def]
    arrivals, random, batch_size
) -> None:
    scheduler, clock = make(batch_size=batch_size)
    wanted: dict[str, str] = {}
    who: dict[str, tuple[str, int]] = {}
    ran: list[str] = []
    running: list[str] = []

    def turn(ends: bool) -> None:
        if (key := scheduler.due()) is not None:
            assert not running
            scheduler.switched(key)
        for name in scheduler.admit():
            assert wanted[name] == scheduler.current
            running.append(name)
        assert len(running) <= 4
        assert len({who[name][1] for name in running} - {0}) <= 2
        if running and ends:
            ended = running.pop(random.randrange(len(running)))
            ran.append(ended)
            scheduler.ended(1, owner=who[ended][0], adapter=who[ended][1])

    for number, (key, owner, adapter, wait_s) in enumerate(arrivals):
        name = f"{key}{number}"
        wanted[name], who[name] = key, (owner, adapter)
        scheduler.add(key, name, owner=owner, adapter=adapter)
        clock.now += wait_s
        turn(random.random() < 0.7)
    for _ in range(100 * len(arrivals)):
        clock.now += 0.1
        turn(True)
    assert sorted(ran) == sorted(wanted)
