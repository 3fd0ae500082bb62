"""Noisy curves whose parameters are known."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rlsys.evaluation.scaling.laws import Array

Curve = tuple[Array, Array, dict[str, float]]


def steps(num: int) -> Array:
    return np.arange(1, num + 1, dtype=np.float64)


def sigmoid(compute: Array, *, A: float, R_0: float, C_mid: float, B: float) -> Array:
    return R_0 + (A - R_0) / (1 + (C_mid / compute) ** B)


def power(compute: Array, *, k: float, E: float) -> Array:
    reward: Array = 1 - np.exp(E) * compute**-k
    return reward


def sigmoids(num: int, *, correlation: float = 0.0, seed: int = 0) -> Iterator[Curve]:
    """Runs of 80 to 300 steps that end between 1.25 and 10 times C_mid; the noise of a step is 0.01
    to 0.03, and that of steps beside each other has `correlation`."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        num_steps = int(rng.integers(80, 300))
        compute = steps(num_steps)
        truth = {
            "A": rng.uniform(0.5, 0.95),
            "R_0": rng.uniform(0, 0.3),
            "C_mid": num_steps * rng.uniform(0.1, 0.8),
            "B": rng.uniform(1, 3),
        }
        noise = _noise(num_steps, correlation, rng) * rng.uniform(0.01, 0.03)
        yield compute, sigmoid(compute, **truth) + noise, truth


def powers(num: int, *, seed: int = 0) -> Iterator[Curve]:
    """Runs whose pass rate is 0 to 0.5 at first."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        num_steps = int(rng.integers(80, 300))
        compute = steps(num_steps)
        truth = {"k": rng.uniform(0.05, 1.0), "E": rng.uniform(-0.7, 0.0)}
        noise = _noise(num_steps, 0.0, rng) * rng.uniform(0.01, 0.03)
        yield compute, power(compute, **truth) + noise, truth


def _noise(num: int, correlation: float, rng: np.random.Generator) -> Array:
    noise = rng.standard_normal(num)
    for i in range(1, num):
        noise[i] = correlation * noise[i - 1] + np.sqrt(1 - correlation**2) * noise[i]
    return noise
