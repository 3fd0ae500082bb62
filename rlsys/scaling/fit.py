"""Fits a law to rewards over compute: parameters and predictions, each with its uncertainty.

In: compute and reward of the points, and a law. Out: a `Fit`, which holds draws from the posterior.

Given θ, the law is linear in the rest, so that only θ is searched: on a grid, as ScaleRL does it
(2510.13786), first over the whole box and then, in steps, over where the likelihood is. Every point
of the grid has its least-squares line and sum of squared residuals; its weight is RSS^(-ν/2), the
likelihood with the noise integrated out and, as the prior of the slope, the information that the
points have of it (Zellner's g-prior), without which slopes of any size behind C_mid = infinity
would outweigh the data. The intervals of parameters that the points leave open come out wide and
lopsided, which an error from the curvature at the best fit does not tell.

Points that follow each other err alike, above all where the law is not quite true. They count for
fewer: n/τ, with τ the autocorrelation time of the residuals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rlsys.scaling.laws import Array, Law

NUM_DRAWS = 4000
GRID = {1: 401, 2: 61}  # points along each axis of θ
UNLIKELY = 12.0  # log-likelihood below the best, from which on a point does not matter
FILLED = 0.1  # share of a grid's points that matter, for a grid that is narrow enough
MIN_GRID_POINTS = 40  # the best ones around which the next grid is laid, at least
MAX_ROUNDS = 20
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
        draws = self._curves(compute)
        noise = np.random.default_rng(1).standard_normal(draws.shape)
        return _quantiles(draws + noise * self.noises[:, None])

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
    data = _Data(law, compute / compute[-1], reward)
    box = np.array(law.box)
    if law.begins_with_data:
        box[0, 0] += np.log(data.compute[0])
    tau = 1.0
    for _ in range(2):  # the residuals that tell τ are those of a fit
        grid = _narrowed(data, box, tau)
        best = data.lines(grid.theta[[int(np.argmax(grid.log_weights))]])
        tau = _autocorrelation_time(best.residuals(data)[0], law.num_parameters)
    return _draw(data, grid, box, tau, compute[-1], limits, np.random.default_rng(seed))


@dataclass(frozen=True)
class _Lines:
    """Least squares at each of D values of θ."""

    shape: Array  # [D, N]
    centre: Array  # [D], mean of the shape where there is an intercept, else 0
    mean: Array  # [D], what the line has there
    slope: Array  # [D]
    spread: Array  # [D], Σ (shape - centre)²
    rss: Array  # [D]

    def residuals(self, data: _Data) -> Array:
        line = self.mean[:, None] + self.slope[:, None] * (self.shape - self.centre[:, None])
        return data.reward[None, :] - line


@dataclass(frozen=True)
class _Data:
    law: Law
    compute: Array  # [N], relative to the last
    reward: Array  # [N]

    @property
    def num_linear(self) -> int:
        return 1 if self.law.intercept is not None else 2

    def lines(self, theta: Array) -> _Lines:
        shape = self.law.shape(self.compute, theta)
        if self.law.intercept is None:
            centre, mean = shape.mean(axis=1), np.full(len(theta), self.reward.mean())
        else:
            centre, mean = np.zeros(len(theta)), np.full(len(theta), self.law.intercept)
        centred = shape - centre[:, None]
        errors = self.reward[None, :] - mean[:, None]
        spread = np.maximum(np.einsum("dn,dn->d", centred, centred), 1e-300)
        slope = np.einsum("dn,dn->d", centred, errors) / spread
        errors = errors - slope[:, None] * centred
        rss = np.einsum("dn,dn->d", errors, errors)
        return _Lines(shape, centre, mean, slope, spread, rss)

    def log_weights(self, theta: Array, tau: float) -> Array:
        """Of each θ [D], up to a constant."""
        rss = np.concatenate([self.lines(part).rss for part in np.array_split(theta, 16)])
        floor = 1e-24 * float(np.square(self.reward).sum() + 1)  # points exactly on a curve
        degrees = max(len(self.reward) / tau - self.num_linear, 1.0)
        return -0.5 * degrees * np.log(rss + floor)


@dataclass(frozen=True)
class _Grid:
    theta: Array  # [D, K]
    log_weights: Array  # [D]
    cell: Array  # [K, K]: a step of the grid along each axis


def _narrowed(data: _Data, box: Array, tau: float) -> _Grid:
    """The grid over where the likelihood is. Each is laid around the best points of the one before
    it, along their main directions: the likelihood is a narrow ridge, slant to the parameters."""
    num_axes = len(box)
    ticks = np.linspace(-1, 1, GRID[num_axes])
    unit = np.stack(np.meshgrid(*[ticks] * num_axes, indexing="ij"), -1).reshape(-1, num_axes)
    middle, axes = box.mean(axis=1), np.diag((box[:, 1] - box[:, 0]) / 2)
    for _ in range(MAX_ROUNDS):
        theta = middle + unit @ axes.T
        theta = theta[np.all((theta >= box[:, 0]) & (theta <= box[:, 1]), axis=1)]
        log_weights = data.log_weights(theta, tau)
        cell = axes * (ticks[1] - ticks[0])
        grid = _Grid(theta, log_weights, cell)
        likely = theta[log_weights >= log_weights.max() - UNLIKELY]
        if len(likely) >= FILLED * len(theta):
            break
        if len(likely) < MIN_GRID_POINTS:
            likely = theta[np.argsort(log_weights)[-MIN_GRID_POINTS:]]
        _, directions = np.linalg.eigh(np.atleast_2d(np.cov(likely.T)))
        along = likely @ directions
        margin = np.abs(directions.T @ cell).sum(axis=1)  # what lies between two points
        low, high = along.min(axis=0) - margin, along.max(axis=0) + margin
        middle, axes = directions @ ((low + high) / 2), directions * ((high - low) / 2)
    return grid


def _draw(
    data: _Data,
    grid: _Grid,
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


def _autocorrelation_time(residuals: Array, num_parameters: int) -> float:
    """(1 + ρ)/(1 - ρ) of residuals that follow each other as an AR(1) process does, at least 1.

    Fitted parameters take slow movements out of the residuals, about (1 + ρ)/N of ρ each.
    """
    num_points = len(residuals)
    variance = float(residuals @ residuals)
    if variance == 0:
        return 1.0
    rho = float(residuals[1:] @ residuals[:-1]) / variance
    rho += (num_parameters * (1 + rho) + 2 * rho) / num_points
    if rho < 2 / np.sqrt(num_points):  # as independent ones have it
        rho = max(rho, 0.0)
    rho = min(rho, 0.95)
    return (1 + rho) / (1 - rho)


def _quantiles(draws: Array) -> Array:
    tail = (1 - COVERED) / 2
    quantiles: Array = np.nanquantile(draws, [0.5, tail, 1 - tail], axis=0)
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
