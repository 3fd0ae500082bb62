"""Masks: corrections (see corrections.py) of weights 0 and 1, which go with every loss.

    corrected(cispo(5.0), opsm(0.5))              corrected(clipped_surrogate(), clip_cov())

A mask looks at one token, or at the rollout that it is in, and never at the rest of the pass, so
that the result does not depend on micro-batches. Where a paper ranks the tokens of a batch, a
threshold stands here instead, and the docstring says so.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import torch

from rlsys.algorithms.kl import unbounded_k3
from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.algorithms.parameters import parameters
from rlsys.algorithms.ratios import MAX_LOG_RATIO, floored, log_ratio
from rlsys.algorithms.sequences import max_over_rollout, mean_over_rollout, sum_over_rollout

By = Literal["ratio", "k1", "k2", "k3"]
Over = Literal["token", "mean", "sum", "every"]


@parameters
class opsm:
    """0 for every token of a rollout with A < 0 and mean_t log(μ/π_θ) > threshold, else 1:
    off-policy sequence masking, DeepSeek-V3.2, 2512.02556.

    Bad rollouts that the policy would hardly sample any more teach it nothing.
    """

    threshold: float
    weighs: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        gap = log_ratio(inputs.sampler_logprobs, inputs.trainer_logprobs.detach())
        far = mean_over_rollout(gap, inputs.row_index) > self.threshold
        return _without(far & (inputs.advantages < 0), "correction/opsm_masked_frac", gap)


@parameters
class reject:
    """0 where a measure of w = π_prox/μ leaves [low, high]: rejection sampling, Liu, Li et al.
    (2025), "When speed kills stability".

    `by`: "ratio" is w; "k1" is log w; "k2" is (log w)²/2 and "k3" w − 1 − log w, which estimate
    KL(μ ‖ π_prox). `over`: "token" judges each token; "mean" and "sum" judge a rollout by that of
    its tokens (for "ratio" their geometric mean and their product); "every" drops a rollout with
    any token outside, a veto.
    """

    by: By
    low: float = -math.inf
    high: float = math.inf
    over: Over = "token"
    weighs: ClassVar[bool] = False
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, known in (("by", get_args(By)), ("over", get_args(Over))):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(known)}."
                )
        on_policy = 1.0 if self.by == "ratio" else 0.0
        if not self.low <= on_policy <= self.high:
            raise ValueError(
                f"reject by {self.by} outside [{self.low}, {self.high}] drops tokens on which the "
                f"policies agree; use bounds around {on_policy:g}."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        gap = log_ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        if self.by == "k2":
            measure = gap.square() / 2
        elif self.by == "k3":
            measure = unbounded_k3(-gap)  # bounded, no limit above the bound could ever apply
        else:
            measure = gap
        if self.over == "mean":
            measure = mean_over_rollout(measure, inputs.row_index)
        elif self.over == "sum":
            measure = sum_over_rollout(measure, inputs.row_index)
        if self.by == "ratio":
            measure = measure.exp()  # inf and 0 are compared as well as any
        outside = (measure < self.low) | (measure > self.high)
        if self.over == "every":
            outside = max_over_rollout(outside.to(gap.dtype), inputs.row_index) > 0
        return _without(outside, "correction/rejected_frac", gap)


@parameters
class second_moment:
    """0 for the tokens of largest (log ρ)², as many of each rollout as must go until the others'
    mean is at most `max_mean`: M2PO, 2510.01161, with 0.04.

    The paper bounds the mean over a batch. Here each rollout is bounded, and with that every batch
    of them: a stricter rule, that does not depend on micro-batches.
    """

    max_mean: float = 0.04
    weighs: ClassVar[bool] = False
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.max_mean > 0:
            raise ValueError(
                f"max_mean={self.max_mean} keeps no token; use a positive bound, such as 0.04."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        gap = log_ratio(inputs.trainer_logprobs.detach(), inputs.sampler_logprobs)
        moment = gap.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()
        # By rollout, and in each from the least: means of what stands before grow.
        order = torch.argsort(moment)
        order = order[torch.argsort(inputs.row_index[order], stable=True)]
        rows, sums = inputs.row_index[order], moment[order].cumsum(0)
        place = torch.arange(1, len(rows) + 1, device=rows.device)
        first = max_over_rollout(-(place - 1), rows).neg()  # tokens of the rollouts before
        before = torch.cat([sums.new_zeros(1), sums])[first]
        kept = (sums - before) <= self.max_mean * (place - first).double()
        # Equal tokens share their fate, whatever their order.
        least_dropped = -max_over_rollout(moment[order].masked_fill(kept, math.inf).neg(), rows)
        outside = torch.empty_like(kept).index_copy(0, order, moment[order] >= least_dropped)
        return _without(outside, "correction/second_moment_masked_frac", gap)


@parameters
class high_entropy:
    """0 for tokens where the policy's entropy is below `min_entropy`, in nats: 2506.01939.

    Only forking tokens are trained. The paper takes the top fifth of a batch; a pass sees a part of
    it, so here a threshold decides: 0.672 was that of the paper's Qwen3-8B.
    """

    min_entropy: float = 0.672

    def __post_init__(self) -> None:
        if not math.isfinite(self.min_entropy):
            raise ValueError(
                f"min_entropy={self.min_entropy} leaves all tokens out, or none; use a number of "
                "nats, such as 0.672."
            )

    weighs: ClassVar[bool] = False
    uses_advantages: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        certain = inputs.entropy.detach() < self.min_entropy
        return _without(certain, "correction/low_entropy_frac", inputs.sampler_logprobs)


@parameters
class clip_cov:
    """0 for tokens whose covariance lies in [low, high]: Clip-Cov, 2505.22617.

    Such tokens would lower the policy's entropy much (see `token_covariance`). The paper drops a
    random 2e-4 of a batch's tokens among those; a pass sees a part of the batch, so here all of
    them are dropped, and the bounds say how many that are. The authors' code has 1 and 5.
    """

    low: float = 1.0
    high: float = 5.0
    weighs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"clip_cov({self.low}, {self.high}) drops nothing; use low < high.")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        covariance = token_covariance(inputs)
        inside = (covariance >= self.low) & (covariance <= self.high)
        return _without(inside, "correction/covariance_masked_frac", covariance)


def token_covariance(inputs: LossInputs) -> torch.Tensor:
    """(log π_θ(y_t) + H_t) · A_t, [N], detached: how much a step on the token lowers the entropy.

    2505.22617 (theorem 1) has the covariance of log π and A over the actions in a state, and
    estimates it with means of log π and A over a batch. Here log π is centred by its own mean in
    that state, −H_t, which is exact, and A counts as centred.
    """
    surprise = floored(inputs.trainer_logprobs.detach()) + inputs.entropy.detach()
    return surprise * inputs.advantages


def _without(dropped: torch.Tensor, name: str, like: torch.Tensor) -> TokenLoss:
    frac = dropped.to(like.dtype)
    return 1 - frac, {name: frac}
