"""Losses made of losses.

    corrected(clipped_surrogate(0.2, 0.28, denominator="proximal"), tis(2.0))     w · clip on u
    corrected(reinforce(), icepop(0.5, 5.0))                                      w · A · ∇log π
    corrected(cispo(5.0), opsm(0.5))                                              a mask on any loss
    with_kl(cispo(5.0), "k3", 0.001)                                           + c · KL(π_θ ‖ π_ref)

Notation and `denominator` are those of losses.py. Tokens come from μ, so an unbiased gradient
carries ρ = w·u once. A loss on ρ that is weighted by w as well carries w²·u, and leans by that
towards what the trainer has come to prefer: `corrected` refuses it when it is made.

A composed loss asks for what its parts ask for (`needs` and the others of inputs.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from rlsys.algorithms.corrections import Correction, tis
from rlsys.algorithms.inputs import (
    LossFn,
    LossInputs,
    TokenLoss,
    needs_of,
    uses_advantages,
    whole_groups,
)
from rlsys.algorithms.kl import Estimator, check_estimator, estimate
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.algorithms.ratios import floored


class _Wrapper:
    """What a loss around another one says of itself, unless it knows better."""

    loss: LossFn

    @property
    def denominator(self) -> str:
        return _denominator(self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        return needs_of(self.loss)

    @property
    def uses_advantages(self) -> bool:
        return uses_advantages(self.loss)

    @property
    def whole_groups(self) -> bool:
        return whole_groups(self.loss)


@dataclass(frozen=True)
class corrected(_Wrapper):
    """`loss` with each token weighted by `correction`; metrics of both.

    Raises ValueError where the gradient would carry w twice, and for a loss that does not say by
    whose policy it divides (`denominator`), unless the correction is a mask.
    """

    loss: LossFn
    correction: Correction

    def __post_init__(self) -> None:
        if not self.correction.weighs:
            return
        denominator = _denominator(self.loss)
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

    @property
    def denominator(self) -> str:
        return "sampler" if self.correction.weighs else _denominator(self.loss)

    @property
    def needs(self) -> tuple[str, ...]:
        return _union(needs_of(self.loss), needs_of(self.correction))

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


@dataclass(frozen=True)
class interpolate_proximal(_Wrapper):
    """`loss` with log π_prox = α log μ + (1 − α) sg(log π_θ), α = 1/staleness, or 0 without any.

    A-3PO: the proximal policy of decoupled PPO without a forward pass for it.
    """

    loss: LossFn

    @property
    def denominator(self) -> str:
        inner = _denominator(self.loss)
        return "interpolated" if inner == "proximal" else inner

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        age = inputs.staleness.to(inputs.sampler_logprobs.dtype)
        alpha = torch.where(age > 0, 1 / age.clamp(min=1), 0.0)
        now, then = floored(inputs.trainer_logprobs.detach()), floored(inputs.sampler_logprobs)
        return self.loss(replace(inputs, proximal_logprobs=torch.lerp(now, then, alpha)))


@dataclass(frozen=True)
class entropy_bonus(_Wrapper):
    """`loss` − coefficient · H(π_θ), with the exact entropy of the trainer's distribution."""

    loss: LossFn
    coefficient: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.coefficient):
            raise ValueError(f"coefficient={self.coefficient} is no number; use one such as 0.001.")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        return loss - self.coefficient * inputs.entropy, metrics


@dataclass(frozen=True)
class with_kl(_Wrapper):
    """`loss` + coefficient · KL(π_θ ‖ π_ref), estimated per token: "k1", "k2", "k3" or
    "unbiased_k3" of kl.py. GRPO (2402.03300, equation 4) takes k3, with 0.04.

    On tokens of π_θ itself the gradient of k2 is that of the divergence; that of k3 is so to first
    order; that of k1 has mean 0 and holds nothing back. On older tokens only "unbiased_k3" has the
    divergence's value and gradient: the others leave π_θ/μ out.
    """

    loss: LossFn
    estimator: Estimator
    coefficient: float

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(
                f"coefficient={self.coefficient} rewards leaving the reference; use 0 or more, "
                "such as 0.001."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        return _union(needs_of(self.loss), ("reference_logprobs",))

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        divergence = estimate(
            self.estimator,
            inputs.trainer_logprobs,
            inputs.column("reference_logprobs"),
            inputs.sampler_logprobs,
        )
        return loss + self.coefficient * divergence, metrics | {"kl/reference": divergence.detach()}


def _denominator(loss: LossFn) -> str:
    denominator: str | None = getattr(loss, "denominator", None)
    if denominator is None:
        raise ValueError(
            f"{loss} does not say by whose policy it divides, so a weight on it may count twice; "
            'give it an attribute denominator: "sampler", "proximal", or "none" for a loss without '
            "a ratio."
        )
    return denominator


def _union(*names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))
