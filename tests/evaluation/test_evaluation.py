from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.evaluation.pass_at_k import (
    Estimate,
    as_metrics,
    bootstrap,
    common_maximum,
    evaluate,
    pass_at_k,
    wilson,
)
from tests.errors import invalid


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 1) == pytest.approx(1 / 4)
    assert pass_at_k(4, 1, 2) == pytest.approx(1 / 2)  # 1 - 3/6
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)  # 1 - 1/6
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(1, 1, 1) == 1.0


@given(st.data())
def test_pass_at_k_counts_subsets(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-12)


def test_pass_at_k_of_many_samples() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(100_000, 100, 1000) == pytest.approx(1 - 0.99**100, rel=1e-2)


@pytest.mark.parametrize(
    ("n", "c", "k", "field", "value"),
    [
        (4, 1, 5, "k", 5),
        (4, 1, 0, "k", 0),
        (4, 5, 1, "num_right", 5),
        (4, -1, 1, "num_right", -1),
    ],
)
def test_impossible_counts_are_refused(n: int, c: int, k: int, field: str, value: int) -> None:
    with invalid(field, value):
        pass_at_k(n, c, k)


def test_estimates_by_hand() -> None:
    scores = [[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 0.0, 0.0]]  # 1 and 2 of 4 right
    found = evaluate(scores, ks=(1, 2))
    assert list(found) == ["eval/pass@1", "eval/pass@2", "eval/mean@4"]
    assert found["eval/pass@1"].value == pytest.approx(3 / 8)
    assert found["eval/pass@2"].value == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert found["eval/mean@4"].value == pytest.approx((1.5 / 4 + 2 / 4) / 2)
    assert all(one.low <= one.value <= one.high for one in found.values())


def test_right_at_is_the_lowest_right_score() -> None:
    scores = [[0.1 + 0.2], [0.29]]
    assert evaluate(scores, ks=(1,), right_at=0.3)["eval/pass@1"].value == 0.5
    assert evaluate(scores, ks=(1,), right_at=0.31)["eval/pass@1"].value == 0.0
    almost = [[0.7 + 0.1 + 0.1 + 0.1], [0.0]]  # 0.9999999999999999
    assert evaluate(almost, ks=(1,))["eval/pass@1"].value == 0.5


@pytest.mark.parametrize(
    ("scores", "right_at", "found"),
    [
        ([[0.9, 0.0], [0.9, -0.1]], 1.0, 0.9),
        ([[0.9, 0.9], [0.9]], 1.0, 0.9),  # each sample is right
        ([[0.9] + [0.0] * 4, [0.0] * 5], 1.0, 0.9),  # a tenth
        ([[0.9] + [0.0] * 4, [0.0] * 6], 1.0, None),
        ([[0.9, 1.0], [0.9, 0.9]], 1.0, None),
        ([[0.9, 0.0], [0.9, 0.0]], 0.9, None),
        ([[0.7 + 0.1 + 0.1, 0.9], [0.0] * 18], 1.0, 0.9),  # 0.8999999999999999
        ([[0.0, 0.0], [0.0, -1.0]], 1.0, None),  # none is right
        ([[3.0, 1.0], [3.0, 2.0]], 5.0, 3.0),
    ],
)
def test_a_common_maximum_below_the_threshold(
    scores: list[list[float]], right_at: float, found: float | None
) -> None:
    assert common_maximum(scores, right_at=right_at) == found


def test_prompts_may_have_different_numbers_of_samples() -> None:
    found = evaluate([[1.0], [0.0, 1.0]], ks=(1,))
    assert found["eval/pass@1"].value == found["eval/mean@2"].value == 0.75


def test_metrics_of_estimates() -> None:
    found = as_metrics({"eval/pass@1": Estimate(value=0.5, low=0.4, high=0.6)})
    assert found == {"eval/pass@1": 0.5, "eval/pass@1/low": 0.4, "eval/pass@1/high": 0.6}


@pytest.mark.parametrize(
    ("scores", "ks", "field"),
    [
        ([[1.0]], (1,), "number of prompts"),
        ([[1.0], [1.0, 0.0]], (2,), "k"),
        ([[1.0], []], (1,), "scores[1]"),
        ([[1.0], [math.nan]], (1,), "scores[1]"),
        ([[1.0], [1.0]], (), "k"),
        ([[1.0], [1.0]], (1, 1), "k"),
    ],
)
def test_unusable_scores_are_refused(
    scores: list[list[float]], ks: tuple[int, ...], field: str
) -> None:
    with invalid(field):
        evaluate(scores, ks=ks)


def test_wilson_by_hand() -> None:
    # 8 of 10, z = 1.96: centre (0.8 + 0.19207)/1.38415, half-width 0.22657
    found = wilson([1.0] * 8 + [0.0] * 2)
    assert found.value == 0.8
    assert found.low == pytest.approx(0.4902, abs=1e-4)
    assert found.high == pytest.approx(0.9433, abs=1e-4)
    everything = wilson([1.0] * 10)
    assert everything.high == 1.0
    assert everything.low == pytest.approx(0.7225, abs=1e-4)  # 1/(1 + z²/10)
    nothing = wilson([0.0] * 10)
    assert nothing.low == 0.0
    assert nothing.high == pytest.approx(0.2775, abs=1e-4)


def test_rates_of_many_samples_vary_less_than_single_passes() -> None:
    single, rates = wilson([1.0, 0.0] * 20), wilson([0.4, 0.6] * 20)
    assert single.value == rates.value == 0.5
    assert rates.high - rates.low < 0.3 * (single.high - single.low)


def test_intervals_contain_the_known_value() -> None:
    """Prompts of different difficulty, four samples each."""
    rng = np.random.default_rng(0)
    passed = averaged = 0
    for seed in range(200):
        rates = rng.beta(0.5, 0.8, size=60)
        scores = (rng.random((60, 4)) < rates[:, None]).astype(float).tolist()
        found = evaluate(scores, ks=(1,), seed=seed)
        truth = 0.5 / 1.3
        passed += found["eval/pass@1"].low <= truth <= found["eval/pass@1"].high
        averaged += found["eval/mean@4"].low <= truth <= found["eval/mean@4"].high
    assert passed >= 180
    assert averaged >= 180


def test_bootstrap_of_any_scale() -> None:
    found = bootstrap([-100.0, 100.0] * 50)
    assert found.value == 0.0
    assert found.low == pytest.approx(-1.96 * 10, abs=2)  # standard error 100/√100
    assert found.high == pytest.approx(1.96 * 10, abs=2)
    assert bootstrap([0.25, 0.25]) == Estimate(value=0.25, low=0.25, high=0.25)
    assert bootstrap([1.0, 2.0, 3.0], seed=1) == bootstrap([1.0, 2.0, 3.0], seed=1)
