"""Masks: corrections (see corrections.py) with weights 0 and 1, which go with every loss.

    corrected(cispo(5.0), opsm(0.5))              corrected(clipped_surrogate(), clip_cov())

A mask reads one token, or all tokens of its rollout, but never other rollouts of the micro-batch,
so the result does not depend on micro-batches. If a paper ranks the tokens of a batch, a threshold
replaces the ranking, and the docstring names it.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, get_args

import torch

from rlsys.algorithms.kl import unbounded_k3
from rlsys.algorithms.loss_inputs import LossInputs, TokenLoss
from rlsys.algorithms.parameters import parameters, require_field
from rlsys.algorithms.ratios import MAX_LOG_RATIO, floored, log_ratio
from rlsys.algorithms.sequences import max_over_rollout, mean_over_rollout, sum_over_rollout
from rlsys.errors import require

By = Literal["ratio", "k1", "k2", "k3"]
Over = Literal["token", "mean", "sum", "every"]


@parameters
class opsm:
    """0 for rollouts with A < 0 and mean_t log(μ/π_θ) > threshold: DeepSeek-V3.2, 2512.02556.

    The paper calls it off-policy sequence masking: bad rollouts that the policy would hardly sample
    any more are dropped.
    """

    threshold: float
    weighs: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N], 0 or 1, and metrics."""
        gap = log_ratio(inputs.sampler_logprobs, inputs.trainer_logprobs.detach())
        far = mean_over_rollout(gap, inputs.row_index) > self.threshold
        return _without(far & (inputs.advantages < 0), "correction/opsm_masked_frac", gap)


@parameters
class reject:
    """0 where a measure of w = π_prox/μ is outside [low, high]: Liu, Li et al. (2025).

    The source, "When speed kills stability", calls it rejection sampling. `by` is the measure:
    "ratio" is w, "k1" is log w, "k2" is (log w)²/2 and "k3" is w − 1 − log w; the last two estimate
    KL(μ ‖ π_prox). `over` is its range: "token" checks each token; "mean" and "sum" check the
    rollout's mean or sum of the measure (for "ratio" the geometric mean or the product); "every"
    drops a rollout if any of its tokens is outside.
    """

    by: By
    low: float = -math.inf
    high: float = math.inf
    over: Over = "token"
    weighs: ClassVar[bool] = False
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, known in (("by", get_args(By)), ("over", get_args(Over))):
            require_field(
                self,
                name,
                getattr(self, name) in known,
                rule="is unknown",
                fix=f"Use one of {', '.join(known)}.",
            )
        on_policy = 1.0 if self.by == "ratio" else 0.0
        require(
            self.low <= on_policy <= self.high,
            "reject: (low, high)",
            (self.low, self.high),
            rule=f"must enclose {on_policy:g}, where the policies agree by {self.by}",
            fix=f"Use bounds around {on_policy:g}.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N], 0 or 1, and metrics."""
        gap = log_ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        if self.by == "k2":
            measure = gap.square() / 2
        elif self.by == "k3":
            measure = unbounded_k3(-gap)  # a bounded k3 could not exceed a limit above the bound
        else:
            measure = gap
        if self.over == "mean":
            measure = mean_over_rollout(measure, inputs.row_index)
        elif self.over == "sum":
            measure = sum_over_rollout(measure, inputs.row_index)
        if self.by == "ratio":
            measure = measure.exp()  # may be inf, which compares correctly
        outside = (measure < self.low) | (measure > self.high)
        if self.over == "every":
            outside = max_over_rollout(outside.to(gap.dtype), inputs.row_index) > 0
        return _without(outside, "correction/rejected_frac", gap)


@parameters
class second_moment:
    """0 for a rollout's tokens with the largest (log ρ)²: M2PO, 2510.01161, with 0.04.

    As few tokens are dropped as needed for the mean of the others to be at most `max_mean`. The
    paper bounds the mean over a batch. Here the mean of each rollout is bounded, and so that of
    every batch: a stricter rule that does not depend on micro-batches.
    """

    max_mean: float = 0.04
    weighs: ClassVar[bool] = False
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_field(
            self,
            "max_mean",
            self.max_mean > 0,
            rule="must be positive, or no token is kept",
            fix="Use such as 0.04.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N], 0 or 1, and metrics."""
        gap = log_ratio(inputs.trainer_logprobs.detach(), inputs.sampler_logprobs)
        moment = gap.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()
        # Sort by rollout, then by moment: within a rollout the mean of a prefix grows.
        order = torch.argsort(moment)
        order = order[torch.argsort(inputs.row_index[order], stable=True)]
        rows, sums = inputs.row_index[order], moment[order].cumsum(0)
        place = torch.arange(1, len(rows) + 1, device=rows.device)
        first = max_over_rollout(-(place - 1), rows).neg()  # tokens of the rollouts before
        before = torch.cat([sums.new_zeros(1), sums])[first]
        kept = (sums - before) <= self.max_mean * (place - first).double()
        # Drop every token as large as the smallest dropped one, so that the order does not matter.
        least_dropped = -max_over_rollout(moment[order].masked_fill(kept, math.inf).neg(), rows)
        outside = torch.empty_like(kept).index_copy(0, order, moment[order] >= least_dropped)
        return _without(outside, "correction/second_moment_masked_frac", gap)


@parameters
class high_entropy:
    """0 for tokens where the policy's entropy is below `min_entropy`, in nats: 2506.01939.

    Only tokens of high entropy ("forking tokens") are trained. The paper takes the top fifth of a
    batch; here a threshold decides. The default 0.672 is the threshold of the paper's Qwen3-8B.
    """

    min_entropy: float = 0.672
    weighs: ClassVar[bool] = False
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_field(
            self,
            "min_entropy",
            math.isfinite(self.min_entropy),
            rule="must be finite",
            fix="Use a number of nats such as 0.672.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N], 0 or 1, and metrics."""
        low = inputs.entropy.detach() < self.min_entropy
        return _without(low, "correction/low_entropy_frac", inputs.sampler_logprobs)


@parameters
class clip_cov:
    """0 for tokens whose covariance is in [low, high]: Clip-Cov, 2505.22617.

    Such tokens would lower the policy's entropy strongly (see `token_covariance`). The paper drops
    a random 2e-4 of a batch's tokens among them; here all of them are dropped, and the bounds
    determine their number. The authors' code has 1 and 5.
    """

    low: float = 1.0
    high: float = 5.0
    weighs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(
            self.low < self.high,
            "clip_cov: (low, high)",
            (self.low, self.high),
            rule="low must be below high",
            fix="Use such as 1 and 5.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the weight of each token [N], 0 or 1, and metrics."""
        covariance = token_covariance(inputs)
        inside = (covariance >= self.low) & (covariance <= self.high)
        return _without(inside, "correction/covariance_masked_frac", covariance)


def token_covariance(inputs: LossInputs) -> torch.Tensor:
    """Return (log π_θ(y_t) + H_t) · A_t [N], detached.

    It measures how much a step on the token lowers the entropy. 2505.22617 (theorem 1) has the
    covariance of log π and A over the actions in a state, and estimates it with means of log π and
    A over a batch. Here log π is centred by its exact mean in that state, −H_t, and A is taken as
    centred.
    """
    surprise = floored(inputs.trainer_logprobs.detach()) + inputs.entropy.detach()
    return surprise * inputs.advantages


def _without(dropped: torch.Tensor, name: str, like: torch.Tensor) -> TokenLoss:
    frac = dropped.to(like.dtype)
    return 1 - frac, {name: frac}
