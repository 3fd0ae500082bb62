"""Conditions of an early stop: their text and their meaning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.config import HeldOutConfig, RunConfig
from rlsys.config.step_range import parse_steps
from rlsys.config.stop_condition import StopCondition
from tests.errors import invalid


def met(text: str, values: list[float]) -> list[bool]:
    """Return for each value whether the condition is met once it has arrived."""
    condition = StopCondition.parse(text)
    return [condition.is_met(values[: n + 1]) for n in range(len(values))]


def test_thresholds_by_hand() -> None:
    assert met("eval/mean@1 > 0.5", [0.4, 0.5, 0.6]) == [False, False, True]
    assert met("eval/mean@1>=0.5", [0.4, 0.5]) == [False, True]
    assert met("entropy < 1e-1", [0.2, 0.1, 0.05]) == [False, False, True]
    assert met("loss <= -1", [0.0, -1.0]) == [False, True]
    assert met("reward/mean > 0.5 for 2", [0.6, 0.4, 0.6, 0.7]) == [False, False, False, True]


def test_patience_by_hand() -> None:
    """An equal value is no improvement."""
    values = [0.1, 0.3, 0.2, 0.3, 0.4, 0.4, 0.1]
    assert met("x not rising for 2", values) == [False] * 3 + [True, False, False, True]
    assert met("x not falling for 1", [3.0, 2.0, 2.0, 1.0]) == [False, False, True, False]


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.integers(1, 5))
def test_rising_and_falling_mirror_each_other(values: list[float], count: int) -> None:
    rising = met(f"x not rising for {count}", values)
    assert rising == met(f"x not falling for {count}", [-value for value in values])
    if sorted(set(values)) == values:  # each value is the largest so far
        assert not any(rising)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.9",
        "reward/mean",
        "reward/mean = 0.9",
        "reward/mean=>0.9",
        "reward/mean => 0.9",
        "reward/mean==0.9",
        "reward/mean!>0.9",
        "reward/mean<>0.9",
        "reward/mean >> 0.9",
        "reward/mean>=>0.9",
        "> 0.9",
        "reward/mean > many",
        "reward/mean > nan",
        "reward/mean > inf",
        "reward/mean > 0.9 for 0",
        "reward/mean not rising",
        "reward/mean not rising for 0",
        "reward/mean not flat for 3",
        "reward/mean > 0.9 and loss < 1",
        "reward/mean > \u0660.\u0669",
        "reward/mean > 0.9 for \u0663",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with invalid("stop_when"):
        RunConfig(stop_when=(text,))


def test_a_metric_of_evaluations_needs_evaluations() -> None:
    with invalid("stop_when"):
        RunConfig(stop_when=("eval/pass@1 > 0.9",))
    config = RunConfig(stop_when=("eval/pass@1 > 0.9",), evaluation=HeldOutConfig(every=5))
    assert [one.metric for one in config.stop_conditions] == ["eval/pass@1"]


def test_a_range_of_steps() -> None:
    assert parse_steps("", "profile_steps", at_most=20) == range(0)
    assert parse_steps("5", "profile_steps", at_most=20) == range(5, 6)
    assert parse_steps("5:8", "profile_steps", at_most=20) == range(5, 8)
    for text in ("0:2", "8:5", "5:5", "5:", "5-8", "1:100", "a", "\u0665"):
        with invalid("profile_steps"):
            RunConfig(profile_steps=text)
