"""pass@k and mean@n from the scores of several samples per prompt.

In: a list of scores for each prompt. Out: estimates with 95 % intervals, and their metrics.
`rlsys evaluate` and the evaluation during training use it. Nothing here samples or scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlsys import metrics
from rlsys.config.checks import check_at_least, check_k
from rlsys.errors import InvalidValue, require

# Rounding errors of a weighted sum of rewards must not turn a right sample into a wrong one.
ROUNDING = 1e-9

# Share of samples with the highest score from which it may be that of right samples.
MANY = 0.1

NUM_RESAMPLES, RESAMPLES_AT_ONCE = 2000, 50
Z = 1.959963984540054  # standard normal quantile of 0.975

MIN_PROMPTS = 2


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k), computed as a product without large numbers (Chen et al., arXiv
    2107.03374, equation 1 and figure 3).

    Raises:
        InvalidValue: k is larger than the number of samples.
    """
    check_k(k, num_samples)
    if not 0 <= num_right <= num_samples:
        raise InvalidValue(
            "num_right",
            num_right,
            rule=f"must be between 0 and num_samples={num_samples}",
            fix="Use a number in this range.",
        )
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1))


def evaluate(
    scores: Sequence[Sequence[float]], *, ks: Sequence[int], right_at: float = 1.0, seed: int = 0
) -> dict[str, Estimate]:
    """Return estimates by metric: pass@k for each of `ks`, and mean@n of the scores.

    Prompts may have different numbers of samples, since a reward can fail. mean@n is the mean of
    the prompts' means, with n the largest number of samples.

    Args:
        scores: Scores of each prompt's samples.
        ks: Each k of pass@k.
        right_at: Lowest score of a right sample.
        seed: Seed of the bootstrap.

    Raises:
        InvalidValue: There are fewer than two prompts, a prompt has fewer samples than the largest
            k, or a score is not finite.
    """
    check_at_least("number of prompts", len(scores), MIN_PROMPTS)
    require(
        bool(ks) and len(set(ks)) == len(ks),
        "k",
        tuple(ks),
        rule="must be at least one number, each given once",
        fix="Use a list such as 1,4.",
    )
    for number, of_prompt in enumerate(scores):
        require(
            len(of_prompt) > 0 and all(map(math.isfinite, of_prompt)),
            f"scores[{number}]",
            list(of_prompt),
            rule="a prompt needs at least one score, and all must be finite",
            fix="Leave out samples without a finite score, and prompts without samples.",
        )
    counts = [
        (len(of_prompt), sum(score >= right_at - ROUNDING for score in of_prompt))
        for of_prompt in scores
    ]
    estimates = {
        metrics.pass_at(k): wilson([pass_at_k(num, right, k) for num, right in counts]) for k in ks
    }
    num_samples = max(num for num, _ in counts)
    means = [math.fsum(of_prompt) / len(of_prompt) for of_prompt in scores]
    estimates[metrics.mean_at(num_samples)] = bootstrap(means, seed=seed)
    return estimates


def common_maximum(scores: Sequence[Sequence[float]], *, right_at: float) -> float | None:
    """Return the highest score if it is too low to be right, but many samples have it.

    It may be the score of a right sample whose reward has costs, or of another scale. None: a
    sample is right, the highest score is not positive, or few samples have it.

    Args:
        scores: Scores of each prompt's samples.
        right_at: Lowest score of a right sample.
    """
    every = [score for of_prompt in scores for score in of_prompt]
    highest = max(every)
    if highest >= right_at - ROUNDING or highest <= 0:
        return None
    num = sum(score >= highest - ROUNDING for score in every)
    return highest if num >= MANY * len(every) else None


def as_metrics(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return metrics: each value by its name, and the ends of its interval."""
    line: dict[str, float] = {}
    for name, one in estimates.items():
        line |= {name: one.value, f"{name}/low": one.low, f"{name}/high": one.high}
    return line


def wilson(rates: Sequence[float]) -> Estimate:
    """Return the mean of the prompts' pass rates with Wilson's interval.

    The interval is within 0 and 1, and has a positive width even if all rates are equal. Rates
    between 0 and 1 vary less than single passes, so the effective number of prompts is p(1 - p)
    over the variance of the mean (Korn and Graubard, 1998).
    """
    num_prompts = len(rates)
    mean = math.fsum(rates) / num_prompts
    variance = float(np.var(rates, ddof=1)) / num_prompts
    num = float(num_prompts)
    if 0 < mean < 1 and variance > 0:
        num = max(num, mean * (1 - mean) / variance)
    scale = 1 + Z**2 / num
    centre = (mean + Z**2 / (2 * num)) / scale
    half = Z / scale * math.sqrt(mean * (1 - mean) / num + Z**2 / (4 * num**2))
    # Rounding must not put a mean of 0 or 1 outside the interval.
    return Estimate(
        value=mean, low=max(0.0, min(centre - half, mean)), high=min(1.0, max(centre + half, mean))
    )


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Return the mean of one value per prompt with its bootstrap interval.

    The values can have any scale. If all are equal, the interval has no width.
    """
    own = np.asarray(values, float)
    rng = np.random.default_rng(seed)
    means = [
        own[rng.integers(len(own), size=(RESAMPLES_AT_ONCE, len(own)))].mean(axis=1)
        for _ in range(NUM_RESAMPLES // RESAMPLES_AT_ONCE)
    ]
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float(own.mean())
    return Estimate(value=mean, low=min(float(low), mean), high=max(float(high), mean))
