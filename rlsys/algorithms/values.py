"""Losses of a critic, per token.

In: `ValueInputs`. Out: the loss of each token [N], and metrics [N]. From their means over the
global batch `derived_metrics` (derived_metrics.py) computes the explained variance.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from rlsys.algorithms.loss_inputs import TokenLoss, ValueInputs
from rlsys.algorithms.parameters import parameters, require_field


@parameters
class value_loss:
    """½(V − R)²: the squared-error loss of PPO, 1707.06347, equation 9, halved."""

    needs: ClassVar[tuple[str, ...]] = ("returns",)

    def __call__(self, inputs: ValueInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        returns = inputs.column("returns")
        return (inputs.values - returns).square() / 2, value_metrics(inputs.values, returns)


@parameters
class clipped_value_loss:
    """½ max((V − R)², (clip(V, V_old ± clip) − R)²): code of PPO, Dhariwal et al. (2017).

    2005.12729 describes it. V_old is the column `values`: the critic's values at the start of the
    step. The worse of two predictions counts, so a value that has moved by more than `clip` towards
    its target has no gradient until the next batch. `clip` is in units of the reward; 0.2 is usual.
    """

    clip: float = 0.2
    needs: ClassVar[tuple[str, ...]] = ("values", "returns")

    def __post_init__(self) -> None:
        require_field(
            self,
            "clip",
            self.clip > 0,
            rule="must be positive",
            fix="Use such as 0.2, or value_loss() for no clip.",
        )

    def __call__(self, inputs: ValueInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        values, old = inputs.values, inputs.column("values")
        returns = inputs.column("returns")
        clipped = torch.clamp(values, old - self.clip, old + self.clip)
        free, bound = (values - returns).square(), (clipped - returns).square()
        metrics = value_metrics(values, returns) | {
            "value/clipped_frac": (bound > free).to(values.dtype)
        }
        return torch.maximum(free, bound) / 2, metrics


def value_metrics(values: torch.Tensor, returns: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return first and second moments of R − V and of R, from which explained variance follows."""
    error = returns - values.detach()
    return {
        "value/error": error,
        "value/error_squared": error.square(),
        "value/return": returns,
        "value/return_squared": returns.square(),
    }
