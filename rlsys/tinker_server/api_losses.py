"""Losses that a client may name, as the API defines them: summed over tokens, never normalized.

    cross_entropy         −w · log p                          target_tokens, weights
    importance_sampling   −r · A                              target_tokens, logprobs, advantages
    ppo                   −min(r A, clip(r, low, high) A)     the same
    cispo                 −sg(clip(r, low, high)) · A · log p the same
    dro                   −(A log p − β/2 (log r)²)           the same
    gspo                  as ppo, r = s · p/sg(p),            and sequence_ratio_mask
                          s = exp(mean of log r)
    stable_reinforce      −sg(w) · A · log p + κ/2 (log r)²   target_tokens, advantages, provenance
                          w = 1 for A ≥ 0, else min(r, 1)

with r = p/q, p the trainer's and q the sampler's probability of a target. r is at most e^20 and
log-probabilities are at least -10^4; a token beyond has no gradient (rlsys.algorithms.ratios).
Source: the API's public documentation, tinker-docs.thinkingmachines.ai/tinker/losses, and the
papers that it names: PPO 1707.06347, CISPO 2506.13585, DRO 2405.19107, GSPO-token 2507.18071
(equations 13 and 14). The API publishes no formula of stable_reinforce, only its inputs and its
setting kl_coeff (κ). This server uses TOPR's weights (2503.14286, per token) and DRO's penalty.

Shape legend: N tokens of one micro-batch, K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlsys.algorithms.loss_inputs import LossFn, LossInputs, TokenLoss
from rlsys.algorithms.losses import cispo, clipped_surrogate
from rlsys.algorithms.parameters import parameters
from rlsys.algorithms.ratios import (
    bounded_exp,
    check_coefficient,
    floored,
    log_ratio,
    ratio,
)
from rlsys.errors import InvalidValue
from rlsys.tinker_server.api_errors import ApiError


@parameters
class weighted_cross_entropy:
    """−w · log p, with w from the column `weights`, of any sign, as custom losses send it."""

    needs: ClassVar[tuple[str, ...]] = ("weights",)
    uses_advantages: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token, [N]."""
        return -inputs.column("weights") * floored(inputs.trainer_logprobs), {}


@parameters
class importance_sampling:
    """−r · A."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token, [N]."""
        return -ratio(inputs.trainer_logprobs, inputs.sampler_logprobs) * inputs.advantages, {}


@parameters
class dro:
    """−(A log p − β/2 (log r)²)."""

    beta: float = 0.05

    def __post_init__(self) -> None:
        check_coefficient(self, "beta")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token, [N]."""
        moved = log_ratio(inputs.trainer_logprobs, inputs.sampler_logprobs)
        gain = floored(inputs.trainer_logprobs) * inputs.advantages
        return -(gain - 0.5 * self.beta * moved**2), {}


@parameters
class stable_reinforce:
    """−sg(w) · A · log p + κ/2 (log r)², w = 1 where A ≥ 0, else min(r, 1).

    This is REINFORCE for on-policy tokens (r = 1, where the penalty has no gradient). No weight
    exceeds 1, so stale data cannot make the gradient explode. A discouraged token loses its
    gradient as its probability vanishes. q is the probability that the server recorded when it
    sampled the token. Tokens that were not sampled (column `sampled`) have no penalty.
    """

    kl_coeff: float = 0.01
    needs: ClassVar[tuple[str, ...]] = ("sampled",)

    def __post_init__(self) -> None:
        check_coefficient(self, "kl_coeff")

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token, [N]."""
        advantages, logprobs = inputs.advantages, floored(inputs.trainer_logprobs)
        moved = log_ratio(inputs.trainer_logprobs, inputs.sampler_logprobs)
        tapered = bounded_exp(moved.detach()).clamp(max=1.0)
        weights = torch.where(advantages >= 0, torch.ones_like(tapered), tapered)
        penalty = 0.5 * self.kl_coeff * inputs.column("sampled") * moved**2
        return penalty - weights * advantages * logprobs, {}


