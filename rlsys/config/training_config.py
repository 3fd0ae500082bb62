"""The sections of models, of how they are trained, and of models beside the policy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from rlsys.config.checks import MAX_PROCESSES, MIN_CPUS, require
from rlsys.config.fields import Section, conform
from rlsys.config.lora import Lora
from rlsys.config.parallel_layout import ParallelLayout, split_layouts

Precision = Literal["float32", "bfloat16", "float16"]
Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class AnyModelConfig(Section):
    """A model: whose weights, in which precision."""

    path: str = ""
    """Hugging Face hub name or directory of a causal language model with its tokenizer."""
    dtype: Precision = "float32"
    """Precision of forward and backward pass in trainer and sampler; the trainer's own weights are
    float32. bfloat16 has float32's range, float16 eight times the digits of bfloat16."""

    def __post_init__(self) -> None:
        conform(self, "model")


@dataclass(frozen=True, kw_only=True)
class FrozenModelConfig(AnyModelConfig):
    """A model that is not trained."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(AnyModelConfig):
    """A model that is trained: the policy, a critic or a reward model."""

    lora: str = ""
    """Low-rank adapters that are trained in place of all weights: r16, r16a32 (with alpha), or
    r16a32:q_proj,v_proj (of these layers; else all but the head's). Empty: all weights."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations that the backward pass computes again. selective: all of a layer but what matrix
    products and attention gave, about half of the memory. full: all but a layer's input, least
    memory, about a third more time. auto: none on CPUs, selective on GPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            _ = self.adapters
        except ValueError as error:
            raise ValueError(f"model.lora: {error}") from None

    @property
    def adapters(self) -> Lora | None:
        """What is trained of the model; None: all of it."""
        return Lora.parse(self.lora) if self.lora else None

    def checkpointing(self, *, on_gpu: bool) -> Checkpointing:
        if self.gradient_checkpointing == "auto":
            return "selective" if on_gpu else "none"
        return self.gradient_checkpointing


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Section):
    """The training ranks and the optimizer."""

    layout: str = "dp1"
    """Ranks, one process each: dp4 (FSDP2 over rows), tp2, dp2tp2, pp2, pp2v3, cp2, ep2, dp2x4 and
    so on (docs/training.md). A list, dp2x2,dp2,dp1, names behind the preferred one those of fewer
    ranks, to go on with while nodes are lost (docs/cluster.md)."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, over run.num_steps; linear and cosine end at final_lr_frac."""
    final_lr_frac: float = 0.1
    """Last learning rate as a share of the peak."""
    adam_betas: tuple[float, ...] = (0.9, 0.95)
    """Decay of the first and of the second moment."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, on matrices only."""
    optimizer_state: Literal["float32", "bfloat16", "cpu_float32", "cpu_bfloat16"] = "float32"
    """Precision of AdamW's moments, 8 or 4 bytes a trained parameter; bfloat16 is rounded
    stochastically. cpu_: in the host's memory, brought to the GPU piece by piece in the update,
    which takes longer; on CPUs they are there already."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    num_minibatches: int = 1
    """Parts into which a step's rollouts are split, each with an update of the weights of its own,
    as PPO does it; all updates of a step share its learning rate."""
    num_epochs: int = 1
    """Passes over a step's rollouts, each with all its updates."""
    micro_batch_tokens: int = 16384
    """Tokens (prompt and completion) of one rank's forward and backward pass, at most; a single
    longer rollout still gets a pass of its own."""
    snapshot_every: int = 1
    """Optimizer steps between snapshots in memory, from which dead ranks start again in seconds;
    two of them lie in the host's memory, 12 bytes a trained parameter each (8 with bfloat16
    moments), three unless checkpoint_every is 0. 0: one, from which checkpoints are written."""
    num_cpus: float = 1
    """CPU cores that Ray reserves for one rank; also its compute threads."""
    num_gpus: float = 0
    """GPUs that Ray reserves for one rank: 0 (gloo on the CPU), 1 (NCCL), or, for a single rank, a
    share such as 0.5 of a GPU that replicas use too."""

    def __post_init__(self) -> None:
        conform(self, "trainer")
        try:
            num_layouts = len(split_layouts(self.layout))
            num_ranks = self.parallel.num_ranks
        except ValueError as error:
            raise ValueError(f"trainer.layout: {error}") from None
        require(
            num_ranks <= MAX_PROCESSES,
            f"trainer.layout={self.layout!r} has {num_ranks} ranks; use {MAX_PROCESSES} at most.",
        )
        require(
            0 < self.learning_rate <= 1,
            f"trainer.learning_rate={self.learning_rate} lies outside (0, 1]: AdamW moves every "
            "weight by about that much a step; use a rate such as 1e-6.",
        )
        require(
            self.max_grad_norm > 0,
            f"trainer.max_grad_norm={self.max_grad_norm} would zero or flip every gradient; "
            "use a positive norm.",
        )
        for name in ("num_minibatches", "num_epochs"):
            number = getattr(self, name)
            require(number >= 1, f"trainer.{name}={number} would train on nothing; use at least 1.")
        require(
            self.warmup_steps >= 0,
            f"trainer.warmup_steps={self.warmup_steps} is negative; use 0 for no warm-up.",
        )
        require(
            0 <= self.final_lr_frac <= 1,
            f"trainer.final_lr_frac={self.final_lr_frac} lies outside [0, 1]; use a share of the "
            "peak learning rate.",
        )
        require(
            len(self.adam_betas) == 2 and all(0 <= beta < 1 for beta in self.adam_betas),
            f"trainer.adam_betas={self.adam_betas} are not two numbers in [0, 1), without which an "
            "average never settles; use two such as 0.9,0.95.",
        )
        require(
            self.weight_decay >= 0,
            f"trainer.weight_decay={self.weight_decay} would grow the weights; use 0 for none.",
        )
        require(
            self.num_cpus >= MIN_CPUS,
            f"trainer.num_cpus={self.num_cpus} leaves a rank no thread; use at least {MIN_CPUS}.",
        )
        require(
            self.micro_batch_tokens >= 1,
            f"trainer.micro_batch_tokens={self.micro_batch_tokens} admits no rollout; use >= 1.",
        )
        require(
            self.snapshot_every >= 0,
            f"trainer.snapshot_every={self.snapshot_every} is negative; use 0 for none.",
        )
        require(
            num_layouts == 1 or self.snapshot_every > 0,
            f"trainer.snapshot_every=0 with trainer.layout={self.layout!r}: a trainer that changes "
            "its layout takes its state from snapshots in memory; use snapshot_every=1, or one "
            "layout.",
        )
        require(
            self.num_gpus == 0 or MIN_CPUS <= self.num_gpus <= 1,
            f"trainer.num_gpus={self.num_gpus}: a rank drives exactly one device. Use 0, a share "
            "of one GPU such as 0.5, or 1; trainer.layout sets the number of devices.",
        )
        most_ranks = max(ParallelLayout.parse(one).num_ranks for one in split_layouts(self.layout))
        require(
            self.num_gpus in (0, 1) or most_ranks == 1,
            f"trainer.num_gpus={self.num_gpus} with trainer.layout={self.layout!r}: NCCL accepts "
            "only one rank per GPU. Use num_gpus=1, or layout=dp1.",
        )

    @property
    def parallel(self) -> ParallelLayout:
        """How the ranks are laid out, of several ways in the preferred one."""
        return ParallelLayout.parse(split_layouts(self.layout)[0])

    @property
    def in_each_layout(self) -> tuple[TrainerConfig, ...]:
        """This trainer with each of its layouts alone, the preferred one first."""
        return tuple(replace(self, layout=name) for name in split_layouts(self.layout))

    @property
    def moments_dtype(self) -> str:
        return self.optimizer_state.removeprefix("cpu_")

    @property
    def offloads_moments(self) -> bool:
        """Whether they are in the host's memory while they are not used."""
        return self.optimizer_state.startswith("cpu_")

    @property
    def updates_per_step(self) -> int:
        """Of the weights, between two versions of the policy."""
        return self.num_minibatches * self.num_epochs


