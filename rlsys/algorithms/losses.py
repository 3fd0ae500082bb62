"""Policy losses, per token.

In: `LossInputs` over N tokens (N may be 0). Out: the loss of each token [N], and metrics [N] that
are averaged over all tokens of the global batch. Aggregation comes afterwards, elsewhere.

Notation: A advantage, μ the policy that sampled, π_prox the trainer's policy at the start of the
optimizer step, π_θ the policy that is optimised; ρ = π_θ/μ, u = π_θ/π_prox, w = π_prox/μ; sg stops
the gradient. What the papers call the old policy is here the one that sampled, μ, unless a loss
says otherwise: each batch trains one optimizer step, where u is 1 and only its gradient counts.

Every loss is a frozen dataclass that is called like the function it is named after, so it can be
printed, compared and sent to another process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlsys.algorithms.sequences import mean_over_rollout
from rlsys.engines.training.protocol import LossFn, LossInputs

TokenLoss = tuple[torch.Tensor, dict[str, torch.Tensor]]

# exp of more overflows in float16 and, multiplied by a mask's 0, gives NaN in any type. A ratio of
# e^20 is far beyond every clip.
MAX_LOG_RATIO = 20.0


def ratio(logprobs: torch.Tensor, base_logprobs: torch.Tensor) -> torch.Tensor:
    """π/π_base of each token, [N]."""
    return torch.exp((logprobs - base_logprobs).clamp(max=MAX_LOG_RATIO))


@dataclass(frozen=True)
class reinforce:
    """−A · log π_θ: Williams (1992)."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return -inputs.advantages * inputs.trainer_logprobs, {}


