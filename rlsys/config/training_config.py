"""Configuration sections of models and of their training."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from rlsys.config.checks import (
    MAX_PROCESSES,
    MIN_CPUS,
    check_above,
    check_at_least,
    check_between,
    check_num_processes,
)
from rlsys.config.fields import Section, conform, expand_home
from rlsys.config.lora import Lora
from rlsys.config.parallel_layout import ParallelLayout, parse_layouts
from rlsys.errors import InvalidValue, require

Precision = Literal["float32", "bfloat16", "float16"]
Checkpointing = Literal["none", "selective", "full"]

MAX_LEARNING_RATE = 1.0


@dataclass(frozen=True, kw_only=True)
class AnyModelConfig(Section):
    """A model: its weights and its precision."""

    path: str = ""
    """Hugging Face hub name or directory of a causal language model with its tokenizer. A leading ~
    is the home directory."""
    dtype: Precision = "float32"
    """Precision of the forward and backward pass in trainer and sampler; the trainer's weights are
    float32. bfloat16 has the range of float32, float16 eight times the precision of bfloat16."""

    def __post_init__(self) -> None:
        conform(self, "model")
        expand_home(self, "path")


@dataclass(frozen=True, kw_only=True)
class FrozenModelConfig(AnyModelConfig):
    """A model that is not trained."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(AnyModelConfig):
    """A model that is trained: the policy, a critic or a reward model."""

    lora: str = ""
    """Low-rank adapters to train instead of all weights: r16, r16a32 (with alpha), or
    r16a32:q_proj,v_proj (in these layers; default all except the head). Empty: all weights."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations that the backward pass recomputes. selective: all except outputs of matrix
    products and attention, about half the memory; full: all except layer inputs, least memory,
    about 33 % more time; auto: none on CPUs, selective on GPUs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            _ = self.adapters
        except InvalidValue as error:
            raise error.within("model.") from None

    @cached_property
    def adapters(self) -> Lora | None:
        """The adapters to train, or None if all weights are trained."""
        return Lora.parse(self.lora) if self.lora else None

    def checkpointing(self, *, on_gpu: bool) -> Checkpointing:
        """Return the kind of gradient checkpointing on a device."""
        if self.gradient_checkpointing == "auto":
            return "selective" if on_gpu else "none"
        return self.gradient_checkpointing


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Section):
    """The training ranks and the optimizer."""

    layout: str = "dp1"
    """Parallel layout of the ranks, one process each: dp4 (FSDP2), tp2, dp2tp2, pp2, pp2v3, cp2,
    ep2, dp2x4 (docs/training.md). A list such as dp2x2,dp2,dp1 adds smaller layouts, with which
    training continues while nodes are lost (docs/cluster.md)."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up, until num_steps. linear and cosine fall all the time to
    final_lr_frac. wsd (warmup-stable-decay) is constant, then falls linearly in the last steps."""
    final_lr_frac: float = 0.1
    """Last learning rate as a fraction of the peak."""
    decay_frac: float = 0.2
    """Last part of num_steps in which the wsd schedule falls, as a fraction."""
    adam_betas: tuple[float, ...] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, applied to matrices only."""
    optimizer_state: Literal["float32", "bfloat16", "cpu_float32", "cpu_bfloat16"] = "float32"
    """Precision of AdamW's moments, 8 or 4 bytes per trained parameter; bfloat16 is rounded
    stochastically. cpu_ keeps them in host memory and copies them to the GPU in parts during the
    update, which takes longer; it changes nothing on CPUs."""
    max_grad_norm: float = 1.0
    """Global norm to which larger gradients are scaled down."""
    num_minibatches: int = 1
    """Parts of a step's rollouts, each with its own update of the weights, as in PPO. All updates
    of a step use the same learning rate."""
    num_epochs: int = 1
    """Passes over the rollouts of a step, each with num_minibatches updates."""
    micro_batch_tokens: int = 16384
    """Maximum number of tokens (prompt and completion) in a micro-batch of one rank. A longer
    rollout gets a micro-batch of its own."""
    snapshot_every: int = 1
    """Optimizer steps between snapshots in memory, from which dead ranks restart in seconds. Host
    memory holds two of them (three unless checkpoint_every is 0), 12 bytes per trained parameter
    each, 8 with bfloat16 moments. 0: only one, for writing checkpoints."""
    num_cpus: float = 1
    """CPU cores that Ray reserves for one rank, and its number of compute threads."""
    num_gpus: float = 0
    """GPUs that Ray reserves for one rank: 0 (CPU, gloo), 1 (NCCL), or, for a single rank, a
    fraction such as 0.5 of a GPU shared with replicas."""

    def __post_init__(self) -> None:
        conform(self, "trainer")
        require(
            self.parallel.num_ranks <= MAX_PROCESSES,
            "trainer.layout",
            self.layout,
            rule=f"has {self.parallel.num_ranks} ranks",
            fix=f"Use at most {MAX_PROCESSES}.",
        )
        require(
            0 < self.learning_rate <= MAX_LEARNING_RATE,
            "trainer.learning_rate",
            self.learning_rate,
            rule=f"must be above 0 and at most {MAX_LEARNING_RATE:g}, since AdamW moves each "
            "weight by about that much",
            fix="Use a rate such as 1e-6.",
        )
        check_above("trainer.max_grad_norm", self.max_grad_norm, 0, fix="Use a norm such as 1.0.")
        check_at_least("trainer.num_minibatches", self.num_minibatches, 1)
        check_at_least("trainer.num_epochs", self.num_epochs, 1)
        check_at_least("trainer.warmup_steps", self.warmup_steps, 0, fix="Use 0 for no warm-up.")
        fix = "Use a fraction of the peak learning rate."
        check_between("trainer.final_lr_frac", self.final_lr_frac, 0, 1, fix=fix)
        require(
            0 < self.decay_frac <= 1,
            "trainer.decay_frac",
            self.decay_frac,
            rule="must be above 0 and at most 1",
            fix='Use a fraction of num_steps such as 0.2, or trainer.schedule="constant".',
        )
        require(
            len(self.adam_betas) == 2 and all(0 <= beta < 1 for beta in self.adam_betas),
            "trainer.adam_betas",
            self.adam_betas,
            rule="must be two numbers of at least 0 and below 1",
            fix="Use two such as 0.9,0.95.",
        )
        check_at_least("trainer.weight_decay", self.weight_decay, 0, fix="Use 0 for no decay.")
        check_at_least("trainer.num_cpus", self.num_cpus, MIN_CPUS)
        check_at_least("trainer.micro_batch_tokens", self.micro_batch_tokens, 1)
        check_at_least("trainer.snapshot_every", self.snapshot_every, 0, fix="Use 0 for none.")
        require(
            len(self.layouts) == 1 or self.snapshot_every > 0,
            "trainer.snapshot_every",
            self.snapshot_every,
            rule=f"trainer.layout={self.layout!r} changes its layout with snapshots in memory",
            fix="Use trainer.snapshot_every=1, or only one layout.",
        )
        require(
            self.num_gpus == 0 or MIN_CPUS <= self.num_gpus <= 1,
            "trainer.num_gpus",
            self.num_gpus,
            rule="a rank uses exactly one device, and trainer.layout sets their number",
            fix="Use 0, a fraction of one GPU such as 0.5, or 1.",
        )
        require(
            self.num_gpus in (0, 1) or self.parallel.num_ranks == 1,
            "trainer.num_gpus",
            self.num_gpus,
            rule=f"trainer.layout={self.layout!r} has several ranks, and NCCL accepts only one "
            "rank per GPU",
            fix="Use trainer.num_gpus=1, or trainer.layout=dp1.",
        )

    @cached_property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        """The layouts that `layout` describes, the preferred one first.

        The construction of the section parses them. No other code parses `layout`.
        """
        try:
            return parse_layouts(self.layout)
        except InvalidValue as error:
            raise InvalidValue(
                "trainer.layout", self.layout, rule=error.rule, fix=error.fix
            ) from None

    @property
    def parallel(self) -> ParallelLayout:
        """The preferred layout of the ranks."""
        return self.layouts[0]

    def with_layout(self, layout: ParallelLayout) -> TrainerConfig:
        """Return a copy of this section with exactly one layout."""
        return replace(self, layout=str(layout))

    @property
    def moments_dtype(self) -> str:
        """Precision of AdamW's moments."""
        return self.optimizer_state.removeprefix("cpu_")

    @property
    def offloads_moments(self) -> bool:
        """True if AdamW's moments are in host memory between updates."""
        return self.optimizer_state.startswith("cpu_")

    @property
    def updates_per_step(self) -> int:
        """Number of weight updates between two versions of the policy."""
        return self.num_minibatches * self.num_epochs


