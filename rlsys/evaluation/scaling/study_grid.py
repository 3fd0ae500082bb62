"""Grid over a law's own parameters θ around the maximum of the likelihood.

In: points and a law. Out: the grid with the weight of each of its points.

Given θ, the law is linear in the other parameters, so every grid point has a least-squares line and
a sum of squared residuals. Its weight is RSS^(-ν/2): the likelihood with the noise integrated out
and, as the prior of the slope, the information of the data about it (Zellner's g-prior). Without
that prior, slopes of any size at C_mid = infinity would outweigh the data.

Shape legend: N points, D points of the grid, K parameters in θ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlsys.evaluation.scaling.laws import Array, Law

GRID = {1: 401, 2: 61}  # points along each axis of θ
UNLIKELY = 12.0  # log-likelihood below the best at which a point is negligible
FILLED = 0.1  # fraction of relevant points of a grid that is narrow enough
MIN_GRID_POINTS = 40  # minimum number of best points that the next grid covers
MAX_ROUNDS = 20


@dataclass(frozen=True)
class Lines:
    """Least-squares lines for each of D values of θ."""

    shape: Array  # [D, N]
    centre: Array  # [D], mean of the shape; 0 with a fixed intercept
    mean: Array  # [D], value of the line there
    slope: Array  # [D]
    spread: Array  # [D], Σ (shape - centre)²
    rss: Array  # [D]

    def residuals(self, data: Data) -> Array:
        """Return the residuals of each line [D, N]."""
        line = self.mean[:, None] + self.slope[:, None] * (self.shape - self.centre[:, None])
        return data.reward[None, :] - line


@dataclass(frozen=True)
class Data:
    """Points and the law to fit to them."""

    law: Law
    compute: Array  # [N], relative to the last
    reward: Array  # [N]

    @property
    def num_linear(self) -> int:
        """Return the number of linear parameters."""
        return 1 if self.law.intercept is not None else 2

    def lines(self, theta: Array) -> Lines:
        """Return the least-squares lines for each θ."""
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
        return Lines(shape, centre, mean, slope, spread, rss)

    def log_weights(self, theta: Array, tau: float) -> Array:
        """Return the logarithms of the weights of each θ [D], up to a constant."""
        rss = np.concatenate([self.lines(part).rss for part in np.array_split(theta, 16)])
        floor = 1e-24 * float(np.square(self.reward).sum() + 1)  # points exactly on a curve
        degrees = max(len(self.reward) / tau - self.num_linear, 1.0)
        return -0.5 * degrees * np.log(rss + floor)


@dataclass(frozen=True)
class Grid:
    """Values of θ with their weights."""

    theta: Array  # [D, K]
    log_weights: Array  # [D]
    cell: Array  # [K, K]: a step of the grid along each axis


def narrowed(data: Data, box: Array, tau: float) -> Grid:
    """Return the grid around the maximum of the likelihood.

    Each grid covers the best points of the previous one, along their main directions, because the
    likelihood is a narrow ridge oblique to the parameters.
    """
    num_axes = len(box)
    ticks = np.linspace(-1, 1, GRID[num_axes])
    unit = np.stack(np.meshgrid(*[ticks] * num_axes, indexing="ij"), -1).reshape(-1, num_axes)
    middle, axes = box.mean(axis=1), np.diag((box[:, 1] - box[:, 0]) / 2)
    for _ in range(MAX_ROUNDS):
        theta = middle + unit @ axes.T
        theta = theta[np.all((theta >= box[:, 0]) & (theta <= box[:, 1]), axis=1)]
        log_weights = data.log_weights(theta, tau)
        cell = axes * (ticks[1] - ticks[0])
        grid = Grid(theta, log_weights, cell)
        likely = theta[log_weights >= log_weights.max() - UNLIKELY]
        if len(likely) >= FILLED * len(theta):
            break
        if len(likely) < MIN_GRID_POINTS:
            likely = theta[np.argsort(log_weights)[-MIN_GRID_POINTS:]]
        _, directions = np.linalg.eigh(np.atleast_2d(np.cov(likely.T)))
        along = likely @ directions
        margin = np.abs(directions.T @ cell).sum(axis=1)  # distance between two points
        low, high = along.min(axis=0) - margin, along.max(axis=0) + margin
        middle, axes = directions @ ((low + high) / 2), directions * ((high - low) / 2)
    return grid


def autocorrelation_time(residuals: Array, num_parameters: int) -> float:
    """Return (1 + ρ)/(1 - ρ), at least 1, of residuals of an AR(1) process.

    Fitting removes slow movements from the residuals, about (1 + ρ)/N of ρ for each parameter.
    """
    num_points = len(residuals)
    variance = float(residuals @ residuals)
    if variance == 0:
        return 1.0
    rho = float(residuals[1:] @ residuals[:-1]) / variance
    rho += (num_parameters * (1 + rho) + 2 * rho) / num_points
    if rho < 2 / np.sqrt(num_points):  # the bias of independent residuals
        rho = max(rho, 0.0)
    rho = min(rho, 0.95)
    return (1 + rho) / (1 - rho)
