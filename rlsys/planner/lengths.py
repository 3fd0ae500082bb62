"""Lengths of completions: log-normal, censored at a maximum, or a run's own.

Completions that would exceed the maximum end there, so the mean of the censored lengths is the one
that users know. `lognormal` solves for the median that gives this mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from rlsys.errors import InvalidValue, require

SPREAD = 0.8  # standard deviation of log(length) in published reasoning runs
MIN_SPREAD, MAX_SPREAD = 0.01, 3.0
MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class Lengths:
    """Equally likely lengths in tokens, ascending.

    Attributes:
        quantiles: Representative lengths.
        maximum: The limit of a completion.
    """

    quantiles: tuple[float, ...]
    maximum: int

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(self.quantiles) / len(self.quantiles)

    def sample(self, count: int, seed: int = 0) -> np.ndarray:
        """Return `count` lengths in random order, spread evenly over the distribution."""
        positions = (np.arange(count) + 0.5) / count * len(self.quantiles) - 0.5
        values = np.interp(positions, np.arange(len(self.quantiles)), self.quantiles)
        return np.random.default_rng(seed).permutation(values)


def _censored_mean(mu: float, spread: float, maximum: float) -> float:
    """Return the mean of min(X, maximum) for a log-normal X."""
    z = (math.log(maximum) - mu) / spread

    normal = NormalDist().cdf
    return math.exp(mu + spread**2 / 2) * normal(z - spread) + maximum * (1 - normal(z))


@lru_cache(maxsize=1024)
def lognormal(mean: float, maximum: int, spread: float = SPREAD, count: int = 400) -> Lengths:
    """Return log-normal lengths whose mean, after the limit, is `mean`.

    Args:
        mean: Mean tokens of a completion.
        maximum: Most tokens of a completion.
        spread: Standard deviation of the logarithm.
        count: Number of quantiles.

    Raises:
        InvalidValue: The mean is not between 1 and the maximum, or the maximum or the spread is out
            of range.
    """
    require(
        MIN_SPREAD <= spread <= MAX_SPREAD,
        "completion_tokens.spread",
        spread,
        rule=f"must be {MIN_SPREAD:g} to {MAX_SPREAD:g}",
        fix=f"Leave it out for {SPREAD:g}, that of published reasoning runs.",
    )
    require(
        1 <= maximum <= MAX_TOKENS,
        "completion_tokens.max",
        maximum,
        rule=f"must be 1 to {MAX_TOKENS}",
        fix="Give the most tokens of a completion.",
    )
    if not 1 <= mean <= maximum:
        raise InvalidValue(
            "completion_tokens.mean",
            mean,
            rule=f"must be between 1 and the maximum, {maximum}",
            fix="Give the mean of the completions' lengths.",
        )
    low, high = -5.0, math.log(maximum) + 12.0
    for _ in range(80):
        middle = (low + high) / 2
        if _censored_mean(middle, spread, maximum) < mean:
            low = middle
        else:
            high = middle
    normal = [NormalDist().inv_cdf((number + 0.5) / count) for number in range(count)]
    values = np.minimum(np.exp(low + spread * np.array(normal)), maximum)
    values = np.clip(values * (mean / values.mean()), 1.0, maximum)
    return Lengths(tuple(values.tolist()), maximum)


def fixed(tokens: int) -> Lengths:
    """Return one length for all completions."""
    return Lengths((float(tokens),), tokens)


def measured(lengths: Sequence[float], maximum: int | None = None) -> Lengths:
    """Return the lengths that a run measured.

    Raises:
        InvalidValue: There are none, or one is not a positive finite number.
    """
    values = sorted(float(length) for length in lengths)
    require(
        bool(values) and all(math.isfinite(value) and value > 0 for value in values),
        "completion_tokens",
        len(values),
        rule="needs positive finite lengths",
        fix="Give the completions' lengths of a run.",
    )
    return Lengths(tuple(values), maximum or math.ceil(values[-1]))
