"""Selection of groups of other runs: which peers, in which order, never twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config import ObserveConfig, RunConfig
from rlsys.data.swarm.shared_pool import (
    KEPT_STEPS,
    Shared,
    SharedCompletion,
    SharedGroup,
    SharedPool,
)
from tests.errors import invalid


def group(
    group_id: int, *, peer: str = "a", rewards: tuple[float, ...] = (0.0, 1.0)
) -> SharedGroup:
    return SharedGroup(
        peer=peer,
        group_id=group_id,
        asked=f"{group_id}+0=",
        row={"answer": str(group_id)},
        completions=[
            SharedCompletion(text=f"{peer}{i}", truncated=False) for i in range(len(rewards))
        ],
        rewards=rewards,
    )


# A group of one of three peers, whose rewards differ or not; or None to take one.
EVENTS = st.lists(
    st.none() | st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=60
)


@settings(deadline=None)
@given(events=EVENTS, seed=st.integers(0, 99), size=st.integers(1, 4))
def test_no_group_is_taken_twice_and_only_groups_whose_rewards_differ(
    events: list[tuple[str, int, bool] | None], seed: int, size: int
) -> None:
    def taken_by(events: list[tuple[str, int, bool] | None]) -> list[SharedGroup | None]:
        pool = SharedPool(seed=seed, groups_per_step=size)
        found: list[SharedGroup | None] = []
        for event in events:
            if event is None:
                there = len(pool)
                found.append(pool.take(len(found)))
                assert (found[-1] is None) == (there == 0)
            else:
                peer, number, differ = event
                rewards = (0.0, 1.0) if differ else (1.0, 1.0)
                pool.add([group(number, peer=peer, rewards=rewards)])
                assert len(pool) <= 3 * KEPT_STEPS * size
        return found

    found = taken_by(events)
    keys = [one.key for one in found if one is not None]
    assert len(set(keys)) == len(keys)
    assert all(one.rewards_differ for one in found if one is not None)
    assert taken_by(events) == found

    # After a resume, the run does not take these groups again.
    later = SharedPool(seed=seed, groups_per_step=100, taken=keys)
    later.add(group(number, peer=peer) for peer in "abc" for number in range(10))
    assert len(later) == 30 - len(keys)


def test_the_newest_of_each_peer_are_kept() -> None:
    pool = SharedPool(seed=0, groups_per_step=2)
    pool.add(group(number) for number in range(10))
    pool.add([group(0, peer="b")])
    found = {(one.peer, one.group_id) for i in range(5) if (one := pool.take(i))}
    assert found == {("a", 6), ("a", 7), ("a", 8), ("a", 9), ("b", 0)}
    assert pool.take(5) is None


def test_all_groups_are_equally_likely() -> None:
    counts = {"a": 0, "b": 0}
    for seed in range(400):
        pool = SharedPool(seed=seed, groups_per_step=4)
        pool.add([group(0), group(1), group(2), group(0, peer="b")])
        taken = pool.take(7)
        assert taken is not None
        counts[taken.peer] += 1
    assert 60 <= counts["b"] <= 140  # a quarter of them


def test_a_group_with_several_names_is_taken_once() -> None:
    pool = SharedPool(seed=0, groups_per_step=9)
    first = group(0)
    pool.add([first, replace(first, peer="copy"), group(1)])
    assert len(pool) == 2
    taken = [pool.take(index) for index in range(2)]
    pool.add([replace(one, peer="later") for one in taken if one is not None])
    assert pool.take(2) is None


def test_a_restarted_run_offers_new_groups() -> None:
    first = group(3)
    again = replace(first, completions=[SharedCompletion(text="other", truncated=False)] * 2)
    assert first.key != again.key
    assert first.key == replace(first, rewards=(0.5, 0.25)).key


def config(**changes: object) -> RunConfig:
    settings = {"prompts_per_step": 4, "observe": ObserveConfig(record_groups=4), **changes}
    return RunConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peers", "number", "field", "value"),
    [
        (["a"], 5, "groups_per_step", 5),
        ([], 1, "groups_per_step", 1),
        (["a"], -1, "groups_per_step", -1),
        (["a", "run"], 1, "peers", ["a", "run"]),
        (["../a"], 1, "peers", "../a"),
        (["/tmp/a"], 1, "peers", "/tmp/a"),
        ([""], 1, "peers", ""),
        ("abc", 1, "peers", "abc"),
    ],
)
def test_wrong_peers_are_refused(peers: list[str], number: int, field: str, value: object) -> None:
    with invalid(field, value):
        Shared(peers=peers, groups_per_step=number).check(config())


def test_a_run_that_does_not_record_all_groups_is_refused() -> None:
    shared = Shared(peers=["r*"], groups_per_step=4)
    shared.check(config())
    with invalid("observe.record_groups", 1):
        shared.check(config(observe=ObserveConfig()))
