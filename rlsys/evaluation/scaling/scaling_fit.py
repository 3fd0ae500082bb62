"""Fit of a law to rewards over compute: parameters and predictions with their uncertainty.

In: compute and reward of the points, and a law. Out: a `Fit` with draws from the posterior over the
grid of study_grid.py; ScaleRL searches such a grid (2510.13786). Intervals of parameters that the
points do not determine are therefore wide and asymmetric, which the curvature at the best fit would
not show.

Neighbouring points have correlated errors, above all if the law is not exact. They count as n/τ
points, with τ the autocorrelation time of the residuals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlsys.errors import require
from rlsys.evaluation.scaling.laws import Array, Law
from rlsys.evaluation.scaling.study_grid import Data, Grid, autocorrelation_time, narrowed

NUM_DRAWS = 4000
COVERED = 0.95

# Points beyond the number of parameters, to estimate the noise.
MIN_SPARE_POINTS = 4


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Median, and the ends of the central 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Draws from the posterior of a law's parameters."""

    law: Law
    last: float
    """Compute of the last point."""
    tau: float
    """Autocorrelation time of the residuals, in points; 1 if they are independent."""
    noise: float
    """Standard deviation of one point around the curve."""
    theta: Array = field(repr=False)  # [D, K]
    intercept: Array = field(repr=False)  # [D]
    slope: Array = field(repr=False)  # [D]
    noises: Array = field(repr=False)  # [D]
    at_edge: bool
    """True if the draws reach the largest possible C_mid, so that the points do not show where the
    curve levels off."""

    @property
    def parameters(self) -> dict[str, Interval]:
        """Return the parameters of the law with their intervals."""
        draws = self.law.parameters(self.theta, self.intercept, self.slope, self.last)
        return {name: interval(values) for name, values in draws.items()}

    def curve(self, compute: Array) -> Array:
        """Return the median and the 95 % band of the curve at each compute [3, N]."""
        return _quantiles(self._curves(compute))

    def points(self, compute: Array) -> Array:
        """Return the same for single points, which also have noise [3, N]."""
        noise = np.random.default_rng(1).standard_normal(len(self.noises)) * self.noises
        return _quantiles(self._curves(compute) + noise[:, None])

    def mean(self, compute: Array) -> Array:
        """Return the same for the curve's mean over these computes [3]."""
        return _quantiles(self._curves(compute).mean(axis=1))

    def _curves(self, compute: Array) -> Array:
        shape = self.law.shape(np.asarray(compute, float) / self.last, self.theta)
        return self.intercept[:, None] + self.slope[:, None] * shape


def fit(
    law: Law,
    compute: Array,
    reward: Array,
    *,
    limits: tuple[float, float] | None = None,
    seed: int = 0,
) -> Fit:
    """Fit `law` to points [N] with increasing compute.

    Args:
        law: The law.
        compute: Compute of each point [N].
        reward: Reward of each point [N].
        limits: Lowest and highest possible reward, such as (0, 1) of a pass rate; the curve begins
            and ends within them.
        seed: Random seed of the draws.

    Raises:
        InvalidValue: There are too few points, all rewards are equal, or no curve of the law fits.
    """
    compute, reward = np.asarray(compute, float), np.asarray(reward, float)
    _check(law, compute, reward, limits)
    data = Data(law, compute / compute[-1], reward)
    box = np.array(law.box)
    if law.begins_with_data:
        box[0, 0] += np.log(data.compute[0])
    tau = 1.0
    for _ in range(2):  # τ needs the residuals of a fit
        grid = narrowed(data, box, tau)
        best = data.lines(grid.theta[[int(np.argmax(grid.log_weights))]])
        tau = autocorrelation_time(best.residuals(data)[0], law.num_parameters)
    return _draw(data, grid, box, tau, compute[-1], limits, np.random.default_rng(seed))