@dataclass(frozen=True)
class clipped_surrogate:
    """−min(ρ·A, clip(ρ, 1 − clip_low, 1 + clip_high)·A): PPO, 1707.06347, equation 7.

    `clip_high` > `clip_low` is DAPO's clip-higher (2503.14476, equation 10). `dual_clip` c > 1
    bounds the loss of a token with A < 0 by −c·A (1912.09729).
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip={self.dual_clip} would cut tokens that the policy has not moved; "
                "use more than 1, such as 3."
            )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        rho = ratio(inputs.trainer_logprobs, inputs.sampler_logprobs)
        return _clipped(rho, inputs.advantages, self.clip_low, self.clip_high, self.dual_clip)


@dataclass(frozen=True)
class decoupled_clipped_surrogate:
    """−min(w, max_weight) · min(u·A, clip(u)·A): decoupled PPO of AReaL, 2505.24298.

    The clip bounds the step from π_prox, and w, truncated, corrects for the sampler. It needs
    proximal_logprobs that differ from the trainer's (see `interpolate_proximal`) for the clip to
    bind.
    """

    clip_low: float
    clip_high: float
    max_weight: float

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        _check_cap("max_weight", self.max_weight)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        u = ratio(inputs.trainer_logprobs, inputs.proximal_logprobs)
        w = ratio(inputs.proximal_logprobs, inputs.sampler_logprobs).clamp(max=self.max_weight)
        loss, metrics = _clipped(u, inputs.advantages, self.clip_low, self.clip_high, None)
        return w * loss, metrics | {"correction/weight": w}


@dataclass(frozen=True)
class interpolate_proximal:
    """`loss` with log π_prox = α log μ + (1 − α) sg(log π_θ), α = 1/staleness, or 0 without any.

    A-3PO: the proximal policy of decoupled PPO without a forward pass for it.
    """

    loss: LossFn

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        age = inputs.staleness.to(inputs.sampler_logprobs.dtype)
        alpha = torch.where(age > 0, 1 / age.clamp(min=1), 0.0)
        proximal = torch.lerp(inputs.trainer_logprobs.detach(), inputs.sampler_logprobs, alpha)
        return self.loss(replace(inputs, proximal_logprobs=proximal))


@dataclass(frozen=True)
class gspo:
    """−min(s·A, clip(s)·A), s = exp(mean_t(log π_θ − log μ)) of the whole rollout: GSPO,
    2507.18071, equations 5 and 7.

    Every token carries its rollout's s; aggregate with `sequence_mean`, as the paper does. Its
    clips are tiny: 3e-4 and 4e-4.
    """

    clip_low: float
    clip_high: float

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        log_ratio = inputs.trainer_logprobs - inputs.sampler_logprobs
        s = mean_over_rollout(log_ratio, inputs.row_index).clamp(max=MAX_LOG_RATIO).exp()
        return _clipped(s, inputs.advantages, self.clip_low, self.clip_high, None)


@dataclass(frozen=True)
class cispo:
    """−sg(min(ρ, max_ratio)) · A · log π_θ: MiniMax-M1, 2506.13585, equation 4; used by ScaleRL.

    No token loses its gradient; a large ratio only stops to grow. The upper bound alone is set, as
    in the paper; it is 4 to 8.
    """

    max_ratio: float

    def __post_init__(self) -> None:
        _check_cap("max_ratio", self.max_ratio)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return _truncated_importance(inputs, self.max_ratio)


@dataclass(frozen=True)
class aipo:
    """Gradient min(ρ, max_ratio) · A · ∇log π_θ: LlamaRL, 2505.24034.

    Token by token and one-sided, without PPO's clip; max_ratio is 2 to 10. It was stated before
    CISPO and is the same function: two papers that correct for asynchronous sampling, one rule.
    """

    max_ratio: float

    def __post_init__(self) -> None:
        _check_cap("max_ratio", self.max_ratio)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return _truncated_importance(inputs, self.max_ratio)


@dataclass(frozen=True)
class sapo_soft:
    """−(4/τ) · σ(τ(ρ − 1)) · A: Soft Adaptive Policy Optimization, 2511.20347.

    A smooth gate in the clip's place: the gradient's weight is 1 at ρ = 1 and fades on both sides,
    faster with a larger τ. The paper takes 1.0 for A > 0 and 1.05 otherwise. (Not the swarm
    algorithm of the same short name.)
    """

    temperature_positive: float
    temperature_negative: float

    def __post_init__(self) -> None:
        for name in ("temperature_positive", "temperature_negative"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} is no temperature; use about 1.")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        rho = ratio(inputs.trainer_logprobs, inputs.sampler_logprobs)
        tau = torch.where(
            inputs.advantages > 0, self.temperature_positive, self.temperature_negative
        )
        gate = torch.sigmoid(tau * (rho - 1))
        metrics = {"ratio/mean": rho.detach(), "ratio/gate": (4 * gate * (1 - gate)).detach()}
        return -(4 / tau) * gate * inputs.advantages, metrics


@dataclass(frozen=True)
class dppo_mask:
    """−ρ·A, without the tokens whose probability has moved too far in the advantage's direction.

    DPPO with the binary total-variation mask, 2602.04879: a token is dropped if π_θ − μ > max_rise
    with A > 0, or π_θ − μ < −max_fall with A < 0. Differences of probabilities, not of logarithms:
    a rare token may multiply its probability, a frequent one may not. Usual values: 0.2.
    """

    max_rise: float
    max_fall: float

    def __post_init__(self) -> None:
        for name in ("max_rise", "max_fall"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} is no difference of probabilities; "
                    "use a value from 0 to 1, such as 0.2."
                )

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        with torch.no_grad():
            moved = inputs.trainer_logprobs.exp() - inputs.sampler_logprobs.exp()
            dropped = torch.where(
                inputs.advantages > 0, moved > self.max_rise, moved < -self.max_fall
            )
        rho = ratio(inputs.trainer_logprobs, inputs.sampler_logprobs)
        loss = torch.where(dropped, 0.0, -rho * inputs.advantages)
        metrics = {"ratio/mean": rho.detach(), "ratio/masked_frac": dropped.to(rho.dtype)}
        return loss, metrics


@dataclass(frozen=True)
class entropy_bonus:
    """`loss` − coefficient · H(π_θ), with the exact entropy of the trainer's distribution."""

    loss: LossFn
    coefficient: float

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        loss, metrics = self.loss(inputs)
        return loss - self.coefficient * inputs.entropy, metrics


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float
) -> torch.Tensor:
    """A critic's loss per token, [N] each: ½ max((V − R)², (clip(V, V_old ± clip) − R)²).

    PPO's value loss, clipped around the value that the critic gave at the start of the step.
    """
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2


def _clipped(
    rho: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    objective = torch.minimum(rho * advantages, rho.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        objective = torch.maximum(objective, floor)
    too_far = torch.where(advantages > 0, rho > 1 + clip_high, rho < 1 - clip_low)
    metrics = {
        "ratio/mean": rho.detach(),
        "ratio/clipped_frac": (too_far & (advantages != 0)).to(rho.dtype),
    }
    return -objective, metrics


def _truncated_importance(inputs: LossInputs, max_ratio: float) -> TokenLoss:
    rho = ratio(inputs.trainer_logprobs.detach(), inputs.sampler_logprobs)
    loss = -rho.clamp(max=max_ratio) * inputs.advantages * inputs.trainer_logprobs
    return loss, {"ratio/mean": rho, "ratio/clipped_frac": (rho > max_ratio).to(rho.dtype)}


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0 < clip_low <= 1 and clip_high > 0):
        raise ValueError(
            f"clip_low={clip_low}, clip_high={clip_high} leave no room for the policy to move; "
            "use 0 < clip_low <= 1 and clip_high > 0, such as 0.2 and 0.28."
        )


def _check_cap(name: str, cap: float) -> None:
    if cap <= 0:
        raise ValueError(f"{name}={cap} stops every gradient; use a positive cap, usually 2 to 10.")
