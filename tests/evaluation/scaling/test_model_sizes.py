from __future__ import annotations

import numpy as np
import pytest

from rlsys.evaluation.scaling import POWER_LAW, SIGMOID, Fit, fit, fit_sizes
from tests.errors import invalid
from tests.evaluation.scaling.synthetic_curves import power, sigmoids, steps

STEPS = steps(200)
SIZES = (0.5e9, 1.5e9, 3e9, 7e9, 14e9)
K_MAX, N_0 = 0.4, 2e9


def run_of(k: float, *, noise: float) -> Fit:
    rng = np.random.default_rng(int(k * 1e6))
    reward = power(STEPS, k=k, E=-0.5) + noise * rng.standard_normal(len(STEPS))
    return fit(POWER_LAW, STEPS, reward)


def test_k_of_several_sizes_gives_k_max_and_n_0() -> None:
    fits = [run_of(K_MAX / (1 + N_0 / size), noise=0.01) for size in SIZES]
    found = fit_sizes(SIZES, fits)
    assert found.k_max.low <= K_MAX <= found.k_max.high
    assert found.n_0.low <= N_0 <= found.n_0.high
    assert found.k_max.high - found.k_max.low < 0.1


def test_two_sizes_are_a_line_through_two_points() -> None:
    fits = [run_of(0.1, noise=1e-5), run_of(0.2, noise=1e-5)]
    found = fit_sizes((1.0, 3.0), fits)  # 10 = a + b, 5 = a + b/3: a = 2.5, b = 7.5
    assert found.k_max.value == pytest.approx(0.4, rel=1e-2)
    assert found.n_0.value == pytest.approx(3.0, rel=1e-2)


def test_growth_without_a_bound_is_infinite() -> None:
    fits = [run_of(0.1, noise=1e-5), run_of(0.4, noise=1e-5)]
    found = fit_sizes((1.0, 2.0), fits)
    assert np.isinf(found.k_max.value)
    assert np.isinf(found.k_max.high)


def test_runs_of_one_size_or_of_another_law_are_refused() -> None:
    one = run_of(0.1, noise=0.01)
    with invalid("model sizes", [1e9]):
        fit_sizes((1e9, 1e9), (one, one))
    compute, reward, _ = next(sigmoids(1))
    with invalid("--law"):
        fit_sizes((1e9, 2e9), (one, fit(SIGMOID, compute, reward)))
