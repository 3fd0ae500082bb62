"""How the power law's k grows with the model (2509.25300): k(N) = K_max / (1 + N_0/N).

In: the fit of one run for each model size. Out: K_max, which models of any size stay below, and
N_0, the size that has half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.scaling.laws import POWER_LAW
from scripts.scaling.scaling_fit import Fit, Interval, interval

MIN_SIZES = 2


@dataclass(frozen=True, kw_only=True)
class SizeLaw:
    """Infinite where the runs do not tell: k grows with N as if without a bound."""

    k_max: Interval
    n_0: Interval


def fit_sizes(sizes: Sequence[float], fits: Sequence[Fit]) -> SizeLaw:
    """`sizes`: parameters of the model of each fit of the power law.

    The law is a line, 1/k = 1/K_max + (N_0/K_max)/N, drawn anew through each draw of all k. Raises
    ValueError for fits of another law, and for models that are all of one size.
    """
    if any(one.law is not POWER_LAW for one in fits):
        raise ValueError("k(N) is the power law's; fit that to each run.")
    if len(set(sizes)) < MIN_SIZES:
        raise ValueError(
            f"model sizes {sorted(set(sizes))}: k(N) needs runs of at least {MIN_SIZES} sizes; "
            "give more runs."
        )
    inverse = 1 / np.asarray(sizes, float)  # [M] runs
    num_draws = min(len(one.theta) for one in fits)
    rng = np.random.default_rng(0)  # draws of different runs have nothing to do with each other
    slowness = np.stack([1 / rng.permutation(one.theta[:, 0])[:num_draws] for one in fits])  # [M,D]
    weights = 1 / np.var(slowness, axis=1)
    weights /= weights.sum()
    middle = weights @ inverse
    deviations = inverse - middle
    slope = (weights * deviations) @ slowness / (weights @ np.square(deviations))
    at_infinity = weights @ slowness - slope * middle  # 1/K_max, [D]
    is_bounded = at_infinity > 0
    bounded = np.where(is_bounded, at_infinity, 1.0)
    k_max = np.where(is_bounded, 1 / bounded, np.inf)
    n_0 = np.where(is_bounded, slope / bounded, np.inf)
    return SizeLaw(k_max=interval(k_max), n_0=interval(n_0))
