"""Which reward functions can travel to a process of their own, and what the others are told."""

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

LOCK = threading.Lock()  # of a module, which the other process imports


def with_lock(rollout: Rollout) -> float:
    with LOCK:
        return 1.0


def test_closures_and_lambdas_travel() -> None:
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


def test_what_cannot_travel_is_named_with_its_reward(tmp_path: Any) -> None:
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
        (closes_over, r"variable 'lock' \(lock\)"),
        (lambda rollout: lock.locked(), r"variable 'lock' \(lock\)"),
        (by_way_of_another, r"variable 'lock' \(lock\) of variable 'closes_over' \(function\)"),
        (partial(closes_over), r"variable 'lock' \(lock\) of the function \(function\)"),
        (partial(print, "x", file), r"argument 1 \(TextIOWrapper\)"),
        (Judge(), r"attribute 'file' \(TextIOWrapper\)"),
        (Judge().method, r"attribute 'file' \(TextIOWrapper\) of its object \(Judge\)"),
    ]
    for function, culprit in cases:
        message = rf"reward 'mine' .* cannot travel there: {culprit} cannot be pickled \(\w*Error: "
        with pytest.raises(ValueError, match=message):
            pack_rewards([exact_match(), reward(name="mine")(function)])
    file.close()


def test_an_example_rollout_is_what_a_run_gives() -> None:
    example = rlsys.example_rollout("18", metadata={"answer": "18"}, token_ids=[1, 2])
    assert exact_match()(example) == 1.0
    assert example.finish_reason is FinishReason.STOP
    travelled = pack_rollouts([example]).rollout(0)
    assert vars(travelled).keys() == vars(example).keys()
    for rollout in (example, travelled):
        with pytest.raises(ValueError, match="read-only"):
            rollout.token_ids[0] = 5
    assert travelled.token_ids.tolist() == [1, 2]