@dataclass(frozen=True, kw_only=True)
class RoleConfig(Section):
    """A model besides the policy that is not trained, such as a reference or a reward model."""

    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model. An empty path takes the initial weights of the policy."""
    num_workers: int = 1
    """Processes, each with the whole model, among which rollouts are distributed. A model that
    plays a seat of an environment has as many as there are replicas."""
    num_cpus: float = 1
    """CPU cores that Ray reserves for one process, and its number of compute threads."""
    num_gpus: float = 0
    """GPUs that Ray reserves for one process. With fractions several models share a GPU: they run
    one at a time, and the others are in host memory."""
    pass_tokens: int = 16384
    """Maximum number of tokens in a forward pass; a longer rollout gets a pass of its own. For a
    model that generates: maximum number of tokens in its KV cache."""

    def __post_init__(self) -> None:
        conform(self)
        check_num_processes("num_workers", self.num_workers)
        check_at_least("num_cpus", self.num_cpus, MIN_CPUS)
        check_at_least("num_gpus", self.num_gpus, 0)
        check_at_least("pass_tokens", self.pass_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(RoleConfig):
    """A model besides the policy that generates text: a judge or a player of a seat."""

    engine: Literal["torch", "vllm"] = "torch"
    """Generation engine. torch: embedded, starts at once. vllm: for production."""


@dataclass(frozen=True, kw_only=True)
class TrainedRoleConfig(Section):
    """A model besides the policy that is trained too, such as a critic."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model. An empty path takes the initial weights of the policy."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The ranks and the optimizer of this model."""

    def __post_init__(self) -> None:
        conform(self)
        check_adapters(self.model, self.trainer)


def check_adapters(model: ModelConfig, trainer: TrainerConfig) -> None:
    """Raise an InvalidValue if the model has adapters and a layout shards its matrices."""
    for layout in trainer.layouts:
        require(
            not model.lora or layout.size("tp", "pp", "cp", "ep") == 1,
            "model.lora",
            model.lora,
            rule=f"adapters need whole layers and rows on each rank, unlike trainer.layout="
            f"{str(layout)!r}",
            fix="Use a layout with dp alone, or train all weights.",
        )
