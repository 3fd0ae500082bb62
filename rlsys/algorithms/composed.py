"""Losses made of losses.

    corrected(clipped_surrogate(0.2, 0.28, denominator="proximal"), tis(2.0))     w · clip on u
    corrected(reinforce(), icepop(0.5, 5.0))                                      w · A · ∇log π
    corrected(cispo(5.0), opsm(0.5))                                              a mask on any loss
    with_kl(cispo(5.0), "k3", 0.001)                                           + c · KL(π_θ ‖ π_ref)

    m2po(0.04)                                              ρ · A, without its outliers
    distill(cispo(5.0))                                     A = log π_teacher − log π_θ

Notation and `denominator` are those of losses.py. Tokens come from μ, so an unbiased gradient
carries ρ = w·u once. A loss on ρ that is also weighted by w carries w²·u, which is biased towards
tokens that the trainer prefers: `corrected` refuses it.

A composed loss needs what its parts need (`needs` and the other attributes of loss_inputs.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, get_args

import torch

from rlsys.algorithms.advantages import distillation_advantage
from rlsys.algorithms.corrections import Correction, tis
from rlsys.algorithms.kl import Estimator, estimate, k1, k3
from rlsys.algorithms.loss_inputs import LossFn, LossInputs, TokenLoss, needs_of, uses_advantages
from rlsys.algorithms.losses import cispo, clipped_surrogate
from rlsys.algorithms.masks import second_moment, token_covariance
from rlsys.algorithms.parameters import parameters, require_field
from rlsys.algorithms.ratios import bounded_exp, check_coefficient, floored, log_ratio
from rlsys.algorithms.sequences import mean_over_rollout
from rlsys.algorithms.wrapping import Wrapper, denominator_of, union
from rlsys.common.user_functions import attribute_of


@parameters
class corrected(Wrapper):
    """`loss` with each token weighted by `correction`: the definition itself of a weighted loss.

    The metrics are those of both.

    Raises:
        InvalidValue: The correction is a weight w, and the gradient of the loss or of its KL
            penalty would carry w twice, or the loss has no attribute `denominator`.
    """

    loss: LossFn
    correction: Correction

    def __post_init__(self) -> None:
        if not self.correction.weighs:
            return
        denominator = denominator_of(self.loss)
        require_field(
            self,
            "loss",
            denominator != "sampler",
            rule="divides by the sampler's policy already, so that w = π_prox/μ would count twice",
            fix="Use the loss alone, or one that leaves w to the correction: reinforce(), or "
            'clipped_surrogate, gspo or sapo_soft with denominator="proximal". Masks such as opsm '
            "go with every loss.",
        )
        require_field(
            self,
            "loss",
            denominator != "interpolated",
            rule="has the interpolated π_prox in its ratio and w has the trainer's, so that their "
            "product is not π_θ/μ",
            fix="Correct inside: interpolate_proximal(corrected(loss, correction)).",
        )
        require_field(
            self,
            "loss",
            not _has_unbiased_penalty(self.loss),
            rule="has a penalty unbiased_k3, which contains π_θ/μ, so that w would count twice",
            fix="Put the penalty outside: "
            'with_kl(corrected(loss, correction), "unbiased_k3", coefficient).',
        )

    @property
    def denominator(self) -> str:
        """Return the policy that the loss divides by: the sampler's once it is weighted by w."""
        return "sampler" if self.correction.weighs else denominator_of(self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the columns of the loss and of the correction."""
        return union(needs_of(self.loss), needs_of(self.correction))

    @property
    def uses_advantages(self) -> bool:
        """Return whether the loss or the correction reads the advantages."""
        return uses_advantages(self.loss) or uses_advantages(self.correction)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        loss, metrics = self.loss(inputs)
        weight, weight_metrics = self.correction(inputs)
        return weight * loss, metrics | weight_metrics


def decoupled_clipped_surrogate(
    clip_low: float, clip_high: float, max_weight: float, dual_clip: float | None = None
) -> corrected:
    """Return −min(w, max_weight) · min(u·A, clip(u)·A): decoupled PPO of AReaL, 2505.24298.

    The clip bounds the step from π_prox, and the truncated w corrects for the sampler. The clip
    binds only if proximal_logprobs differ from the trainer's (see `interpolate_proximal`).

    Args:
        clip_low: Lower clip of u, as 1 − clip_low.
        clip_high: Upper clip of u, as 1 + clip_high.
        max_weight: Upper bound of w.
        dual_clip: See `clipped_surrogate`.
    """
    clipped = clipped_surrogate(clip_low, clip_high, dual_clip, denominator="proximal")
    return corrected(clipped, tis(max_weight))


@parameters
class interpolate_proximal(Wrapper):
    """`loss` with log π_prox = α log μ + (1 − α) sg(log π_θ): A-3PO, 2512.06547.

    α is 1/staleness, and 0 for staleness 0. Decoupled PPO then needs no forward pass for π_prox.
    """

    loss: LossFn

    def __post_init__(self) -> None:
        require_field(
            self,
            "loss",
            _reads_proximal(self.loss),
            rule="does not read the proximal policy",
            fix='Use a loss that divides by it, such as clipped_surrogate(denominator="proximal") '
            "or decoupled_clipped_surrogate.",
        )

    @property
    def denominator(self) -> str:
        """Return "interpolated" for a loss that divides by π_prox."""
        inner = denominator_of(self.loss)
        return "interpolated" if inner == "proximal" else inner

    @property
    def interpolates_proximal(self) -> bool:
        """Return True: π_prox needs no forward pass."""
        return True

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        staleness = inputs.staleness.to(inputs.sampler_logprobs.dtype)
        alpha = torch.where(staleness > 0, 1 / staleness.clamp(min=1), 0.0)
        now, then = floored(inputs.trainer_logprobs.detach()), floored(inputs.sampler_logprobs)
        return self.loss(replace(inputs, proximal_logprobs=torch.lerp(now, then, alpha)))


def _reads_proximal(loss: object) -> bool:
    """Return whether a loss reads proximal_logprobs.

    A user's loss without `denominator` is assumed to read them.
    """
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
    """`loss` − coefficient · H(π_θ): A3C, 1602.01783, after Williams and Peng (1991).

    H is the exact entropy of the trainer's distribution.
    """

    loss: LossFn
    coefficient: float

    def __post_init__(self) -> None:
        require_field(
            self,
            "coefficient",
            math.isfinite(self.coefficient),
            rule="must be finite",
            fix="Use such as 0.001.",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        loss, metrics = self.loss(inputs)
        return loss - self.coefficient * inputs.entropy, metrics


@parameters
class with_kl(Wrapper):
    """`loss` + coefficient · KL(π_θ ‖ π_ref), estimated per token: GRPO, 2402.03300, equation 4.

    `estimator` is "k1", "k2", "k3" or "unbiased_k3" of kl.py; GRPO uses k3 with coefficient 0.04.
    On tokens of π_θ itself, k2 has the gradient of the divergence, k3 has it to first order, and
    the gradient of k1 has mean 0 and restrains nothing. On older tokens only "unbiased_k3" has the
    divergence's value and gradient: the others leave π_θ/μ out. Bounds (kl.py) limit the size of a
    token's gradient; none changes its sign or removes it.
    """

    loss: LossFn
    estimator: Estimator
    coefficient: float
    extra: ClassVar[tuple[str, ...]] = ("reference_logprobs",)

    def __post_init__(self) -> None:
        require_field(
            self,
            "estimator",
            self.estimator in get_args(Estimator),
            rule="is unknown",
            fix=f"Use one of {', '.join(get_args(Estimator))}.",
        )
        check_coefficient(self)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        loss, metrics = self.loss(inputs)
        divergence = estimate(
            self.estimator,
            inputs.trainer_logprobs,
            inputs.column("reference_logprobs"),
            inputs.sampler_logprobs,
        )
        return loss + self.coefficient * divergence, metrics | {"kl/reference": divergence.detach()}


def m2po(max_second_moment: float = 0.04) -> corrected:
    """Return −M · ρ · A with M = 0 for the most off-policy tokens: M2PO, 2510.01161.

    `second_moment` (masks.py) chooses the masked tokens, with bound `max_second_moment`. The others
    are not clipped: their loss is that of cispo without a bound, with the paper's gradient
    ρ · A · ∇log π_θ.
    """
    return corrected(cispo(math.inf), second_moment(max_second_moment))


@parameters
class kl_cov(Wrapper):
    """`loss` + coefficient · KL(π_prox ‖ π_θ) where the entropy falls most: KL-Cov, 2505.22617.

    The penalty applies to tokens with a `token_covariance` (masks.py) of at least `min_covariance`.
    The paper takes the top 2e-3 to 2e-4 of a batch, with coefficient 1. Here a threshold decides,
    so that the result does not depend on micro-batches. The divergence is k3; the authors' code has
    |log ratio|. It acts from the second optimizer step of a batch on: before, π_θ = π_prox.
    """

    loss: LossFn
    min_covariance: float
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_coefficient(self)

    @property
    def uses_advantages(self) -> bool:
        """Return True: the covariance reads the advantages."""
        return True

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        loss, metrics = self.loss(inputs)
        penalised = token_covariance(inputs) >= self.min_covariance
        divergence = k3(inputs.proximal_logprobs, inputs.trainer_logprobs)
        divergence = divergence.masked_fill(~penalised, 0.0)
        return loss + self.coefficient * divergence, metrics | {
            "kl/covariance_held_frac": penalised.to(loss.dtype)
        }


@parameters
class distill(Wrapper):
    """`loss` with A = log π_teacher − log π_θ, detached: on-policy distillation, Lu (2025).

    It lowers the reverse KL divergence to the teacher. The advantages of the inputs are not used.
    """

    loss: LossFn
    extra: ClassVar[tuple[str, ...]] = ("teacher_logprobs",)
    uses_advantages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_field(
            self,
            "loss",
            uses_advantages(self.loss),
            rule="does not read the advantages, which carry the teacher's signal",
            fix="Use a loss that does, as in distill(cispo(5.0)), or top_k_distill().",
        )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
        advantages = distillation_advantage(
            inputs.trainer_logprobs, inputs.column("teacher_logprobs")
        )
        loss, metrics = self.loss(replace(inputs, advantages=advantages))
        return loss, metrics | {"kl/teacher": -advantages}


@parameters
class observed(Wrapper):
    """Unchanged `loss` with metrics of the gap between μ and π_prox: Owen (2013), chapter 9.3.

    Means over tokens: `offpolicy/kl` and `/k3` estimate KL(μ ‖ π_prox), after Schulman (2020).
    `/chi_squared` is mean(w²) − 1. `/perplexity_ratio` is the perplexity of π_prox divided by that
    of μ, over the token's rollout. `/weight` and `/weight_squared` give
    `offpolicy/effective_sample_frac` (derived_metrics.py).
    """

    loss: LossFn

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N] and metrics."""
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
