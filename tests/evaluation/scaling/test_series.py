from __future__ import annotations

import math

import numpy as np
import pytest

from rlsys.evaluation.scaling import read_series
from rlsys.evaluation.scaling.series import MAX_POINTS, Against
from tests.errors import invalid

LINES = [
    {"step": 1, "reward/mean": 0.1, "time/step_s": 1800, "throughput/trained_tokens_per_s": 10},
    {"step": 2, "reward/mean": 0.2, "time/step_s": 900, "throughput/trained_tokens_per_s": 20},
    {"step": 3, "reward/mean": 0.4, "time/step_s": 900, "throughput/trained_tokens_per_s": 40},
]


@pytest.mark.parametrize(
    ("against", "compute"),
    [("step", [1, 2, 3]), ("hours", [0.5, 0.75, 1.0]), ("tokens", [18_000, 36_000, 72_000])],
)
def test_compute_adds_up(against: Against, compute: list[float]) -> None:
    found = read_series(LINES, name="run", metric="reward/mean", against=against)
    np.testing.assert_allclose(found.compute, compute)
    np.testing.assert_allclose(found.reward, [0.1, 0.2, 0.4])


def test_steps_without_the_metric_count_as_compute() -> None:
    lines = [line | ({"eval/pass@1": 0.5} if line["step"] > 1 else {}) for line in LINES]
    found = read_series(lines, name="run", metric="eval/pass@1", against="tokens")
    np.testing.assert_allclose(found.compute, [36_000, 72_000])


def test_long_runs_are_means_of_neighbours() -> None:
    lines = [
        {"step": step, "reward/mean": float(step % 2)} for step in range(1, 4 * MAX_POINTS + 1)
    ]
    found = read_series(lines, name="run", metric="reward/mean", against="step")
    np.testing.assert_allclose(found.reward, np.full(MAX_POINTS, 0.5))
    assert found.compute[0] == 2.5  # of steps 1 to 4


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "high"])
def test_values_that_are_not_finite_numbers_are_refused(value: object) -> None:
    lines = [*LINES, {"step": 4, "reward/mean": value}]
    with invalid("reward/mean") as error:
        read_series(lines, name="run", metric="reward/mean", against="step")  # type: ignore[arg-type]
    assert repr(error.value.value) == repr(value)
    assert "step 4" in error.value.rule


def test_an_unknown_metric_is_refused_with_a_known_one() -> None:
    with invalid("--metric", "reward/men") as error:
        read_series(LINES, name="run", metric="reward/men", against="step")
    assert "reward/mean" in error.value.fix


def test_unknown_compute_is_refused() -> None:
    lines = [*LINES, {"step": 4, "reward/mean": 0.5}]
    with invalid("--against", "hours") as error:
        read_series(lines, name="run", metric="reward/mean", against="hours")
    assert "time/step_s" in error.value.rule
    with invalid("run"):
        read_series([], name="run", metric="reward/mean", against="step")
