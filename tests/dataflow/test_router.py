"""Routing by outstanding tokens, with affinity."""

import pytest

from rlsys.dataflow.router import Router


def test_groups_go_to_the_least_loaded_replica() -> None:
    router = router_of("a", "b")
    assert router.route(["0", "1"], affinity=0, num_tokens=10) == "a"
    assert router.route(["2"], affinity=1, num_tokens=10) == "b"
    assert router.route(["3"], affinity=2, num_tokens=10) == "b"
    router.finished("a", "0")
    assert (router.load("a"), router.load("b")) == (10, 20)
    assert router.route(["4"], affinity=3, num_tokens=1) == "a"


def test_later_turns_go_where_the_first_went() -> None:
    router = router_of("a", "b")
    assert router.route(["first turn"], affinity=7, num_tokens=10) == "a"
    router.finished("a", "first turn")
    assert router.route(["another"], affinity=8, num_tokens=99) == "a"
    assert router.route(["second turn"], affinity=7, num_tokens=10) == "a"  # though b is idle
    router.keep_only({8})
    assert router.route(["third turn"], affinity=7, num_tokens=10) == "b"


def test_a_dead_replica_hands_back_what_it_had() -> None:
    router = router_of("a", "b")
    router.route(["0", "1"], affinity=0, num_tokens=10)
    router.finished("a", "1")
    assert router.remove("a") == ["0"]
    router.finished("a", "0")  # a late answer from the dead changes nothing
    assert router.route(["0"], affinity=0, num_tokens=10) == "b"
    router.remove("b")
    with pytest.raises(LookupError):
        router.route(["9"], affinity=9, num_tokens=1)


def test_a_replica_that_joins_takes_its_share() -> None:
    router = router_of("a")
    router.route(["0"], affinity=0, num_tokens=10)
    router.add("b")
    assert router.route(["1"], affinity=1, num_tokens=10) == "b"


def router_of(*names: str) -> Router:
    router = Router()
    for name in names:
        router.add(name)
    return router
