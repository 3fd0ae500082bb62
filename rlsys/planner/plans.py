"""Inputs and results of predictions.

TrainingPlan   how a model is split and stepped while it trains
GenerationPlan how a replica is split while it generates
Workload       prompts, rollouts per prompt and lengths of a step
Estimate       seconds with an interval and a breakdown
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlsys.errors import require
from rlsys.planner.architecture import Architecture
from rlsys.planner.lengths import Lengths

Shard = Literal["none", "optimizer", "gradients", "parameters"]
Recompute = Literal["none", "attention", "selective", "full"]
AttentionKernel = Literal["fused", "fused_2", "unfused"]
PRECISIONS = ("bf16", "fp8", "fp4")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Layout and settings of a training step.

    Attributes:
        dp: Ranks that see different rows.
        tp: Tensor parallel ranks.
        cp: Context parallel ranks.
        pp: Pipeline stages.
        vp: Chunks of layers per stage (interleaving).
        ep: Ranks over which a layer's experts are split.
        etp: Tensor parallel ranks of one expert.
        shard: What data parallel ranks split: the optimizer (ZeRO-1), also gradients (ZeRO-2), also
            parameters (FSDP).
        shard_ranks: Ranks that split it. 0 means all dp * cp.
        row_tokens: Tokens of a row, or of a packed row.
        micro_batch: Rows of a micro-batch of one rank.
        micro_batches: Micro-batches of a step on each data parallel rank.
        recompute: Activations that the backward pass computes again.
        precision: Precision of the layers' products: bf16, fp8 or fp4.
        attention: Kernel of attention: the GPU's best fused one, FlashAttention 2 (which is slower
            on Hopper), or separate products with scores in memory.
        compiled: Whether small operations are fused, by a compiler or by hand.
        async_tp: Whether products overlap with tensor parallel communication.
        sequence_parallel: Whether tensor parallel ranks split the residual stream's tokens.
        balanced_context: Whether context parallel ranks get equal shares of the causal mask.
        fused_dispatch: Whether a token is sent once to each rank and node that it needs (DeepEP,
            HybridEP), instead of once to each of its experts.
        balanced_routing: Whether experts get equal shares of tokens, as benchmarks force them to.
        lora_rank: Rank of adapters. 0 trains all parameters.
        lora_targets: Names of the linear layers with adapters. None means all of them.
        moment_bytes: Bytes of both moments of a trained parameter.
        offload_optimizer: Whether the optimizer state is on the host.
        attended_tokens: Mean length of the documents of a packed row. 0 means row_tokens.
        profile: Name of the software profile.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1
    etp: int = 1
    shard: Shard = "parameters"
    shard_ranks: int = 0
    row_tokens: float = 4096
    micro_batch: float = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    precision: str = "bf16"
    attention: AttentionKernel = "fused"
    compiled: bool = True
    async_tp: bool = False
    sequence_parallel: bool = True
    balanced_context: bool = True
    balanced_routing: bool = False
    fused_dispatch: bool = True
    lora_rank: int = 0
    lora_targets: tuple[str, ...] | None = None
    moment_bytes: float = 8.0
    offload_optimizer: bool = False
    attended_tokens: float = 0.0
    profile: str = "rlsys"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "pp", "vp", "ep", "etp", "micro_batches"):
            require(
                getattr(self, name) >= 1,
                f"plan.{name}",
                getattr(self, name),
                rule="must be at least 1",
                fix="Use 1 to switch it off.",
            )
        for name in ("row_tokens", "micro_batch"):
            require(
                math.isfinite(getattr(self, name)) and getattr(self, name) > 0,
                f"plan.{name}",
                getattr(self, name),
                rule="must be positive and finite",
                fix="Give tokens of a row and rows of a micro-batch.",
            )
        require(
            self.precision in PRECISIONS,
            "plan.precision",
            self.precision,
            rule=f"must be one of {', '.join(PRECISIONS)}",
            fix="Use bf16.",
        )

    @property
    def num_gpus(self) -> int:
        """GPUs of the plan."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def step_tokens(self) -> float:
        """Tokens of a step on all ranks."""
        return self.dp * self.micro_batch * self.micro_batches * self.row_tokens

    def check(self, model: Architecture) -> None:
        """Raise if the model cannot be split this way.

        Raises:
            InvalidValue: Pipeline stages outnumber layers, or ranks of experts outnumber experts.
        """
        require(
            self.pp <= model.layers,
            "plan.pp",
            self.pp,
            rule=f"has more stages than {model.name} has layers ({model.layers})",
            fix=f"Use at most pp{model.layers}.",
        )
        require(
            self.ep <= max(model.experts, 1),
            "plan.ep",
            self.ep,
            rule=f"has more ranks than {model.name} has experts ({model.experts})",
            fix=f"Use at most ep{max(model.experts, 1)}.",
        )


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """Layout and settings of one replica that generates.

    Attributes:
        tp: Tensor parallel ranks.
        pp: Pipeline stages.
        ep: Ranks over which experts are split. 1 splits each expert over tp instead.
        attention_dp: Ranks that run attention on different rows (experts stay split).
        weights: Precision of weights: bf16, fp8, fp8_block, fp4 or w4.
        kv: Precision of the KV cache: bf16 or fp8.
        max_running: Rows that run at once.
        memory_fraction: Share of the GPU's memory that the engine uses.
        cache_gib: KV cache of one device in GiB. 0 means the rest of `memory_fraction`.
        keeps_windows: Whether layers with a window keep the keys and values of the window only.
        profile: Name of the software profile.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    max_running: int = 256
    memory_fraction: float = 0.9
    cache_gib: float = 0.0
    keeps_windows: bool = True
    profile: str = "vllm"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "attention_dp", "max_running"):
            require(
                getattr(self, name) >= 1,
                f"plan.{name}",
                getattr(self, name),
                rule="must be at least 1",
                fix="Use 1 to switch it off.",
            )
        require(
            0 < self.memory_fraction <= 1,
            "plan.memory_fraction",
            self.memory_fraction,
            rule="must be above 0 and at most 1",
            fix="Use 0.9.",
        )

    @property
    def num_gpus(self) -> int:
        """GPUs of a replica."""
        return self.tp * self.pp


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Rollouts of a step.

    Attributes:
        prompts: Prompts of a step.
        group_size: Rollouts of a prompt.
        prompt_tokens: Mean tokens of a prompt.
        completions: Lengths of completions, of all turns together.
        turns: Turns of an episode. 1 for completions.
        tool_s: Mean seconds of the tool between two turns.
    """

    prompts: int
    group_size: int
    prompt_tokens: float
    completions: Lengths
    turns: int = 1
    tool_s: float = 0.0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.tool_s) and self.tool_s >= 0,
            "tool_seconds",
            self.tool_s,
            rule="must be finite and at least 0",
            fix="Give the mean seconds of a tool, such as mean=2.",
        )
        for name in ("prompts", "group_size", "prompt_tokens", "turns"):
            require(
                math.isfinite(getattr(self, name)) and getattr(self, name) > 0,
                f"workload.{name}",
                getattr(self, name),
                rule="must be positive",
                fix="Give the numbers of one step.",
            )

    @property
    def rollouts(self) -> int:
        """Rollouts of a step."""
        return self.prompts * self.group_size

    @property
    def waiting_s(self) -> float:
        """Mean seconds in which an episode waits for its tools."""
        return (self.turns - 1) * self.tool_s

    def check(self, model: Architecture) -> None:
        """Raise if prompt and completion exceed the model's context.

        Raises:
            InvalidValue: They do.
        """
        require(
            self.prompt_tokens < model.max_context,
            "workload.prompt_tokens",
            self.prompt_tokens,
            rule=f"must be below the context of {model.name}, {model.max_context}",
            fix="Give the mean tokens of a prompt.",
        )
        longest = self.prompt_tokens + self.completions.maximum
        require(
            longest <= model.max_context,
            "workload.completion_tokens",
            self.completions.maximum,
            rule=f"prompt and completion exceed the context of {model.name}, {model.max_context}",
            fix=f"Use at most {model.max_context - int(self.prompt_tokens)} tokens.",
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted time.

    Attributes:
        seconds: The median.
        low: 10 % of outcomes are shorter.
        high: 10 % of outcomes are longer.
        breakdown: Seconds by part. They add up to `seconds`.
    """

    seconds: float
    low: float
    high: float
    breakdown: Mapping[str, float] = field(default_factory=dict)
