"""Importance weights for the gap between the sampling policy μ and the trainer's policy π_prox.

A correction returns a weight for each token [N], without gradient, and metrics [N]; `corrected`
(composed.py) multiplies a loss with the weights. The corrections of this file weigh by
w = π_prox/μ, and go with losses that do not contain w. A mask (masks.py) has weights 0 and 1, and
goes with every loss. A token with weight 0 has no gradient but stays in the denominator of the
aggregation.

Notation: μ sampled the tokens; π_prox is the trainer's policy at the start of the optimizer step.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.algorithms.parameters import parameters, require_field
from rlsys.algorithms.ratios import bounded_exp, check_bounds, check_cap, log_ratio, ratio
from rlsys.algorithms.sequences import mean_over_rollout, sum_over_rollout


class Correction(Protocol):
    """Weights of tokens that `corrected` multiplies a loss with."""

    @property
    def weighs(self) -> bool:
        """Return whether the weights contain w. If not, they are a mask."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weights [N] and metrics of the tokens."""


@parameters
class tis:
    """w of each token, clipped to [floor, cap]: truncated importance sampling, Ionides (2008).

    Yao et al. (2025) use it for the gap between sampler and trainer. `cap` is 2 (small models) to
    8. Neither source has a lower bound (`floor` = 0). A positive floor clips w on both sides, as
    MiniMax-M1 (2506.13585, equation 5) does: a token that is unlikely under the trainer's policy
    keeps a part of its gradient, which adds bias.
    """

    cap: float = 2.0
    floor: float = 0.0
    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_cap(self, "cap")
        require_field(
            self,
            "floor",
            0 <= self.floor <= min(1.0, self.cap),
            rule=f"must be from 0 to min(1, cap={self.cap})",
            fix="Use 0 for no lower bound, or a value such as 0.5.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N] and metrics."""
        w = ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        weight = w.clamp(self.floor, self.cap)
        return weight, {
            "correction/weight": w,
            "correction/truncated_frac": (w != weight).to(w.dtype),
        }


@parameters
class sequence_tis:
    """min(w, cap) with one w for each rollout: truncated sequence weights, Liu, Li et al. (2025).

    w is the product of the token weights or their geometric mean, which does not shrink or grow
    with the length.
    """

    cap: float = 2.0
    geometric_mean: bool = False
    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_cap(self, "cap")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N] and metrics."""
        w = _rollout_weights(inputs, self.geometric_mean)
        return w.clamp(max=self.cap), {
            "correction/weight": w,
            "correction/truncated_frac": (w > self.cap).to(w.dtype),
        }


@parameters
class icepop:
    """w inside [low, high], 0 outside: IcePop, 2510.18855, with the paper's 0.5 and 5."""

    low: float = 0.5
    high: float = 5.0
    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_bounds(type(self).__name__, self.low, self.high)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N] and metrics."""
        w = ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        return _inside(w, self.low, self.high)


@parameters
class sequence_icepop:
    """w inside [low, high], 0 outside, with one w for each rollout: IcePop's mask, 2510.18855.

    w is that of `sequence_tis`.
    """

    low: float = 0.5
    high: float = 5.0
    geometric_mean: bool = True
    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_bounds(type(self).__name__, self.low, self.high)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N] and metrics."""
        return _inside(_rollout_weights(inputs, self.geometric_mean), self.low, self.high)


@parameters
class batch_weights:
    """Weights of the column `importance_weights`: self-normalised, Owen (2013), chapter 9.2.

    `batch_normalised_weights` (token_advantages.py) writes that column, truncated and with mean 1
    over the whole batch.
    """

    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("importance_weights",)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N] and metrics."""
        weights = inputs.column("importance_weights")
        return weights, {"correction/weight": weights}


def _rollout_weights(inputs: LossInputs, geometric_mean: bool) -> torch.Tensor:
    """Return w of each token's rollout [N]: the product or geometric mean over its tokens."""
    over_rollout = mean_over_rollout if geometric_mean else sum_over_rollout
    gap = log_ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
    return bounded_exp(over_rollout(gap, inputs.row_index))


def _inside(w: torch.Tensor, low: float, high: float) -> TokenLoss:
    dropped = (w < low) | (w > high)
    metrics = {"correction/weight": w, "correction/masked_frac": dropped.to(w.dtype)}
    return w.masked_fill(dropped, 0.0), metrics