@dataclass(frozen=True, kw_only=True)
class RoleConfig(Section):
    """A model beside the policy that is not trained: a reference, a teacher, a reward model, a
    judge, or one that plays a seat of an environment.
    """

    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """Whose weights; an empty path takes the policy's, as they are at the beginning."""
    num_workers: int = 1
    """Processes, each with the whole model, that share the rollouts; of one that plays a seat, as
    many as there are replicas."""
    num_cpus: float = 1
    """CPU cores that Ray reserves for one of them; also its compute threads."""
    num_gpus: float = 0
    """GPUs that Ray reserves for one of them. Shares of one let several roles use it: they work
    there one at a time, and are in host memory while they do not."""
    pass_tokens: int = 16384
    """Tokens of one forward pass, at most; a single longer rollout still gets a pass of its own.
    Of one that writes: of all that it reads and writes whose keys and values it holds at once."""

    def __post_init__(self) -> None:
        conform(self, "role")
        require(
            1 <= self.num_workers <= MAX_PROCESSES,
            f"num_workers={self.num_workers} of a role is no number of processes; use 1 to "
            f"{MAX_PROCESSES}.",
        )
        require(
            self.num_cpus >= MIN_CPUS and self.num_gpus >= 0,
            f"num_cpus={self.num_cpus}, num_gpus={self.num_gpus} of a role: use at least "
            f"{MIN_CPUS} cores and no fewer than 0 GPUs.",
        )
        require(
            self.pass_tokens >= 1,
            f"pass_tokens={self.pass_tokens} of a role admits no rollout; use at least 1.",
        )


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(RoleConfig):
    """A model beside the policy that writes: of rollouts, to score them (flow.judge), or in a seat
    of an environment (flow.play).
    """

    engine: Literal["torch", "vllm"] = "torch"
    """What it generates with. torch: embedded, starts at once. vllm: for real work."""


@dataclass(frozen=True, kw_only=True)
class TrainedRoleConfig(Section):
    """A model beside the policy that is trained too, such as a critic."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """What it begins with; an empty path takes the policy's weights."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Its own ranks and optimizer."""

    def __post_init__(self) -> None:
        conform(self, "role")
        check_adapters(self.model, self.trainer)


def check_adapters(model: ModelConfig, trainer: TrainerConfig) -> None:
    """Raise ValueError for adapters beside weights that a layout cuts."""
    for one in trainer.in_each_layout:
        require(
            not model.lora or one.parallel.size("tp", "pp", "cp", "ep") == 1,
            f"model.lora={model.lora!r} and trainer.layout={one.layout!r}: adapters stand beside "
            "whole matrices, on ranks that have all layers and rows; use a layout of dp alone, or "
            "train all weights.",
        )
