from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from rlsys.evaluation.scaling import POWER_LAW, SIGMOID, Law, fit
from rlsys.evaluation.scaling.study_grid import autocorrelation_time
from tests.errors import invalid
from tests.evaluation.scaling.synthetic_curves import Curve, power, powers, sigmoid, sigmoids, steps

STEPS = steps(200)


def test_the_shapes_by_hand() -> None:
    middle_8, steepness_1 = np.log(8.0), np.log(1.0)
    found = SIGMOID.shape(np.array([8.0, 24.0, 2.0]), np.array([[middle_8, steepness_1]]))
    np.testing.assert_allclose(found, [[0.5, 0.75, 0.2]])  # 1/2, 1/(1 + 1/3), 1/(1 + 4)
    np.testing.assert_allclose(
        POWER_LAW.shape(np.array([4.0, 9.0]), np.array([[0.5]])), [[0.5, 1 / 3]]
    )


def test_shapes_are_finite_wherever_the_grid_looks() -> None:
    compute = np.array([1e-6, 1.0])
    for law in (SIGMOID, POWER_LAW):
        corners = np.array(np.meshgrid(*law.box)).reshape(len(law.box), -1).T
        assert np.isfinite(law.shape(compute, corners)).all()


@pytest.mark.parametrize("scale", [1.0, 1e9])  # steps, or tokens
def test_points_on_a_sigmoid_give_its_parameters(scale: float) -> None:
    truth = {"A": 0.61, "R_0": 0.2, "C_mid": 45.0, "B": 1.92}
    rng = np.random.default_rng(0)
    reward = sigmoid(STEPS, **truth) + 1e-5 * rng.standard_normal(len(STEPS))
    found = fit(SIGMOID, STEPS * scale, reward).parameters
    for name, value in truth.items():
        expected = value * scale if name == "C_mid" else value
        assert found[name].value == pytest.approx(expected, rel=1e-3)
        assert found[name].low <= found[name].value <= found[name].high
        assert found[name].high - found[name].low < 2e-3 * expected


def test_points_on_a_power_law_give_its_parameters() -> None:
    tokens = STEPS * 1e6
    rng = np.random.default_rng(0)
    reward = power(tokens, k=0.3, E=2.0) + 1e-5 * rng.standard_normal(len(STEPS))
    found = fit(POWER_LAW, tokens, reward).parameters
    assert found["k"].value == pytest.approx(0.3, rel=1e-3)
    assert found["E"].value == pytest.approx(2.0, rel=1e-3)


def coverage(law: Law, curves: Iterable[Curve]) -> dict[str, float]:
    """Share of the curves whose known parameter lies in its stated interval; "curve": the same of
    the reward at twice the compute."""
    hits, num = Counter[str](), 0
    for compute, reward, truth in curves:
        found = fit(law, compute, reward)
        for name, value in truth.items():
            hits[name] += found.parameters[name].low <= value <= found.parameters[name].high
        later = np.array([2 * compute[-1]])
        _, low, high = found.curve(later)[:, 0]
        expected = sigmoid(later, **truth) if law is SIGMOID else power(later, **truth)
        hits["curve"] += low <= expected[0] <= high
        num += 1
    return {name: count / num for name, count in hits.items()}


@pytest.mark.slow
def test_intervals_hold_what_is_known() -> None:
    found = coverage(SIGMOID, sigmoids(40))
    assert set(found) == {"A", "R_0", "C_mid", "B", "curve"}
    assert all(share >= 0.85 for share in found.values()), found
    found = coverage(POWER_LAW, powers(40, seed=1))
    assert set(found) == {"k", "E", "curve"}
    assert all(share >= 0.85 for share in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_of_200_curves_nine_in_ten_lie_within_their_intervals(correlation: float) -> None:
    found = coverage(SIGMOID, sigmoids(200, correlation=correlation))
    assert all(share >= 0.9 for share in found.values()), found


@pytest.mark.slow
def test_of_200_power_laws_nine_in_ten_lie_within_their_intervals() -> None:
    found = coverage(POWER_LAW, powers(200))
    assert all(share >= 0.9 for share in found.values()), found


def test_a_fit_is_the_same_each_time() -> None:
    compute, reward, _ = next(sigmoids(1))
    assert fit(SIGMOID, compute, reward).parameters == fit(SIGMOID, compute, reward).parameters


def test_the_end_of_a_run_that_has_hardly_begun_is_open() -> None:
    rng = np.random.default_rng(3)
    truth = {"A": 0.9, "R_0": 0.1, "C_mid": 1000.0, "B": 1.5}
    reward = sigmoid(STEPS, **truth) + 0.01 * rng.standard_normal(len(STEPS))
    found = fit(SIGMOID, STEPS, reward)
    assert found.at_edge
    assert found.parameters["A"].low < 0.9 < found.parameters["A"].high
    within = fit(SIGMOID, STEPS, reward, limits=(0.0, 1.0)).parameters["A"]
    assert within.low < 0.9 < within.high <= 1.0


def test_the_band_of_points_holds_the_points() -> None:
    compute, reward, _ = next(sigmoids(1))
    found = fit(SIGMOID, compute, reward)
    _, low, high = found.points(compute)
    assert 0.9 <= np.mean((low <= reward) & (reward <= high)) <= 1.0
    _, curve_low, curve_high = found.curve(compute)
    assert np.all(curve_high - curve_low < high - low)


def test_autocorrelation_time() -> None:
    rng = np.random.default_rng(0)
    independent = rng.standard_normal(5000)
    assert autocorrelation_time(independent, 4) == pytest.approx(1.0, abs=0.1)
    correlated = np.zeros(5000)
    for i in range(1, 5000):
        correlated[i] = 0.5 * correlated[i - 1] + independent[i]
    assert autocorrelation_time(correlated, 4) == pytest.approx(3.0, abs=0.3)  # (1 + ρ)/(1 - ρ)
    assert autocorrelation_time(np.zeros(10), 4) == 1.0


@pytest.mark.parametrize(
    ("law", "compute", "reward", "limits", "field"),
    [
        (SIGMOID, STEPS[:7], STEPS[:7], None, "points"),
        (SIGMOID, STEPS, np.full(200, 0.3), None, "reward"),
        (SIGMOID, STEPS, np.where(STEPS == 9, np.nan, STEPS), None, "points"),
        (SIGMOID, STEPS[::-1], STEPS, None, "compute"),
        (SIGMOID, STEPS - 1, STEPS, None, "compute"),
        (SIGMOID, STEPS, STEPS, (1.0, 0.0), "limits"),
        (SIGMOID, STEPS, STEPS, (0.0, 1.0), "limits"),
        (POWER_LAW, STEPS, STEPS, None, "reward"),
    ],
)
def test_points_that_cannot_be_fitted_are_refused(
    law: Law, compute: object, reward: object, limits: tuple[float, float] | None, field: str
) -> None:
    with invalid(field):
        fit(law, np.array(compute), np.array(reward), limits=limits)
