"""The coefficient β of a KL penalty, from one step to the next.

In: β of this step and the divergence that was seen in it. Out: β of the next step. The state is one
number, which the caller keeps (and checkpoints).
"""

from __future__ import annotations

import math

from rlsys.algorithms.parameters import parameters


@parameters
class fixed_kl:
    """Always `initial`: the constant β of 1909.08593, equation 2."""

    initial: float

    def __post_init__(self) -> None:
        _check_coefficient(self.initial)

    def next(self, coefficient: float, divergence: float) -> float:
        return self.initial


@parameters
class adaptive_kl:
    """β ← β·(1 + gain · clip(KL/target − 1, −0.2, 0.2)): 1909.08593, section 2.2.

    `target` is a divergence of whole rollouts in nats: the mean over rollouts of the sum over
    tokens. The paper's gain is 0.1 a step.
    """

    initial: float
    target: float
    gain: float = 0.1

    def __post_init__(self) -> None:
        _check_coefficient(self.initial)
        if not (0 < self.target < math.inf and 0 < self.gain < 5):
            raise ValueError(
                f"adaptive_kl with target={self.target}, gain={self.gain} cannot steer; use a "
                "positive target in nats, such as 6, and a gain such as 0.1."
            )

    def next(self, coefficient: float, divergence: float) -> float:
        error = min(max(divergence / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + self.gain * error)


def _check_coefficient(coefficient: float) -> None:
    if not 0 <= coefficient < math.inf:
        raise ValueError(
            f"a KL coefficient of {coefficient} rewards leaving the reference; use 0 or more."
        )
