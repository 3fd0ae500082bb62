"""Growth of the power law's k with the model size (2509.25300): k(N) = K_max / (1 + N_0/N).

In: the fit of one run for each model size. Out: K_max, the limit for large models, and N_0, the
size with half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlsys.errors import InvalidValue
from rlsys.evaluation.scaling.laws import POWER_LAW
from rlsys.evaluation.scaling.scaling_fit import Fit, Interval, interval

MIN_SIZES = 2


@dataclass(frozen=True, kw_only=True)
class SizeLaw:
    """The fitted K_max and N_0, infinite if k grows with N without a visible bound."""

    k_max: Interval
    n_0: Interval


def fit_sizes(sizes: Sequence[float], fits: Sequence[Fit]) -> SizeLaw:
    """Fit k(N) to fits of the power law.

    The law is a line, 1/k = 1/K_max + (N_0/K_max)/N, fitted to each draw of all k.

    Args:
        sizes: Number of parameters of each fit's model.
        fits: Fits of the power law.

    Raises:
        InvalidValue: A fit is of another law, or there are too few sizes.
    """
    if any(one.law is not POWER_LAW for one in fits):
        raise InvalidValue("--law", rule="k(N) needs the power law", fix="Fit it to each run.")
    if len(set(sizes)) < MIN_SIZES:
        raise InvalidValue(
            "model sizes",
            sorted(set(sizes)),
            rule=f"k(N) needs at least {MIN_SIZES} sizes",
            fix="Give more runs.",
        )
    inverse = 1 / np.asarray(sizes, float)  # [M] runs
    num_draws = min(len(one.theta) for one in fits)
    rng = np.random.default_rng(0)  # draws of different runs are independent
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
