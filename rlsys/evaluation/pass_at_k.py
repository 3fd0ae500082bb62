"""What the scores of several samples per prompt say about a model: pass@k and mean@n.

In: a list of scores for each prompt. Out: estimates with 95 % intervals, and metrics of them.
scripts/evaluate.py and the evaluation beside training call it; nothing here samples or scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlsys import metrics
from rlsys.config.checks import check_k

# A sum of weighted rewards may miss the score that counts as right by rounding.
ROUNDING = 1e-9

NUM_RESAMPLES, RESAMPLES_AT_ONCE = 2000, 50
Z = 1.959963984540054  # standard normal quantile of 0.975

MIN_PROMPTS = 2


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts, and its 95 % interval over other prompts like these."""

    value: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that at least one of k samples is right, unbiased from more samples.

    1 - C(n - c, k) / C(n, k), computed as a product without a large number (Chen et al.,
    2107.03374, equation 1 and figure 3). Raises ValueError for k larger than the number of samples.
    """
    check_k(k, num_samples)
    if not 0 <= num_right <= num_samples:
        raise ValueError(
            f"num_right={num_right} of num_samples={num_samples} is no count; use 0 to num_samples."
        )
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1))


def evaluate(
    scores: Sequence[Sequence[float]], *, ks: Sequence[int], right_at: float = 1.0, seed: int = 0
) -> dict[str, Estimate]:
    """Estimates by metric: pass@k for each of `ks`, and mean@n of the scores themselves.

    `scores`: those of each prompt's samples; a sample counts as right from `right_at` on. Prompts
    may have different numbers of samples, since a reward can fail; mean@n is named by the largest
    and is the mean of the prompts' means. Raises ValueError for fewer than two prompts, a prompt
    with fewer samples than the largest k, and scores that are not finite.
    """
    if len(scores) < MIN_PROMPTS:
        raise ValueError(
            f"{len(scores)} prompts give no interval; evaluate on at least {MIN_PROMPTS}."
        )
    if not ks or len(set(ks)) < len(ks):
        raise ValueError(f"k={tuple(ks)} names none, or one twice; give each k once, such as 1,4.")
    for number, of_prompt in enumerate(scores):
        if not of_prompt:
            raise ValueError(f"prompt {number} (from 0) has no score; leave it out.")
        if not all(map(math.isfinite, of_prompt)):
            raise ValueError(
                f"the scores of prompt {number} (from 0) are {list(of_prompt)}; leave samples "
                "without a finite score out."
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


def as_metrics(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """For a line of metrics: the value by its name, the interval's ends beside it."""
    line: dict[str, float] = {}
    for name, one in estimates.items():
        line |= {name: one.value, f"{name}/low": one.low, f"{name}/high": one.high}
    return line


def wilson(rates: Sequence[float]) -> Estimate:
    """The mean of the prompts' pass rates with Wilson's interval, which stays within 0 to 1 and has
    a width where all are equal.

    Rates between 0 and 1 vary less than single passes: they are worth as many of these, p(1 - p)
    over the variance of the mean, as vary so much (Korn and Graubard, 1998).
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
    # Rounding must not put the mean, where it is 0 or 1, outside.
    return Estimate(
        value=mean, low=max(0.0, min(centre - half, mean)), high=min(1.0, max(centre + half, mean))
    )


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of values of any scale, one a prompt, with the interval of its means over resampled
    prompts. Where all values are equal, so are its ends.
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
