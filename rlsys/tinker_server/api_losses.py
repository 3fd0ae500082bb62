"""The losses that a client may name, as the API defines them: summed over tokens, never normalised.

    cross_entropy         −w · log p                          target_tokens, weights
    importance_sampling   −r · A                              target_tokens, logprobs, advantages
    ppo                   −min(r A, clip(r, low, high) A)     the same
    cispo                 −sg(clip(r, low, high)) · A · log p the same
    dro                   −(A log p − β/2 (log r)²)           the same
    gspo                  as ppo, r = s · p/sg(p),            and sequence_ratio_mask
                          s = exp(mean of log r)
    stable_reinforce      −sg(w) · A · log p + κ/2 (log r)²   target_tokens, advantages, provenance
                          w = 1 for A ≥ 0, else min(r, 1)

with r = p/q, p the trainer's and q the sampler's probability of a target. Source: the API's public
documentation, tinker-docs.thinkingmachines.ai/tinker/losses, and the papers that it names: PPO
1707.06347, CISPO 2506.13585, DRO 2405.19107, GSPO-token 2507.18071 (equations 13 and 14). The API
publishes no formula of stable_reinforce, only its inputs and its setting kl_coeff (κ). This server
uses TOPR's weights (2503.14286, token by token) and the penalty of DRO.

Shape legend: N tokens of one pass, K targets of a token.
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
from rlsys.tinker_server.api_errors import ApiError


@parameters
class weighted_cross_entropy:
    """−w · log p, w the column `weights`; of any sign, as custom losses send it."""

    needs: ClassVar[tuple[str, ...]] = ("weights",)
    uses_advantages: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return -inputs.column("weights") * floored(inputs.trainer_logprobs), {}


@parameters
class importance_sampling:
    """−r · A."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        return -ratio(inputs.trainer_logprobs, inputs.sampler_logprobs) * inputs.advantages, {}


@parameters
class dro:
    """−(A log p − β/2 (log r)²)."""

    beta: float = 0.05

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        moved = log_ratio(inputs.trainer_logprobs, inputs.sampler_logprobs)
        gain = floored(inputs.trainer_logprobs) * inputs.advantages
        return -(gain - 0.5 * self.beta * moved**2), {}


@parameters
class stable_reinforce:
    """−sg(w) · A · log p + κ/2 (log r)², w = 1 where A ≥ 0, else min(r, 1).

    REINFORCE for on-policy tokens (r = 1, where the penalty has no gradient). No weight exceeds 1,
    so stale data cannot blow the gradient up; a discouraged token loses its gradient as its
    probability vanishes. q is the probability that the server recorded when it sampled the token;
    tokens that were not sampled (column `sampled`) have no penalty.
    """

    kl_coeff: float = 0.01
    needs: ClassVar[tuple[str, ...]] = ("sampled",)

    def __post_init__(self) -> None:
        check_coefficient(self.kl_coeff)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        advantages, logprobs = inputs.advantages, floored(inputs.trainer_logprobs)
        moved = log_ratio(inputs.trainer_logprobs, inputs.sampler_logprobs)
        tapered = bounded_exp(moved.detach()).clamp(max=1.0)
        weights = torch.where(advantages >= 0, torch.ones_like(tapered), tapered)
        penalty = 0.5 * self.kl_coeff * inputs.column("sampled") * moved**2
        return penalty - weights * advantages * logprobs, {}


@parameters
class gspo_token:
    """−min(s_t A, clip(s_t, low, high) A), s_t = sg(s) · p/sg(p), s = exp(mean of log r) over the
    tokens of a row whose `sequence_ratio_mask` is not 0.
    """

    low: float
    high: float
    needs: ClassVar[tuple[str, ...]] = ("sequence_ratio_mask",)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
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
class Kind:
    """A loss by name. `inputs`: tensors that each datum must have beside target_tokens, and the
    column of each; `config`: what may be set, with its default.
    """

    make: Callable[[Mapping[str, float]], LossFn]
    inputs: Mapping[str, str]
    config: Mapping[str, float]


STABLE_REINFORCE = "stable_reinforce"

_RL = {"logprobs": "sampler_logprobs", "advantages": "advantages"}


def _clipped(low: float, high: float) -> LossFn:
    return clipped_surrogate(1 - low, high - 1)


KINDS: Mapping[str, Kind] = {
    "cross_entropy": Kind(
        make=lambda config: weighted_cross_entropy(), inputs={"weights": "weights"}, config={}
    ),
    "importance_sampling": Kind(make=lambda config: importance_sampling(), inputs=_RL, config={}),
    "ppo": Kind(
        make=lambda config: _clipped(*_thresholds(config)),
        inputs=_RL,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "cispo": Kind(
        make=lambda config: cispo(config["clip_high_threshold"], config["clip_low_threshold"]),
        inputs=_RL,
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": Kind(make=lambda config: dro(config["beta"]), inputs=_RL, config={"beta": 0.05}),
    "gspo": Kind(
        make=lambda config: gspo_token(*_thresholds(config)),
        inputs={**_RL, "sequence_ratio_mask": "sequence_ratio_mask"},
        # The paper's clips, 3e-4 and 4e-4.
        config={"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
    ),
    # rlsys.tinker_server.provenance adds logprobs and sampled.
    STABLE_REINFORCE: Kind(
        make=lambda config: stable_reinforce(config["kl_coeff"]),
        inputs={**_RL, "sampled": "sampled"},
        config={"kl_coeff": 0.01},
    ),
}


def kind_of(name: str) -> Kind:
    """Raises Refused for a loss that is not offered."""
    if name not in KINDS:
        why = ""
        if name == "custom":
            why = " (a custom loss runs in the client, which needs nothing of the server)"
        raise ApiError(
            f"loss_fn={name!r} is not offered here{why}; use {', '.join(KINDS)}, or "
            "forward_backward_custom with a function of your own."
        )
    return KINDS[name]


def loss_of(name: str, config: Mapping[str, float | str]) -> LossFn:
    """Raises Refused for an unknown loss, and for settings that it does not have or that mean
    nothing.
    """
    kind = kind_of(name)
    if unknown := sorted(config.keys() - kind.config.keys()):
        known = ", ".join(kind.config) or "none"
        raise ApiError(f"loss_fn_config of {name} has {unknown[0]!r}; it may have {known}.")
    numbers: dict[str, float] = dict(kind.config)
    for setting, value in config.items():
        if isinstance(value, str) or not math.isfinite(value):
            raise ApiError(f"loss_fn_config: {setting}={value!r} is no number; give one.")
        numbers[setting] = value
    try:
        return kind.make(numbers)
    except ApiError:
        raise
    except ValueError as error:
        raise ApiError(f"loss_fn_config of {name}, {dict(config)}: {error}") from None


def _thresholds(config: Mapping[str, float]) -> tuple[float, float]:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if not 0 <= low < 1 < high:
        raise ApiError(
            f"clip_low_threshold={low:g}, clip_high_threshold={high:g} do not stand around 1, the "
            "ratio of policies that agree; use two such as 0.8 and 1.2."
        )
    return low, high
