"""Reward functions that are accepted, and the meaning of their results."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlsys
from rlsys.common import pickling
from rlsys.errors import NOT_GIVEN
from rlsys.rewards import (
    RewardFailure,
    RewardResult,
    as_rewards,
    check_columns,
    exact_match,
    example_rollout,
    numeric_answer,
)
from rlsys.rewards.outcome import combine, components_of
from rlsys.rewards.reward import Reward, reward
from tests.errors import invalid


@reward
def short(rollout: rlsys.Rollout) -> float:
    return float(len(rollout.completion_text) < 3)


def plain(rollout: rlsys.Rollout) -> float:
    return 1.0


async def slow(rollout: rlsys.Rollout) -> float:
    return 1.0


def two(rollout: rlsys.Rollout, answer: str) -> float:
    return 1.0


def none_at_all() -> float:
    return 1.0


class Judge:
    async def __call__(self, rollout: rlsys.Rollout) -> float:
        return 1.0


def test_the_decorator_keeps_the_function_and_its_name() -> None:
    assert isinstance(short, Reward)
    assert (short.name, short.weight, short.timeout_s) == ("short", 1.0, None)


def test_the_decorator_takes_options() -> None:
    decorated = rlsys.reward(name="s", weight=0.5, timeout_s=2.0, required_columns=["a"])(plain)
    assert decorated.function is plain
    assert (decorated.name, decorated.weight, decorated.timeout_s) == ("s", 0.5, 2.0)
    assert decorated.required_columns == ("a",)
    typed = rlsys.reward(required_columns=["a"], column_types=[str, int])(plain)
    assert typed.column_types == (str, int)


def test_undecorated_functions_are_rewards() -> None:
    first, second, third = as_rewards([short, plain, Judge()])
    assert first is short
    assert (second.name, third.name) == ("plain", "Judge")


@pytest.mark.parametrize(
    ("function", "is_async"), [(plain, False), (slow, True), (Judge(), True), (short, False)]
)
def test_async_functions_are_recognized(function: Callable[..., Any], is_async: bool) -> None:
    (only,) = as_rewards([function])
    assert only.is_async == is_async


def test_a_weight_can_be_changed_without_changing_the_reward() -> None:
    assert short.weighted(0.25).weight == 0.25
    assert short.weight == 1.0


@pytest.mark.parametrize(
    ("build", "field", "value"),
    [
        (lambda: as_rewards([]), "rewards", []),
        (lambda: as_rewards([plain, plain]), "rewards", ["plain", "plain"]),
        (lambda: reward(timeout_s=0.0)(plain), "reward 'plain': timeout_s", 0.0),
        (lambda: short.weighted("0.1"), "reward 'short': weight", "0.1"),  # type: ignore[arg-type]
        (lambda: short.weighted(math.inf), "reward 'short': weight", math.inf),
        (lambda: reward(timeout_s="1")(plain), "reward 'plain': timeout_s", "1"),  # type: ignore[call-overload]
        (lambda: reward(name=3)(plain), "name of a reward", 3),  # type: ignore[call-overload]
        (lambda: reward(name="")(plain), "name of a reward", ""),
        (lambda: reward(name=" ")(plain), "name of a reward", " "),
        (
            lambda: reward(required_columns="answer")(plain),
            "reward 'plain': required_columns",
            "answer",
        ),
        (lambda: reward(column_types=str)(plain), "reward 'plain': column_types", str),  # type: ignore[call-overload]
        (lambda: reward(column_types=["str"])(plain), "reward 'plain': column_types", ["str"]),  # type: ignore[list-item]
        (lambda: reward(environment="KEY")(plain), "reward 'plain': environment", "KEY"),
        (lambda: as_rewards([two]), "reward 'two'", NOT_GIVEN),  # type: ignore[list-item]
        (lambda: reward(none_at_all), "reward 'none_at_all'", NOT_GIVEN),  # type: ignore[arg-type]
        (lambda: as_rewards([3]), "reward 'int'", 3),  # type: ignore[list-item]
        (lambda: as_rewards([exact_match]), "reward 'exact_match'", NOT_GIVEN),  # type: ignore[list-item]
        (lambda: exact_match(example_rollout()), "exact_match: column", NOT_GIVEN),  # type: ignore[arg-type]
        (lambda: numeric_answer(3), "numeric_answer: column", 3),  # type: ignore[arg-type]
    ],
)
def test_wrong_functions_and_settings_are_refused(
    build: Callable[[], object], field: str, value: object
) -> None:
    with invalid(field, value):
        build()


def test_a_missing_column_is_refused() -> None:
    check_columns([exact_match("solution"), plain], ["solution"])
    with invalid("reward 'exact_match': column", "solution"):
        check_columns([exact_match("solution")], ["answer"])


def test_rewards_can_be_pickled() -> None:
    decorated = pickle.loads(pickling.dumps(short))
    assert (decorated.name, decorated.is_async) == ("short", False)
    built_in = exact_match("solution")
    assert pickle.loads(pickle.dumps(built_in)).required_columns == ("solution",)


@pytest.mark.parametrize(
    ("returned", "components"),
    [
        (0.5, {"short": 0.5}),
        (2, {"short": 2.0}),
        (True, {"short": 1.0}),
        (np.bool_(False), {"short": 0.0}),
        (np.float32(0.25), {"short": 0.25}),
        (np.int64(3), {"short": 3.0}),
        (Fraction(1, 4), {"short": 0.25}),
        ({"a": 1.0, "b": 0.5}, {"short": 1.5, "short/a": 1.0, "short/b": 0.5}),
        ({"reward": 2.0, "b": 0.5}, {"short": 2.0, "short/reward": 2.0, "short/b": 0.5}),
        ({"a": True}, {"short": 1.0, "short/a": 1.0}),
    ],
)
def test_numbers_and_dicts_of_numbers_are_rewards(
    returned: object, components: dict[str, float]
) -> None:
    found = components_of(short, returned)
    assert found == components
    assert isinstance(found, dict)
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "type"),
        ("1.0", "type"),
        ([1.0], "type"),
        (1j, "type"),
        ({}, "type"),
        ({"a": "1"}, "type"),
        ({"": 1.0}, "type"),
        ({" ": 1.0, "b": 2.0}, "type"),
        ({"a": {"b": 1.0}}, "type"),
        (np.ones(1), "type"),
        (math.nan, "nan"),
        (-math.inf, "nan"),
        (10**400, "nan"),
        (-1e39, "nan"),  # infinite in float32
        ({"a": 1.0, "b": math.nan}, "nan"),
        (np.float32("nan"), "nan"),
    ],
)
def test_other_values_are_failures(returned: object, kind: str) -> None:
    failure = components_of(short, returned)
    assert isinstance(failure, RewardFailure)
    assert (failure.kind, failure.reward) == (kind, "short")
    assert failure.message.startswith("short returned ")


def test_the_total_is_the_weighted_sum_and_components_are_unweighted() -> None:
    rewards = [short.weighted(2.0), reward(name="b", weight=-0.5)(plain)]
    result = combine(rewards, [{"short": 3.0, "short/x": 3.0}, {"b": 4.0}])
    assert result == RewardResult(total=4.0, components={"short": 3.0, "short/x": 3.0, "b": 4.0})


def test_one_failure_fails_the_rollout() -> None:
    failure = RewardFailure(kind="nan", reward="b", message="")
    rewards = [short, reward(name="b", weight=0.0)(plain)]
    assert combine(rewards, [{"short": 3.0}, failure]) is failure


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=2))
def test_a_total_is_always_finite(values: list[float]) -> None:
    rewards = [short, reward(name="b", weight=3.0)(plain)]
    result = combine(rewards, [{"short": values[0]}, {"b": values[1]}])
    assert isinstance(result, RewardFailure) or np.isfinite(np.float32(result.total))
