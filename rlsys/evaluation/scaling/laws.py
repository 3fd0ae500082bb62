"""Laws of reward against compute, in the form that scaling_fit.py takes.

Each is a shape with one or two parameters of its own, scaled linearly:

    R(C) = intercept + slope · shape(C; θ)

Shape legend: N points, D draws (or points of a grid), K parameters in θ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Law:
    """A law of reward against compute."""

    name: str
    formula: str
    shape: Callable[[Array, Array], Array]
    """(compute [N], relative to the last point; θ [D, K]) -> [D, N]."""
    box: tuple[tuple[float, float], ...]
    """Lowest and highest value of each of θ, for compute that ends at 1; uniform between them
    before the data speak. The lowest of the first one is meant relative to the first point where
    `begins_with_data`."""
    begins_with_data: bool
    intercept: float | None
    """Intercept of the linear part; None: fitted."""
    parameters: Callable[[Array, Array, Array, float], dict[str, Array]]
    """(θ [D, K], intercepts [D], slopes [D], compute of the last point) -> the paper's parameters
    by name, each [D]."""

    @property
    def num_parameters(self) -> int:
        """Return the number of free parameters."""
        return len(self.box) + (1 if self.intercept is not None else 2)


def _sigmoid_shape(compute: Array, theta: Array) -> Array:
    """Return 1 / (1 + (C_mid/C)^B) for θ = (log C_mid, log B)."""
    steps = np.exp(theta[:, 1:]) * (np.log(compute)[None, :] - theta[:, :1])
    shape: Array = 0.5 * (1 + np.tanh(0.5 * steps))  # no overflow at either end
    return shape


def _sigmoid_parameters(
    theta: Array, intercept: Array, slope: Array, last: float
) -> dict[str, Array]:
    return {
        "A": intercept + slope,
        "R_0": intercept,
        "C_mid": np.exp(theta[:, 0]) * last,
        "B": np.exp(theta[:, 1]),
    }


def _power_shape(compute: Array, theta: Array) -> Array:
    """Return C^-k for θ = (k,)."""
    shape: Array = np.exp(-theta[:, :1] * np.log(compute)[None, :])
    return shape


def _power_parameters(
    theta: Array, intercept: Array, slope: Array, last: float
) -> dict[str, Array]:
    """Return the power law's parameters; draws without a negative slope have no E."""
    loss = np.where(slope < 0, -slope, np.nan)
    return {"k": theta[:, 0], "E": np.log(loss) + theta[:, 0] * np.log(last)}


SIGMOID = Law(
    name="sigmoid",
    formula="R(C) = R_0 + (A - R_0) / (1 + (C_mid/C)^B)",
    shape=_sigmoid_shape,
    box=((np.log(0.1), np.log(30.0)), (np.log(0.1), np.log(10.0))),
    begins_with_data=True,
    intercept=None,
    parameters=_sigmoid_parameters,
)
"""ScaleRL's curve (2510.13786, equation 1): A is the reward in the limit of unlimited compute,
C_mid the compute at half of the way from R_0 to A, and B the steepness."""

POWER_LAW = Law(
    name="power",
    formula="log(1 - R(C)) = -k log C + E",
    shape=_power_shape,
    box=((-2.0, 6.0),),
    begins_with_data=False,
    intercept=1.0,
    parameters=_power_parameters,
)
"""Law of 2509.25300 for one model, with the loss L = 1 - R of a pass rate R. The noise is that of
the reward, because the noise of log L is unbounded as the loss vanishes."""

LAWS = {law.name: law for law in (SIGMOID, POWER_LAW)}
