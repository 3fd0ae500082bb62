"""Fits a law to rewards over compute: parameters and predictions, each with its uncertainty.

In: compute and reward of the points, and a law. Out: a `Fit`, which holds draws from the posterior
over the grid of study_grid.py, as ScaleRL searches one (2510.13786). So the intervals of parameters
that the points leave open come out wide and lopsided, which an error from the curvature at the best
fit does not tell.

Points that follow each other err alike, above all where the law is not quite true. They count for
fewer: n/τ, with τ the autocorrelation time of the residuals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scripts.scaling.laws import Array, Law
from scripts.scaling.study_grid import Data, Grid, autocorrelation_time, narrowed

NUM_DRAWS = 4000
COVERED = 0.95

# A fit has to leave some points to tell the noise from.
MIN_SPARE_POINTS = 4


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Median, and the ends of the central 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    law: Law
    last: float
    """Compute of the last point."""
    tau: float
    """Autocorrelation time of the residuals, in points; 1 where they are independent."""
    noise: float
    """Standard deviation of one point around the curve."""
    theta: Array = field(repr=False)  # [D, K]
    intercept: Array = field(repr=False)  # [D]
    slope: Array = field(repr=False)  # [D]
    noises: Array = field(repr=False)  # [D]
    at_edge: bool
    """Whether the draws reach the largest C_mid that is considered: the points do not tell where
    the curve will level off."""

    @property
    def parameters(self) -> dict[str, Interval]:
        draws = self.law.parameters(self.theta, self.intercept, self.slope, self.last)
        return {name: interval(values) for name, values in draws.items()}

    def curve(self, compute: Array) -> Array:
        """Median and ends of the 95 % band of the curve itself at each compute [3, N]."""
        return _quantiles(self._curves(compute))

    def points(self, compute: Array) -> Array:
        """The same of a single point there, which has noise besides [3, N]."""
        noise = np.random.default_rng(1).standard_normal(len(self.noises)) * self.noises
        return _quantiles(self._curves(compute) + noise[:, None])

    def mean(self, compute: Array) -> Array:
        """The same of the curve's mean over these computes [3]."""
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
    """Fit `law` to the points [N], whose compute rises.

    `limits`: lowest and highest reward that there can be, such as (0, 1) of a pass rate; a curve
    begins and ends within them. Raises ValueError for too few points, for rewards that are all
    equal, and for numbers that no curve of this law can have.
    """
    compute, reward = np.asarray(compute, float), np.asarray(reward, float)
    _check(law, compute, reward, limits)
    data = Data(law, compute / compute[-1], reward)
    box = np.array(law.box)
    if law.begins_with_data:
        box[0, 0] += np.log(data.compute[0])
    tau = 1.0
    for _ in range(2):  # the residuals that tell τ are those of a fit
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
    if num_kept < 100:
        raise ValueError(
            f"no {data.law.name} within the limits {limits} fits these points: their curve begins "
            "or ends outside; give the limits that the metric really has, or none."
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
    """Of draws [D]."""
    value, low, high = map(float, _quantiles(draws))
    return Interval(value=value, low=low, high=high)


def _check(law: Law, compute: Array, reward: Array, limits: tuple[float, float] | None) -> None:
    least = law.num_parameters + MIN_SPARE_POINTS
    if len(compute) < least:
        raise ValueError(
            f"{len(compute)} points are too few for a {law.name} of {law.num_parameters} "
            f"parameters; give at least {least}: train longer, or skip less of the beginning."
        )
    if not (np.isfinite(compute).all() and np.isfinite(reward).all()):
        raise ValueError("compute or reward is not finite at some point; leave such points out.")
    if compute[0] <= 0 or np.any(np.diff(compute) <= 0):
        raise ValueError("compute has to be positive and to rise from point to point; sort them.")
    if np.ptp(reward) <= 1e-12 * np.abs(reward).max():
        raise ValueError(
            f"all {len(reward)} rewards are {reward[0]:g}, and no curve can be told from a "
            "constant; give a run that learns, or another metric."
        )
    if limits is not None and not limits[0] < limits[1]:
        raise ValueError(f"limits {limits} hold no reward; give the lowest before the highest.")
    if law.intercept is not None and float(np.median(reward)) >= law.intercept:
        raise ValueError(
            f"the median reward is {np.median(reward):g}, so the power law's loss, 1 - reward, is "
            "not positive; give a metric that is a pass rate below 1, or fit the sigmoid."
        )