def _draw(
    data: Data,
    grid: Grid,
    box: Array,
    tau: float,
    last: float,
    limits: tuple[float, float] | None,
    rng: np.random.Generator,
) -> Fit:
    weights = np.exp(grid.log_weights - grid.log_weights.max())
    kept: list[tuple[Array, Array, Array, Array]] = []
    num_kept = 0
    for _ in range(50):
        chosen = rng.choice(len(weights), size=NUM_DRAWS, p=weights / weights.sum())
        jitter = rng.uniform(-0.5, 0.5, (NUM_DRAWS, len(box)))
        theta = np.clip(grid.theta[chosen] + jitter @ grid.cell.T, box[:, 0], box[:, 1])
        lines = data.lines(theta)
        num_points = len(data.reward) / tau
        degrees = max(num_points - data.num_linear, 1.0)
        noise = np.sqrt(lines.rss / tau / rng.chisquare(degrees, NUM_DRAWS))
        slope = lines.slope + rng.standard_normal(NUM_DRAWS) * noise * np.sqrt(tau / lines.spread)
        mean = lines.mean
        if data.law.intercept is None:
            mean = mean + rng.standard_normal(NUM_DRAWS) * noise / np.sqrt(num_points)
        intercept = mean - slope * lines.centre
        allowed = np.full(NUM_DRAWS, True)
        if limits is not None and data.law.intercept is None:
            ends = np.stack([intercept, intercept + slope])
            allowed = np.all((ends >= limits[0]) & (ends <= limits[1]), axis=0)
        kept.append((theta[allowed], intercept[allowed], slope[allowed], noise[allowed]))
        num_kept += int(allowed.sum())
        if num_kept >= NUM_DRAWS:
            break
    require(
        num_kept >= 100,
        "limits",
        limits,
        rule=f"no {data.law.name} within them fits these points",
        fix="Use the limits that the metric really has, or none.",
    )
    theta, intercept, slope, noise = (
        np.concatenate(parts)[:NUM_DRAWS] for parts in zip(*kept, strict=True)
    )
    highest, width = box[0, 1], box[0, 1] - box[0, 0]
    return Fit(
        law=data.law,
        last=last,
        tau=tau,
        noise=float(np.median(noise)),
        theta=theta,
        intercept=intercept,
        slope=slope,
        noises=noise,
        at_edge=data.law.begins_with_data
        and bool(np.quantile(theta[:, 0], 0.975) > highest - 0.05 * width),
    )


def _quantiles(draws: Array) -> Array:
    tail = (1 - COVERED) / 2
    # The nearest draw, as some may be infinite.
    quantiles: Array = np.nanquantile(draws, [0.5, tail, 1 - tail], axis=0, method="nearest")
    return quantiles


def interval(draws: Array) -> Interval:
    """Return the interval of draws [D]."""
    value, low, high = map(float, _quantiles(draws))
    return Interval(value=value, low=low, high=high)


def _check(law: Law, compute: Array, reward: Array, limits: tuple[float, float] | None) -> None:
    least = law.num_parameters + MIN_SPARE_POINTS
    require(
        len(compute) >= least,
        "points",
        len(compute),
        rule=f"a {law.name} of {law.num_parameters} parameters needs at least {least}",
        fix="Train longer, or skip less of the beginning.",
    )
    require(
        bool(np.isfinite(compute).all() and np.isfinite(reward).all()),
        "points",
        rule="compute and reward must be finite",
        fix="Leave out the others.",
    )
    require(
        bool(compute[0] > 0 and np.all(np.diff(compute) > 0)),
        "compute",
        rule="must be positive and increase from point to point",
        fix="Sort the points.",
    )
    require(
        bool(np.ptp(reward) > 1e-12 * np.abs(reward).max()),
        "reward",
        float(reward[0]),
        rule=f"all {len(reward)} rewards are equal",
        fix="Use a run that learns, or another metric.",
    )
    require(
        limits is None or limits[0] < limits[1],
        "limits",
        limits,
        rule="the first one must be below the second one",
        fix="Use such as 0,1.",
    )
    median = float(np.median(reward))
    require(
        law.intercept is None or median < law.intercept,
        "reward",
        rule=f"its median is {median:g}, so that the power law's loss, 1 - reward, is not positive",
        fix="Use a metric that is a pass rate below 1, or fit the sigmoid.",
    )
