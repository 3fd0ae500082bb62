"""Losses made of losses.

    corrected(clipped_surrogate(0.2, 0.28, denominator="proximal"), tis(2.0))     w · clip on u
    corrected(reinforce(), icepop(0.5, 5.0))                                      w · A · ∇log π
    corrected(cispo(5.0), opsm(0.5))                                              a mask on any loss

Notation and `denominator` are those of losses.py. Tokens come from μ, so an unbiased gradient
carries ρ = w·u once. A loss on ρ that is weighted by w as well carries w²·u, and leans by that
towards what the trainer has come to prefer: `corrected` refuses it when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlsys.algorithms.corrections import Correction, tis
from rlsys.algorithms.inputs import LossFn, LossInputs, TokenLoss
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.algorithms.ratios import floored


@dataclass(frozen=True)
class corrected:
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
class interpolate_proximal:
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
class entropy_bonus:
    """`loss` − coefficient · H(π_θ), with the exact entropy of the trainer's distribution."""

    loss: LossFn
    coefficient: float

    @property
    def denominator(self) -> str:
        return _denominator(self.loss)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        return loss - self.coefficient * inputs.entropy, metrics


def _denominator(loss: LossFn) -> str:
    denominator: str | None = getattr(loss, "denominator", None)
    if denominator is None:
        raise ValueError(
            f"{loss} does not say by whose policy it divides, so a weight on it may count twice; "
            'give it an attribute denominator: "sampler", "proximal", or "none" for a loss without '
            "a ratio."
        )
    return denominator
