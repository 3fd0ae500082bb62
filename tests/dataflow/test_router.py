"""Routing by outstanding tokens, by the room of nodes, and by affinity."""

from typing import Any

from rlsys.dataflow.scheduling.router import Router

ROOM = {"n": 99, "full": 0}.__getitem__


def route(
    router: Router, names: list[str], *, affinity: int, num_tokens: int, room: Any = ROOM
) -> str | None:
    replica = router.choose(len(names), affinity=affinity, room=room)
    if replica is not None:
        router.assign(replica, names, affinity=affinity, num_tokens=num_tokens)
    return replica


def test_groups_go_to_the_least_loaded_replica() -> None:
    router = router_of("a", "b")
    assert route(router, ["0", "1"], affinity=0, num_tokens=10) == "a"
    assert route(router, ["2"], affinity=1, num_tokens=10) == "b"
    assert route(router, ["3"], affinity=2, num_tokens=10) == "b"
    router.finished("a", "0")
    assert (router.load("a"), router.load("b")) == (10, 20)
    assert route(router, ["4"], affinity=3, num_tokens=1) == "a"


def test_later_turns_go_where_the_first_went() -> None:
    router = router_of("a", "b")
    assert route(router, ["first turn"], affinity=7, num_tokens=10) == "a"
    router.finished("a", "first turn")
    assert route(router, ["another"], affinity=8, num_tokens=99) == "a"
    assert route(router, ["second turn"], affinity=7, num_tokens=10) == "a"  # though b is idle
    router.keep_only({8})
    assert route(router, ["third turn"], affinity=7, num_tokens=10) == "b"


def test_a_dead_replica_hands_back_what_it_had() -> None:
    router = router_of("a", "b")
    route(router, ["0", "1"], affinity=0, num_tokens=10)
    router.finished("a", "1")
    assert router.outstanding("a", ["0", "1"]) == ["0"]
    assert router.remove("a") == ["0"]
    router.finished("a", "0")  # a late answer from the dead changes nothing
    assert route(router, ["0"], affinity=0, num_tokens=10) == "b"
    router.remove("b")
    assert route(router, ["9"], affinity=9, num_tokens=1) is None
    assert router.nodes == set()


def test_a_replica_that_joins_takes_its_share() -> None:
    router = router_of("a")
    route(router, ["0"], affinity=0, num_tokens=10)
    router.add("b", node="n")
    assert route(router, ["1"], affinity=1, num_tokens=10) == "b"


def test_a_full_home_gets_nothing_however_idle_its_replicas_are() -> None:
    router = router_of("a")
    router.add("idle", node="full")
    route(router, ["0"], affinity=0, num_tokens=10)
    assert route(router, ["1"], affinity=1, num_tokens=10) == "a"
    router.assign("idle", ["first turn"], affinity=2, num_tokens=1)
    assert route(router, ["second turn"], affinity=2, num_tokens=1) == "a"
    assert route(router, ["2", "3"], affinity=3, num_tokens=1, room={"n": 1, "full": 0}.get) is None


def test_a_group_that_no_home_has_room_for_is_split_over_as_few_as_can_be() -> None:
    router = Router()
    for name, node in {"a": "x", "b": "y", "c": "y", "d": "z"}.items():
        router.add(name, node=node)
    router.assign("b", ["0"], affinity=0, num_tokens=10)
    room = {"x": 2, "y": 5, "z": 3}.__getitem__
    assert router.split(6, room=room) == {"c": 5, "d": 1}
    assert router.split(10, room=room) == {"c": 5, "d": 3, "a": 2}
    assert router.split(11, room=room) == {}


def test_a_paused_replica_keeps_its_requests_and_gets_no_more() -> None:
    router = router_of("a", "b")
    assert route(router, ["0"], affinity=0, num_tokens=10) == "a"
    router.pause("a")
    assert (router.replicas, router.has("a"), router.nodes) == (["b"], True, {"n"})
    assert route(router, ["1"], affinity=0, num_tokens=30) == "b"
    assert router.outstanding("a") == ["0"]
    router.resume("a")
    assert route(router, ["2"], affinity=2, num_tokens=10) == "a"
    router.pause("a")
    assert router.remove("a") == ["0", "2"]
    assert not router.has("a")


def test_the_surplus_is_the_newest_above_the_mean() -> None:
    router = router_of("a", "b", "asleep")
    router.pause("asleep")
    for number in range(5):
        router.assign("a", [f"{number}"], affinity=number, num_tokens=10)
    router.assign("b", ["5"], affinity=5, num_tokens=10)
    # The mean is 30 tokens.
    assert router.surplus() == {"a": ["4", "3"]}


def test_requests_that_are_taken_away_follow_nobody() -> None:
    router = router_of("a", "b")
    router.assign("a", ["0", "1"], affinity=0, num_tokens=10)
    router.assign("a", ["2"], affinity=1, num_tokens=10)
    router.take_away("a", ["0", "1"], affinities={0})
    assert router.load("a") == 10
    assert route(router, ["0", "1"], affinity=0, num_tokens=10) == "b"
    assert route(router, ["3"], affinity=1, num_tokens=10) == "a"


def router_of(*names: str) -> Router:
    router = Router()
    for name in names:
        router.add(name, node="n")
    return router
