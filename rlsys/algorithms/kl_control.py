"""Control of the coefficient β of a KL penalty.

In: β and the measured divergence of a step. Out: β of the next step. The state is one number, which
the caller keeps and checkpoints.
"""

from __future__ import annotations

import math

from rlsys.algorithms.parameters import parameters, require_field
from rlsys.algorithms.ratios import check_coefficient


@parameters
class fixed_kl:
    """Constant β = `initial`: 1909.08593, equation 2."""

    initial: float

    def __post_init__(self) -> None:
        check_coefficient(self, "initial")

    def next(self, coefficient: float, divergence: float) -> float:
        """Return `initial`."""
        return self.initial


@parameters
class adaptive_kl:
    """β ← β·(1 + gain · clip(KL/target − 1, −0.2, 0.2)): 1909.08593, section 2.2.

    `target` is a divergence of whole rollouts in nats: the mean over rollouts of the sum over
    tokens. The paper's gain is 0.1 per step.
    """

    initial: float
    target: float
    gain: float = 0.1

    def __post_init__(self) -> None:
        check_coefficient(self, "initial")
        require_field(
            self,
            "target",
            0 < self.target < math.inf,
            rule="must be positive and finite",
            fix="Use a divergence in nats, such as 6.",
        )
        require_field(
            self,
            "gain",
            0 < self.gain < 5,
            rule="must be above 0 and below 5",
            fix="Use such as 0.1.",
        )

    def next(self, coefficient: float, divergence: float) -> float:
        """Return β of the next step from β and the divergence of this one."""
        error = min(max(divergence / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + self.gain * error)
