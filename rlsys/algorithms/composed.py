"""Losses made of losses.

    corrected(clipped_surrogate(0.2, 0.28, denominator="proximal"), tis(2.0))     w · clip on u
    corrected(reinforce(), icepop(0.5, 5.0))                                      w · A · ∇log π
    corrected(cispo(5.0), opsm(0.5))                                              a mask on any loss
    with_kl(cispo(5.0), "k3", 0.001)                                           + c · KL(π_θ ‖ π_ref)

Notation and `denominator` are those of losses.py. Tokens come from μ, so an unbiased gradient
carries ρ = w·u once. A loss on ρ that is weighted by w as well carries w²·u, and leans by that
towards what the trainer has come to prefer: `corrected` refuses it when it is made.

    m2po(0.04)                                              ρ · A, without its outliers
    distill(cispo(5.0))                                     A = log π_teacher − log π_θ

A composed loss asks for what its parts ask for (`needs` and the others of loss_inputs.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch

from rlsys.algorithms.advantages import distillation_advantage
from rlsys.algorithms.corrections import Correction, tis
from rlsys.algorithms.kl import Estimator, check_estimator, estimate, k1, k3
from rlsys.algorithms.loss_inputs import LossFn, LossInputs, TokenLoss, needs_of, uses_advantages
from rlsys.algorithms.losses import cispo, clipped_surrogate
from rlsys.algorithms.masks import second_moment, token_covariance
from rlsys.algorithms.parameters import parameters
from rlsys.algorithms.ratios import bounded_exp, check_coefficient, floored, log_ratio
from rlsys.algorithms.sequences import mean_over_rollout
from rlsys.algorithms.wrapping import Wrapper, denominator_of, union
from rlsys.common.user_functions import attribute_of, name_of


@parameters
class corrected(Wrapper):
    """`loss` with each token weighted by `correction`, and metrics of both: the definition itself
    of an importance weight, or of a mask, whose source is told where it is.

    Raises ValueError where the gradient of the loss or of its KL penalty would carry w twice, and
    for a loss without `denominator`, unless the correction is a mask.
    """

    loss: LossFn
    correction: Correction

    def __post_init__(self) -> None:
        if not self.correction.weighs:
            return
        denominator = denominator_of(self.loss)
        if denominator == "sampler":
            raise ValueError(
                f"corrected({self.loss}, {self.correction}) counts the importance weight twice: "
                "the loss divides by the sampler's policy already, and w = π_prox/μ does so again; "
                "use the loss alone, or one that leaves w to the correction: reinforce(), or "
                'clipped_surrogate, gspo or sapo_soft with denominator="proximal". Masks such as '
                "opsm go with every loss."
            )
        if denominator == "interpolated":
            raise ValueError(
                f"corrected({self.loss}, {self.correction}) takes the ratio from the interpolated "
                "π_prox and w from the trainer's, so that their product is not π_θ/μ; correct "
                "inside: interpolate_proximal(corrected(loss, correction))."
            )
        if _has_unbiased_penalty(self.loss):
            raise ValueError(
                f"corrected({self.loss}, {self.correction}) weights the penalty twice: unbiased_k3 "
                "contains π_θ/μ. Put the penalty outside: "
                'with_kl(corrected(loss, correction), "unbiased_k3", coefficient).'
            )

    @property
    def denominator(self) -> str:
        return "sampler" if self.correction.weighs else denominator_of(self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        return union(needs_of(self.loss), needs_of(self.correction))

    @property
    def uses_advantages(self) -> bool:
        return uses_advantages(self.loss) or uses_advantages(self.correction)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        weight, weight_metrics = self.correction(inputs)
        return weight * loss, metrics | weight_metrics


def decoupled_clipped_surrogate(
    clip_low: float, clip_high: float, max_weight: float, dual_clip: float | None = None
) -> corrected:
    """−min(w, max_weight) · min(u·A, clip(u)·A): decoupled PPO of AReaL, 2505.24298.

    The clip bounds the step from π_prox, and w, truncated, corrects for the sampler. It needs
    proximal_logprobs that differ from the trainer's (see `interpolate_proximal`) for the clip to
    bind.
    """
    clipped = clipped_surrogate(clip_low, clip_high, dual_clip, denominator="proximal")
    return corrected(clipped, tis(max_weight))


@parameters
class interpolate_proximal(Wrapper):
    """`loss` with log π_prox = α log μ + (1 − α) sg(log π_θ), α = 1/staleness, or 0 without any:
    A-3PO, 2512.06547.

    The proximal policy of decoupled PPO without a forward pass for it.
    """

    loss: LossFn

    def __post_init__(self) -> None:
        if not _reads_proximal(self.loss):
            raise ValueError(
                f"interpolate_proximal({name_of(self.loss)}) would do nothing: the loss reads no "
                "proximal policy; give it one that divides by that, such as "
                'clipped_surrogate(denominator="proximal") or decoupled_clipped_surrogate.'
            )

    @property
    def denominator(self) -> str:
        inner = denominator_of(self.loss)
        return "interpolated" if inner == "proximal" else inner

    @property
    def interpolates_proximal(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        age = inputs.staleness.to(inputs.sampler_logprobs.dtype)
        alpha = torch.where(age > 0, 1 / age.clamp(min=1), 0.0)
        now, then = floored(inputs.trainer_logprobs.detach()), floored(inputs.sampler_logprobs)
        return self.loss(replace(inputs, proximal_logprobs=torch.lerp(now, then, alpha)))


def _reads_proximal(loss: object) -> bool:
    """Of one's own that does not say, so it is taken."""
    if isinstance(loss, corrected):  # a weight is π_prox/μ, and masks compare with it
        return True
    if isinstance(loss, Wrapper):
        return _reads_proximal(loss.loss)
    denominator: str = attribute_of(loss, "denominator", "proximal")
    return denominator == "proximal"


