"""Software profiles: the speed of a stack, which no formula knows, with priors and intervals.

    data/constants.json (scripts/plan/fit.py) ─► Constants: shared by all plans
                                              └► SoftwareProfile: factor and spread of one stack
    measured rows of a cluster ─► calibrate   ─► SoftwareProfile with a smaller spread

Stacks differ by 1.1 to 2 x in time for the same plan. A profile is one factor on predicted time, a
spread (standard deviation of the logarithm) that gives the interval, and a few switches. Without a
profile of its own, a stack uses `generic`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from rlsys.common.safe_json import parse_json
from rlsys.errors import InvalidValue, require
from rlsys.planner.model_config import DATA

Z80: Final = 1.2816  # a normal variable is within this many standard deviations in 80 % of cases
PRIOR_SPREAD: Final = 0.25  # of an unknown stack
NOISE: Final = 0.06  # between two runs of the same configuration
CONFLICT: Final = 4.0  # rows of one stack that differ by this factor contradict each other


@dataclass(frozen=True)
class Prior:
    """A constant before any measurement: its value, and the standard deviation of its logarithm."""

    value: float
    spread: float


# Efficiencies are of kernels in training relative to kernels on an idle GPU (power limits, tails,
# other streams). Shares say which part of a communication is not hidden.
PRIORS: Final[dict[str, Prior]] = {
    # training
    "gemm_ampere": Prior(0.90, 0.10),
    "gemm_hopper": Prior(0.85, 0.10),
    "gemm_blackwell": Prior(0.82, 0.10),
    "gemm_blackwell_ultra": Prior(0.89, 0.05),
    "gemm_tail": Prior(100.0, 0.6),
    "attention_forward": Prior(0.85, 0.15),
    "attention_backward": Prior(2.8, 0.1),
    "attention_fa2": Prior(1.6, 0.15),
    "unfused_scores": Prior(6.0, 0.3),
    "odd_width": Prior(1.4, 0.15),
    "fp8_products": Prior(1.25, 0.15),
    "fp4_products": Prior(1.5, 0.3),
    "memory_traffic": Prior(1.0, 0.25),
    "memory_backward": Prior(1.6, 0.2),
    "eager_traffic": Prior(2.0, 0.3),
    "bandwidth": Prior(0.75, 0.1),
    "tp_exposed": Prior(0.85, 0.2),
    "tp_exposed_async": Prior(0.45, 0.3),
    "cp_exposed": Prior(0.15, 0.5),
    "ep_exposed": Prior(0.8, 0.3),
    "ep_exposed_network": Prior(0.5, 0.12),
    "fsdp_exposed": Prior(0.14, 0.4),
    "dp_exposed": Prior(0.5, 0.3),
    "pipeline_exposed": Prior(0.5, 0.5),
    "stage_imbalance": Prior(0.6, 0.4),
    "layer_host": Prior(0.6e-3, 0.4),
    "moe_layer_host": Prior(8e-3, 0.2),
    "imbalance": Prior(1.2, 0.1),
    "large_expert": Prior(64e6, 0.7),
    "linear_scan": Prior(4.0, 0.7),
    "step_host": Prior(19e-3, 0.5),
    "selective": Prior(0.45, 0.2),
    # memory
    "context_gb": Prior(1.6, 0.3),
    "logit_bytes": Prior(10.0, 0.3),
    "activation_scale": Prior(1.0, 0.15),
    "fragmentation": Prior(1.04, 0.03),
    # decoding
    "decode_gemm": Prior(0.95, 0.1),
    "decode_attention": Prior(0.9, 0.15),
    "decode_experts": Prior(0.95, 0.15),
    "decode_layer": Prior(8e-6, 0.3),
    "decode_all_reduce": Prior(1.1, 0.2),
    "decode_norm": Prior(3e-6, 0.7),
    "decode_routing": Prior(5e-6, 0.7),
    "decode_h20": Prior(1.1, 0.15),  # 78 multiprocessors do not use up the bandwidth
    "decode_wait": Prior(2e-6, 0.7),
    "decode_imbalance": Prior(1.1, 0.15),
    "prefill_scale": Prior(1.1, 0.2),
    "prefill_mixed": Prior(0.9, 0.2),
    # RL step
    "rl_fixed": Prior(8.0, 0.4),
    "rl_training": Prior(1.11, 0.15),
    "rl_generation": Prior(1.0, 0.15),
    "rl_overlap": Prior(1.05, 0.05),
    "sync_gb_s": Prior(15.0, 0.5),
}


@dataclass(frozen=True, kw_only=True)
class SoftwareProfile:
    """Speed of a software stack relative to the formulas.

    Attributes:
        name: Name of the profile.
        title: The stack in words.
        factor: Measured over predicted time of dense models.
        moe_factor: The same for models with small experts.
        large_experts: Factor of models with large experts, relative to `moe_factor`.
        spread: Standard deviation of the logarithm of that ratio, between tables.
        moe_spread: The same for models with experts.
        rows: Measured rows behind the factor.
        host: Time of launching a layer in training, relative to kernels launched one by one. CUDA
            graphs make it smaller.
        mixing: Share of a prompt's prefill that delays the rows which decode, relative to the
            constant `prefill_mixed`.
        step_host: Seconds of the host per decoding step.
        row_host: Seconds of the host per decoding step and running row.
    """

    name: str
    title: str = ""
    factor: float = 1.0
    moe_factor: float = 1.0
    large_experts: float = 1.0
    spread: float = PRIOR_SPREAD
    moe_spread: float = PRIOR_SPREAD
    rows: int = 0
    host: float = 1.0
    mixing: float = 1.0
    step_host: float = 0.6e-3
    row_host: float = 4e-6

    def __post_init__(self) -> None:
        for name in ("factor", "moe_factor", "large_experts", "spread", "moe_spread"):
            value = getattr(self, name)
            require(
                math.isfinite(value) and value > 0,
                f"profile.{name}",
                value,
                rule="must be positive and finite",
                fix="Calibrate again.",
            )

    def of(self, *, moe: bool) -> float:
        """Return the factor of dense models or of models with experts."""
        return self.moe_factor if moe else self.factor

    def spread_of(self, *, moe: bool) -> float:
        """Return the spread of dense models or of models with experts."""
        return self.moe_spread if moe else self.spread


@dataclass(frozen=True, kw_only=True, eq=False)
class Constants:
    """Constants of all formulas, and the profiles. Caches compare them by identity.

    Attributes:
        values: Constants by name of `PRIORS`.
        profiles: Software profiles by name.
        spreads: Standard deviation of log(measured / predicted) by kind of prediction.
        rest_s: Seconds of a step per group that no other constant explains.
        reward_s: Seconds of a process per reward of a rollout.
        controller_s: Seconds of the controller's process per group.
        other_s: CPU seconds of actors beyond their work, per group.
    """

    values: Mapping[str, float]
    profiles: Mapping[str, SoftwareProfile]
    spreads: Mapping[str, float] = field(default_factory=dict)
    rest_s: float = 0.0
    reward_s: float = 0.0
    controller_s: float = 0.0
    other_s: float = 0.0

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def profile(self, name: str) -> SoftwareProfile:
        """Return a profile, or the generic one under this name if the stack is unknown."""
        return self.profiles.get(name) or replace(self.profiles["generic"], name=name)

    def with_profile(self, profile: SoftwareProfile) -> Constants:
        """Return these constants with a profile added or replaced."""
        return replace(self, profiles=MappingProxyType({**self.profiles, profile.name: profile}))

    def with_values(self, **values: float) -> Constants:
        """Return these constants with some values replaced."""
        return replace(self, values=MappingProxyType({**self.values, **values}))


# Stacks of the published measurements. Factors are fitted, switches are facts of the stacks.
_SERVING: Final = {"step_host": 0.6e-3, "row_host": 4e-6}
_IN_A_TRAINER: Final = {"step_host": 5e-3, "row_host": 15e-6}
PROFILES: Final[dict[str, dict[str, Any]]] = {
    "generic": {"title": "unknown stack", "spread": 0.3},
    "rlsys": {"title": "this project", "spread": 0.25, **_IN_A_TRAINER},
    "megatron-2024": {"title": "Megatron-Core and Transformer Engine of 2024 (NeMo 24.x)"},
    "megatron-2025a": {"title": "Megatron-Core and Transformer Engine, NeMo 25.01 to 25.06"},
    "megatron-2025b": {"title": "Megatron-Core and Transformer Engine, NeMo 25.07 to 25.12"},
    "megatron-2026a": {
        "title": "Megatron-Core and Transformer Engine, NeMo 26.01 to 26.05",
        "host": 0.6,
    },
    "megatron-2026b": {
        "title": "Megatron-Core and Transformer Engine, NeMo 26.06 and later",
        "host": 0.6,
    },
    "megatron-unfused": {"title": "Megatron-LM before fused attention"},
    "megatron-deepspeed": {"title": "Megatron-DeepSpeed before fused attention"},
    "fsdp-compiled": {"title": "torchtitan: FSDP2 with torch.compile"},
    "fsdp": {"title": "FSDP2 without compilation (prime-rl, nanotron)"},
    "automodel": {"title": "NeMo Automodel: FSDP2 with Transformer Engine"},
    "llm-foundry": {"title": "llm-foundry: FSDP1, PyTorch 1.13 to 2.0"},
    "internevo": {"title": "InternEvo on RoCE"},
    "vllm": {"title": "vLLM in a serving benchmark", **_SERVING},
    "sglang": {"title": "SGLang in a serving benchmark", **_SERVING},
    "trtllm": {"title": "TensorRT-LLM in a serving benchmark", **_SERVING},
    "vllm-rl": {"title": "vLLM in an RL step", **_IN_A_TRAINER},
    "torch-rl": {"title": "this project's torch engine", **_IN_A_TRAINER},
    "fastertransformer": {"title": "FasterTransformer, static batches", **_SERVING},
    "engine-2023": {"title": "engines of 2023", **_SERVING},
    "transformers": {"title": "generate() of transformers", "step_host": 15e-3, "row_host": 15e-6},
}


def prior_constants() -> Constants:
    """Return the constants before any fit."""
    profiles = {name: SoftwareProfile(name=name, **facts) for name, facts in PROFILES.items()}
    return Constants(
        values=MappingProxyType({name: prior.value for name, prior in PRIORS.items()}),
        profiles=MappingProxyType(profiles),
    )


def constants_from(text: str) -> Constants:
    """Return constants that `constants_text` wrote."""
    stored = parse_json(text)
    base = prior_constants()
    profiles = {
        name: replace(base.profile(name), **changes) for name, changes in stored["profiles"].items()
    }
    return Constants(
        values=MappingProxyType({**base.values, **stored["values"]}),
        profiles=MappingProxyType({**base.profiles, **profiles}),
        spreads=MappingProxyType(stored["spreads"]),
    )


@lru_cache(maxsize=1)
def fitted_constants() -> Constants:
    """Return the constants of data/constants.json."""
    return constants_from((DATA / "constants.json").read_text())


def calibrate(
    profile: SoftwareProfile, ratios: Sequence[float], *, moe: bool = False
) -> SoftwareProfile:
    """Return the profile after rows of the user's own cluster.

    The logarithm of the factor has a normal prior (the profile's factor and spread) and normal
    noise between rows, so the result is between the profile and the median of the rows, and
    moves to the rows as they become more.

    Args:
        profile: The profile with which the rows were predicted.
        ratios: Measured over predicted time of each row, predicted with this profile.
        moe: Whether the rows are of models with experts.

    Raises:
        InvalidValue: There is no row, a ratio is not positive and finite, or rows contradict each
            other by more than `CONFLICT`.
    """
    for ratio in ratios:
        if not (math.isfinite(ratio) and ratio > 0):
            raise InvalidValue(
                "calibration.seconds",
                ratio,
                rule="must be positive and finite",
                fix="Leave out rows without a measurement.",
            )
    require(
        bool(ratios),
        "calibration",
        rule="has no rows",
        fix="Give at least one measured step.",
    )
    require(
        max(ratios) <= CONFLICT * min(ratios),
        "calibration",
        [round(ratio, 2) for ratio in ratios],
        rule=f"has rows whose measured and predicted times differ by more than {CONFLICT:g} x "
        "from each other",
        fix="Check the units and settings of the rows.",
    )
    logs = sorted(math.log(ratio) for ratio in ratios)
    middle = len(logs) // 2
    median = logs[middle] if len(logs) % 2 else (logs[middle - 1] + logs[middle]) / 2
    prior = profile.spread_of(moe=moe)
    within = max(NOISE, 0.5 * prior)
    weight = prior**2 / (prior**2 + within**2 / len(logs))
    factor = profile.of(moe=moe) * math.exp(weight * median)
    spread = min(prior, math.sqrt((1 - weight) * prior**2 + within**2))
    rows = profile.rows + len(logs)
    if moe:
        return replace(profile, moe_factor=factor, moe_spread=spread, rows=rows)
    return replace(profile, factor=factor, spread=spread, rows=rows)


def interval(seconds: float, spread: float) -> tuple[float, float]:
    """Return the 80 % interval around a median, from the spread of its logarithm."""
    factor = math.exp(Z80 * spread)
    return seconds / factor, seconds * factor