@parameters
class gspo_token:
    """−min(s_t A, clip(s_t, low, high) A), with s_t = sg(s) · p/sg(p) and s = exp(mean of log r).

    The mean is over the tokens of a row whose `sequence_ratio_mask` is not 0.
    """

    low: float
    high: float
    needs: ClassVar[tuple[str, ...]] = ("sequence_ratio_mask",)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token, [N]."""
        logprobs, row = floored(inputs.trainer_logprobs), inputs.row_index
        counts = (inputs.column("sequence_ratio_mask") != 0).to(logprobs.dtype)
        moved = log_ratio(inputs.trainer_logprobs, inputs.sampler_logprobs).detach() * counts
        num_rows = int(row.max()) + 1 if len(row) else 0
        sums, sizes = (
            torch.zeros(num_rows, dtype=logprobs.dtype, device=logprobs.device).index_add_(
                0, row, x
            )
            for x in (moved, counts)
        )
        mean = (sums / sizes.clamp(min=1.0))[row]
        r = bounded_exp(mean + logprobs - logprobs.detach())
        bounded = r.clamp(self.low, self.high)
        return -torch.minimum(r * inputs.advantages, bounded * inputs.advantages), {}


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """A loss that clients may name.

    Attributes:
        make: Returns the loss with these settings.
        inputs: Column of each tensor that a datum must have besides target_tokens.
        config: Default of each setting.
        masks: Tensors whose values must be 0 or 1.
    """

    make: Callable[[Mapping[str, float]], LossFn]
    inputs: Mapping[str, str]
    config: Mapping[str, float]
    masks: frozenset[str] = frozenset()


STABLE_REINFORCE = "stable_reinforce"

_RL = {"logprobs": "sampler_logprobs", "advantages": "advantages"}


def _clipped(low: float, high: float) -> LossFn:
    return clipped_surrogate(1 - low, high - 1)


KINDS: Mapping[str, LossKind] = {
    "cross_entropy": LossKind(
        make=lambda config: weighted_cross_entropy(), inputs={"weights": "weights"}, config={}
    ),
    "importance_sampling": LossKind(
        make=lambda config: importance_sampling(), inputs=_RL, config={}
    ),
    "ppo": LossKind(
        make=lambda config: _clipped(*_thresholds(config)),
        inputs=_RL,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "cispo": LossKind(
        make=lambda config: cispo(config["clip_high_threshold"], config["clip_low_threshold"]),
        inputs=_RL,
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": LossKind(make=lambda config: dro(config["beta"]), inputs=_RL, config={"beta": 0.05}),
    "gspo": LossKind(
        make=lambda config: gspo_token(*_thresholds(config)),
        inputs={**_RL, "sequence_ratio_mask": "sequence_ratio_mask"},
        # Clips of the paper, 3e-4 and 4e-4.
        config={"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
        masks=frozenset({"sequence_ratio_mask"}),
    ),
    # rlsys.tinker_server.provenance adds logprobs and sampled.
    STABLE_REINFORCE: LossKind(
        make=lambda config: stable_reinforce(config["kl_coeff"]),
        inputs={**_RL, "sampled": "sampled"},
        config={"kl_coeff": 0.01},
    ),
}


def loss_kind(name: str) -> LossKind:
    """Return a loss by name.

    Raises:
        ApiError: There is no such loss.
    """
    if name not in KINDS:
        why = "is not offered"
        if name == "custom":
            why = "is not offered, because custom losses run in the client"
        raise ApiError(
            "loss_fn",
            name,
            rule=why,
            fix=f"Use {', '.join(KINDS)}, or forward_backward_custom with your own function.",
        )
    return KINDS[name]


def loss_of(name: str, config: Mapping[str, float | str]) -> LossFn:
    """Return a loss with these settings.

    Raises:
        ApiError: The loss, a setting or its value is not valid.
    """
    kind = loss_kind(name)
    if unknown := sorted(config.keys() - kind.config.keys()):
        known = ", ".join(kind.config) or "none"
        raise ApiError(
            f"loss_fn_config.{unknown[0]}",
            config[unknown[0]],
            rule=f"{name} has no such setting",
            fix=f"Leave it out. The settings of {name} are: {known}.",
        )
    numbers: dict[str, float] = dict(kind.config)
    for setting, value in config.items():
        if isinstance(value, str) or not math.isfinite(value):
            raise ApiError(
                f"loss_fn_config.{setting}",
                value,
                rule="must be a finite number",
                fix=f"Give a number such as {kind.config[setting]:g}.",
            )
        numbers[setting] = value
    try:
        return kind.make(numbers)
    except ApiError:
        raise
    except InvalidValue as error:
        raise ApiError(
            "loss_fn_config", dict(config), rule=f"{error.field}: {error.rule}", fix=error.fix
        ) from None
    except ValueError as error:
        raise ApiError(
            "loss_fn_config", dict(config), rule=str(error).rstrip("."), fix="Change the setting."
        ) from None


def _thresholds(config: Mapping[str, float]) -> tuple[float, float]:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if not 0 <= low < 1 < high:
        raise ApiError(
            "loss_fn_config",
            dict(config),
            rule="clip_low_threshold must be below 1, the ratio of equal policies, and "
            "clip_high_threshold above 1",
            fix="Use two such as 0.8 and 1.2.",
        )
    return low, high