def _has_unbiased_penalty(loss: object) -> bool:
    """Return whether `loss` contains with_kl(..., "unbiased_k3", ...)."""
    while isinstance(loss, Wrapper):
        if isinstance(loss, with_kl) and loss.estimator == "unbiased_k3":
            return True
        loss = loss.loss
    return False


@parameters
class entropy_bonus(Wrapper):
    """`loss` − coefficient · H(π_θ), with the exact entropy of the trainer's distribution: A3C,
    1602.01783, after Williams and Peng (1991).
    """

    loss: LossFn
    coefficient: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.coefficient):
            raise ValueError(f"coefficient={self.coefficient} is no number; use one such as 0.001.")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        return loss - self.coefficient * inputs.entropy, metrics


@parameters
class with_kl(Wrapper):
    """`loss` + coefficient · KL(π_θ ‖ π_ref), estimated per token: "k1", "k2", "k3" or
    "unbiased_k3" of kl.py. GRPO (2402.03300, equation 4) takes k3, with 0.04.

    On tokens of π_θ itself the gradient of k2 is that of the divergence; that of k3 is so to first
    order; that of k1 has mean 0 and holds nothing back. On older tokens only "unbiased_k3" has the
    divergence's value and gradient: the others leave π_θ/μ out. Bounds (kl.py) limit the size of a
    token's gradient; none changes its sign or removes it.
    """

    loss: LossFn
    estimator: Estimator
    coefficient: float
    extra: ClassVar[tuple[str, ...]] = ("reference_logprobs",)

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        check_coefficient(self.coefficient)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        divergence = estimate(
            self.estimator,
            inputs.trainer_logprobs,
            inputs.column("reference_logprobs"),
            inputs.sampler_logprobs,
        )
        return loss + self.coefficient * divergence, metrics | {"kl/reference": divergence.detach()}


def m2po(max_second_moment: float = 0.04) -> corrected:
    """−M · ρ · A, M = 0 for the tokens that lie farthest off-policy: M2PO, 2510.01161.

    `second_moment` (masks.py) chooses them; no clip holds the others. The loss is that of cispo
    without a bound, whose gradient is the paper's, ρ · A · ∇log π_θ.
    """
    return corrected(cispo(math.inf), second_moment(max_second_moment))


@parameters
class kl_cov(Wrapper):
    """`loss` + coefficient · KL(π_prox ‖ π_θ) on the tokens that lower the entropy most: KL-Cov,
    2505.22617.

    Those whose `token_covariance` (masks.py) is at least `min_covariance`. The paper takes the top
    2e-3 to 2e-4 of a batch and coefficient 1; a pass sees a part of the batch, so here a threshold
    decides, and the result does not depend on micro-batches. The divergence is k3; the authors'
    code has |log ratio|. It acts from a batch's second optimizer step on: before, π_θ = π_prox.
    """

    loss: LossFn
    min_covariance: float
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_coefficient(self.coefficient)

    @property
    def uses_advantages(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        held = token_covariance(inputs) >= self.min_covariance
        divergence = k3(inputs.proximal_logprobs, inputs.trainer_logprobs).masked_fill(~held, 0.0)
        return loss + self.coefficient * divergence, metrics | {
            "kl/covariance_held_frac": held.to(loss.dtype)
        }


@parameters
class distill(Wrapper):
    """`loss` with A = log π_teacher − log π_θ, detached: on-policy distillation, Lu (2025), which
    lowers the reverse KL divergence to the teacher.

    Advantages that come in are not used.
    """

    loss: LossFn
    extra: ClassVar[tuple[str, ...]] = ("teacher_logprobs",)
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not uses_advantages(self.loss):
            raise ValueError(
                f"distill({name_of(self.loss)}) would distil nothing: the loss reads no "
                "advantages, which the teacher is compared by; use one that does, such as "
                "distill(cispo(5.0)), or top_k_distill()."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        advantages = distillation_advantage(
            inputs.trainer_logprobs, inputs.column("teacher_logprobs")
        )
        loss, metrics = self.loss(replace(inputs, advantages=advantages))
        return loss, metrics | {"kl/teacher": -advantages}


@parameters
class observed(Wrapper):
    """`loss` as it is, with metrics of how far π_prox is from the policy μ that sampled: estimates
    of a divergence, Schulman (2020), and diagnostics of importance weights, Owen (2013), chapter
    9.3.

    Means over tokens: `offpolicy/kl` and `/k3` estimate KL(μ ‖ π_prox), `/chi_squared` is
    mean(w²) − 1, `/perplexity_ratio` that of π_prox to μ over a token's rollout; `/weight` and
    `/weight_squared` give `offpolicy/effective_sample_frac` (derived_metrics.py).
    """

    loss: LossFn

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        gap = log_ratio(inputs.proximal_logprobs, inputs.sampler_logprobs)
        w = bounded_exp(gap)
        sampled_from = (inputs.sampler_logprobs, inputs.proximal_logprobs)
        return loss, metrics | {
            "offpolicy/kl": k1(*sampled_from),
            "offpolicy/k3": k3(*sampled_from),
            "offpolicy/weight": w,
            "offpolicy/weight_squared": w.square(),
            "offpolicy/chi_squared": w.square() - 1,
            "offpolicy/perplexity_ratio": bounded_exp(mean_over_rollout(-gap, inputs.row_index)),
        }
