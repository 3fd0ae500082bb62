"""Reward functions that can be sent to another process, and the errors of the others."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from typing import Any

import pytest

import rlsys
from rlsys.rewards import exact_match, pack_rewards, reward
from rlsys.rewards.process.reward_messages import pack_rollouts
from rlsys.types import FinishReason, Rollout
from tests.errors import invalid

LOCK = threading.Lock()  # the other process imports the module


def with_lock(rollout: Rollout) -> float:
    with LOCK:
        return 1.0


def test_closures_and_lambdas_are_packed() -> None:
    weight = 2.0
    packed = pack_rewards(
        [lambda rollout: weight, exact_match(), reward(environment=["KEY"])(with_lock)]
    )
    first, second, third = pickle.loads(packed.pickled)
    assert first(rlsys.example_rollout()) == 2.0
    assert second(rlsys.example_rollout("7", metadata={"answer": "7"})) == 1.0
    assert third.name == "with_lock"
    assert [one.name for one in packed.rewards] == ["<lambda>", "exact_match", "with_lock"]
    assert packed.environment == {"KEY"}


def test_an_object_that_cannot_be_pickled_is_named_with_its_reward(tmp_path: Any) -> None:
    lock = threading.Lock()
    file = (tmp_path / "log").open("w")

    def closes_over(rollout: Rollout) -> float:
        with lock:
            return 1.0

    def by_way_of_another(rollout: Rollout) -> float:
        return closes_over(rollout)

    class Judge:
        def __init__(self) -> None:
            self.file = file

        def __call__(self, rollout: Rollout) -> float:
            return 1.0

        def method(self, rollout: Rollout) -> float:
            return 1.0

    cases: list[tuple[Any, str]] = [
        (closes_over, "variable 'lock' (lock)"),
        (lambda rollout: lock.locked(), "variable 'lock' (lock)"),
        (by_way_of_another, "variable 'lock' (lock) of variable 'closes_over' (function)"),
        (partial(closes_over), "variable 'lock' (lock) of the function (function)"),
        (partial(print, "x", file), "argument 1 (TextIOWrapper)"),
        (Judge(), "attribute 'file' (TextIOWrapper)"),
        (Judge().method, "attribute 'file' (TextIOWrapper) of its object (Judge)"),
    ]
    for function, culprit in cases:
        with invalid("reward 'mine'") as found:
            pack_rewards([exact_match(), reward(name="mine")(function)])
        assert f"{culprit} cannot be pickled" in found.value.rule
    file.close()


def test_an_example_rollout_is_what_a_run_gives() -> None:
    example = rlsys.example_rollout("18", metadata={"answer": "18"}, token_ids=[1, 2])
    assert exact_match()(example) == 1.0
    assert example.finish_reason is FinishReason.STOP
    unpacked = pack_rollouts([example]).rollout(0)
    assert vars(unpacked).keys() == vars(example).keys()
    for rollout in (example, unpacked):
        with pytest.raises(ValueError):  # noqa: PT011 - numpy has no type for it
            rollout.token_ids[0] = 5
        assert not rollout.token_ids.flags.writeable
    assert unpacked.token_ids.tolist() == [1, 2]
