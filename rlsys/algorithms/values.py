"""Losses of a critic, per token, and how well it predicts.

In: `ValueInputs`. Out: the loss of each token [N], and metrics [N], from whose means over the
global batch `derived_metrics` (derived_metrics.py) has the explained variance.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from rlsys.algorithms.loss_inputs import TokenLoss, ValueInputs
from rlsys.algorithms.parameters import parameters


@parameters
class value_loss:
    """½(V − R)²: the squared-error loss of PPO, 1707.06347, equation 9, halved."""

    needs: ClassVar[tuple[str, ...]] = ("returns",)

    def __call__(self, inputs: ValueInputs) -> TokenLoss:
        returns = inputs.column("returns")
        return (inputs.values - returns).square() / 2, value_metrics(inputs.values, returns)


@parameters
class clipped_value_loss:
    """½ max((V − R)², (clip(V, V_old ± clip) − R)²): the value loss of PPO's authors' code,
    Dhariwal et al. (2017), as 2005.12729 describes it.

    V_old is column `values`, what the critic gave when the batch was prepared. Of two predictions
    the worse counts, so a value that has moved by more than `clip` towards its target stops being
    trained until the next batch. 0.2 is usual; it is in units of the reward.
    """

    clip: float = 0.2
    needs: ClassVar[tuple[str, ...]] = ("values", "returns")

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(
                f"clip={self.clip} leaves no room for values to move; use a positive range, such "
                "as 0.2, or value_loss() for none."
            )

    def __call__(self, inputs: ValueInputs) -> TokenLoss:
        values, old = inputs.values, inputs.column("values")
        returns = inputs.column("returns")
        clipped = torch.clamp(values, old - self.clip, old + self.clip)
        free, bound = (values - returns).square(), (clipped - returns).square()
        metrics = value_metrics(values, returns) | {
            "value/clipped_frac": (bound > free).to(values.dtype)
        }
        return torch.maximum(free, bound) / 2, metrics


def value_metrics(values: torch.Tensor, returns: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the explained variance is made of: first and second moments of R − V and of R."""
    error = returns - values.detach()
    return {
        "value/error": error,
        "value/error_squared": error.square(),
        "value/return": returns,
        "value/return_squared": returns.square(),
    }
