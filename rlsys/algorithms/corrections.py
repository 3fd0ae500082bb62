"""Importance weights for the gap between the policy that sampled (μ) and the trainer's at the start
of the step (π_prox).

A correction gives each token a weight [N], without gradient, and metrics [N]; `corrected`
(composed.py) multiplies a loss with it. One that weighs by w = π_prox/μ, as all of this page, goes
with losses that leave w to it; a mask (masks.py), of weights 0 and 1, goes with every loss. A token
with weight 0 drops out of the gradient and stays in the denominator of the aggregation.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.algorithms.parameters import parameters
from rlsys.algorithms.ratios import bounded_exp, check_bounds, check_cap, log_ratio, ratio
from rlsys.algorithms.sequences import mean_over_rollout, sum_over_rollout


class Correction(Protocol):
    @property
    def weighs(self) -> bool:
        """Whether its weights contain w; else they are a mask."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Weights and metrics of the tokens."""


@parameters
class tis:
    """w of each token, clipped to [floor, cap]: truncated importance sampling, Ionides (2008),
    against the gap between sampler and trainer Yao et al. (2025).

    `cap` is 2 (small models) to 8. Neither source has a lower bound, which is `floor` = 0. A
    positive floor clips w on both sides, as MiniMax-M1 (2506.13585, equation 5) clips its weight: a
    token that the trainer finds unlikely keeps a part of its gradient, which adds bias.
    """

    cap: float = 2.0
    floor: float = 0.0
    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)
        if not 0 <= self.floor <= min(1.0, self.cap):
            raise ValueError(
                f"floor={self.floor} must be from 0 to min(1, cap={self.cap}). Use 0 for no lower "
                "bound, or a value such as 0.5."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        w = ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        weight = w.clamp(self.floor, self.cap)
        return weight, {
            "correction/weight": w,
            "correction/truncated_frac": (w != weight).to(w.dtype),
        }


@parameters
class sequence_tis:
    """min(w, cap) with one w for a whole rollout: the product over its tokens, or their geometric
    mean, which does not shrink or grow with the length; Liu, Li et al. (2025), as `reject`.
    """

    cap: float = 2.0
    geometric_mean: bool = False
    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        w = _of_rollouts(inputs, self.geometric_mean)
        return w.clamp(max=self.cap), {
            "correction/weight": w,
            "correction/truncated_frac": (w > self.cap).to(w.dtype),
        }


@parameters
class icepop:
    """w inside [low, high], 0 outside: IcePop, 2510.18855. The paper: 0.5 and 5."""

    low: float = 0.5
    high: float = 5.0
    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_bounds(type(self).__name__, self.low, self.high)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        w = ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        return _inside(w, self.low, self.high)


@parameters
class sequence_icepop:
    """w inside [low, high], 0 outside, with one w for a whole rollout: IcePop's mask,
    2510.18855, on the sequence's weight, as `sequence_tis` is tis on it.
    """

    low: float = 0.5
    high: float = 5.0
    geometric_mean: bool = True
    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_bounds(type(self).__name__, self.low, self.high)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return _inside(_of_rollouts(inputs, self.geometric_mean), self.low, self.high)


@parameters
class batch_weights:
    """The weights of column `importance_weights`, such as `batch_normalised_weights` makes over a
    whole batch (token_advantages.py): truncated, with mean 1; Owen (2013), chapter 9.2.
    """

    weighs: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("importance_weights",)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        weights = inputs.column("importance_weights")
        return weights, {"correction/weight": weights}


def _of_rollouts(inputs: LossInputs, geometric_mean: bool) -> torch.Tensor:
    """W of the rollout of each token: the product over its tokens, or their geometric mean."""
    over_rollout = mean_over_rollout if geometric_mean else sum_over_rollout
    gap = log_ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
    return bounded_exp(over_rollout(gap, inputs.row_index))


def _inside(w: torch.Tensor, low: float, high: float) -> TokenLoss:
    dropped = (w < low) | (w > high)
    metrics = {"correction/weight": w, "correction/masked_frac": dropped.to(w.dtype)}
    return w.masked_fill(dropped, 0.0), metrics
