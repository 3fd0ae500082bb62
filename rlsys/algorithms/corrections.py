"""Corrections for the gap between the policy that sampled (μ) and the trainer's (π_prox, π_θ).

A correction gives each token a weight [N], without gradient, and metrics [N]; `corrected`
(composed.py) multiplies a loss with it. One that weighs by w = π_prox/μ goes with losses that leave
w to it; a mask, of weights 0 and 1, goes with every loss. A token with weight 0 drops out of the
gradient and stays in the denominator of the aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from rlsys.algorithms.inputs import LossInputs, TokenLoss
from rlsys.algorithms.ratios import bounded_exp, check_cap, log_ratio, ratio
from rlsys.algorithms.sequences import mean_over_rollout, sum_over_rollout


class Correction(Protocol):
    @property
    def weighs(self) -> bool:
        """Whether its weights contain w; else they are a mask."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Weights and metrics of the tokens."""


@dataclass(frozen=True)
class tis:
    """min(w, cap) of each token: truncated importance sampling. cap is 2 (small models) to 8."""

    cap: float
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        w = ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        return w.clamp(max=self.cap), _truncation_metrics(w, self.cap)


@dataclass(frozen=True)
class sequence_tis:
    """min(w, cap) with one w for a whole rollout: the product over its tokens, or their geometric
    mean, which does not shrink or grow with the length."""

    cap: float
    geometric_mean: bool
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_cap("cap", self.cap)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        over_rollout = mean_over_rollout if self.geometric_mean else sum_over_rollout
        gap = log_ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        w = bounded_exp(over_rollout(gap, inputs.row_index))
        return w.clamp(max=self.cap), _truncation_metrics(w, self.cap)


@dataclass(frozen=True)
class icepop:
    """w inside [low, high], 0 outside: IcePop, 2510.18855. The paper: 0.5 and 5."""

    low: float
    high: float
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(
                f"icepop({self.low}, {self.high}) keeps no token; use 0 <= low < high, such as "
                "0.5 and 5."
            )

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
    weighs: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        gap = log_ratio(inputs.sampler_logprobs, inputs.trainer_logprobs.detach())
        far = mean_over_rollout(gap, inputs.row_index) > self.threshold
        dropped = (far & (inputs.advantages < 0)).to(gap.dtype)
        return 1 - dropped, {"correction/opsm_masked_frac": dropped}


def _truncation_metrics(w: torch.Tensor, cap: float) -> dict[str, torch.Tensor]:
    return {"correction/weight": w, "correction/truncated_frac": (w > cap).to(w.dtype)}
