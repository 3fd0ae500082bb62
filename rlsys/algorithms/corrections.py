"""Corrections for the gap between the policy that sampled (μ) and the trainer's (π_prox, π_θ).

A correction gives each token a weight [N], without gradient, and metrics [N]; `corrected`
multiplies a loss with it:

    loss = corrected(clipped_surrogate(0.2, 0.28), icepop(0.5, 5.0))

A token with weight 0 drops out of the gradient and stays in the denominator. w = π_prox/μ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlsys.algorithms.losses import MAX_LOG_RATIO, TokenLoss, ratio
from rlsys.algorithms.sequences import mean_over_rollout, sum_over_rollout
from rlsys.engines.training.protocol import LossFn, LossInputs

Correction = Callable[[LossInputs], TokenLoss]


@dataclass(frozen=True)
class corrected:
    """`loss` with each token weighted by `correction`; metrics of both."""

    loss: LossFn
    correction: Correction

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        weight, weight_metrics = self.correction(inputs)
        return weight * loss, metrics | weight_metrics


@dataclass(frozen=True)
class tis:
    """min(w, cap) of each token: truncated importance sampling. cap is 2 (small models) to 8."""

    cap: float

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        w = ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        return w.clamp(max=self.cap), _truncation_metrics(w, self.cap)


@dataclass(frozen=True)
class sequence_tis:
    """min(w, cap) with one w for a whole rollout: the product over its tokens, or their geometric
    mean, which does not shrink or grow with the length."""

    cap: float
    geometric_mean: bool

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        over_rollout = mean_over_rollout if self.geometric_mean else sum_over_rollout
        gap = inputs.proximal_logprobs - inputs.sampler_logprobs
        w = over_rollout(gap, inputs.row_index).clamp(max=MAX_LOG_RATIO).exp()
        return w.clamp(max=self.cap), _truncation_metrics(w, self.cap)


@dataclass(frozen=True)
class icepop:
    """w inside [low, high], 0 outside: IcePop, 2510.18855. The paper: 0.5 and 5."""

    low: float
    high: float

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        w = ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        dropped = (w < self.low) | (w > self.high)
        metrics = {"correction/weight": w, "correction/masked_frac": dropped.to(w.dtype)}
        return w.masked_fill(dropped, 0.0), metrics


@dataclass(frozen=True)
class opsm:
    """0 for every token of a rollout with A < 0 and mean_t log(μ/π_θ) > threshold, else 1.

    Off-policy sequence masking, DeepSeek-V3.2, 2512.02556: bad rollouts that the
    policy would hardly sample any more teach it nothing.
    """

    threshold: float

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        gap = inputs.sampler_logprobs - inputs.trainer_logprobs.detach()
        far = mean_over_rollout(gap, inputs.row_index) > self.threshold
        dropped = (far & (inputs.advantages < 0)).to(gap.dtype)
        return 1 - dropped, {"correction/opsm_masked_frac": dropped}


def _truncation_metrics(w: torch.Tensor, cap: float) -> dict[str, torch.Tensor]:
    return {"correction/weight": w, "correction/truncated_frac": (w > cap).to(w.dtype)}
