"""The configuration of a run, with its sections `asynchrony`, `cluster` and `observe`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from rlsys.config.checks import (
    MAX_SECONDS,
    check_at_least,
    check_time_limit,
    check_vllm_temperature,
)
from rlsys.config.data_config import DataConfig, SamplingConfig
from rlsys.config.fields import Section, conform, expand_home
from rlsys.config.rollout_config import RolloutConfig, check_quantized, check_sent_adapters
from rlsys.config.scoring_config import HeldOutConfig, RewardConfig
from rlsys.config.step_range import parse_steps
from rlsys.config.stop_condition import StopCondition
from rlsys.config.training_config import ModelConfig, TrainerConfig, check_adapters
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class AsyncConfig(Section):
    """Overlap of generation and training."""

    max_staleness: int = 1
    """Maximum age of a trained token, in weight updates; a step makes trainer.num_minibatches x
    trainer.num_epochs of them. 0 is on-policy training."""
    stream: bool = True
    """Train on micro-batches as their groups complete. Off: wait for the whole batch."""
    order: Literal["issued", "complete"] = "issued"
    """Order in which groups are trained. issued: no group is dropped for its length, and on-policy
    runs are reproducible. complete: first completed first; groups that exceed the bound are
    cancelled and replaced."""
    over_issue: int = 0
    """Groups in flight beyond what max_staleness requires, so that a step does not wait for the
    longest ones; needs order=complete."""
    weight_update: Literal["in_flight", "delayed"] = "in_flight"
    """in_flight: all replicas load new weights at once, during generation, and keep their KV cache.
    delayed: one replica after the other, each when its completions have ended."""

    def __post_init__(self) -> None:
        conform(self, "asynchrony")
        check_at_least(
            "asynchrony.max_staleness", self.max_staleness, 0, fix="Use 0 for on-policy training."
        )
        check_at_least("asynchrony.over_issue", self.over_issue, 0, fix="Use 0 for none.")
        require(
            self.over_issue == 0 or self.order == "complete",
            "asynchrony.over_issue",
            self.over_issue,
            rule="groups are only cancelled in the order of completion",
            fix='Use asynchrony.order="complete", or asynchrony.over_issue=0.',
        )


MIN_STORE_GIB = 0.001


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Section):
    """The Ray cluster."""

    address: str | None = None
    """Ray address to join; "auto" joins the cluster of this machine. Unset: RAY_ADDRESS, or a new
    cluster on this machine."""
    store_gib: float = 0.5
    """Maximum shared memory for rollouts on each node, in GiB; the cluster has the sum. No more is
    used than can be in flight. A group waits until half of a replica's node can hold it."""
    start_timeout_s: float = 600.0
    """Time limit for the start of an actor, including model loading, in seconds."""
    call_timeout_s: float = 600.0
    """Time limit for a remote call, in seconds. Past it the actor is ended and counts as dead."""
    heartbeat_timeout_s: float = 30.0
    """Time without a heartbeat after which an actor is ended and counts as dead, in seconds. Use
    more than a process may have to wait on a busy machine."""

    def __post_init__(self) -> None:
        conform(self, "cluster")
        check_at_least("cluster.store_gib", self.store_gib, MIN_STORE_GIB)
        for name in ("start_timeout_s", "call_timeout_s", "heartbeat_timeout_s"):
            check_time_limit(f"cluster.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Section):
    """Printed and recorded data of a run."""

    print_samples: int = 1
    """Completions printed every print_every steps."""
    print_every: int = 10
    """Optimizer steps between printed completions."""
    record_groups: int = 1
    """Groups written to rollouts.jsonl in each step."""
    trace: bool = True
    """Write trace.json, a timeline for Perfetto or chrome://tracing."""

    def __post_init__(self) -> None:
        conform(self, "observe")
        for name in ("print_samples", "record_groups"):
            check_at_least(f"observe.{name}", getattr(self, name), 0, fix="Use 0 for none.")
        check_at_least(
            "observe.print_every",
            self.print_every,
            1,
            fix="Use 1 or more, or observe.print_samples=0 to print none.",
        )


# Rollouts of one step: more than any run has, and few enough for the controller to list.
MAX_ROLLOUTS = 2**22

# Steps that are profiled. Each makes a trace of up to tens of MB for each rank.
MAX_PROFILED_STEPS = 20

# A length of time, such as 90s, 10min or 1.5h.
TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)", re.ASCII)
UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}

# rlsys.runs.observe.trackers.tracker_kinds describes them.
TrackerName = Literal[
    "tensorboard",
    "wandb",
    "wandb-offline",
    "trackio",
    "swanlab",
    "swanlab-offline",
    "mlflow",
]

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
MAX_NAME = 200  # a file name has at most 255 bytes, and some files add a suffix to the run's name


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The run. Recipes add the options of their algorithm."""

    name: str = "run"
    """Name of the run's directory in runs_dir. Each run needs its own."""
    num_steps: int = 100
    """Optimizer steps of the whole run, including those before it was resumed."""
    resume: bool | Literal["auto"] = False
    """Continue the run of this name from its newest checkpoint. auto: start a new run if there is
    none, so that the same command can be repeated."""
    prompts_per_step: int = 32
    """Groups in one optimizer step."""
    group_size: int = 8
    """Rollouts per prompt. One step trains on prompts_per_step * group_size rollouts."""
    seed: int = 0
    """Random seed of data order, sampling and initialisation."""
    checkpoint_every: int | str = "10min"
    """Time between checkpoints (90s, 10min, 1h), or optimizer steps (50). A finished run writes a
    last one, an interrupted run does not. 0: only the last one."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep on disk. best/ has the best evaluated model besides."""
    keep_every: int = 0
    """Optimizer steps between checkpoints that are written and kept for good, in addition to the
    newest ones. 0: none."""
    stop_when: tuple[str, ...] = ()
    """Conditions, any of which ends the run early, as after its last step: "eval/mean@1 > 0.9",
    "reward/mean > 0.9 for 5" or "eval/loss not falling for 3" (docs/training.md)."""
    push_to: str = ""
    """Where to copy the exported model after the last step: hf://ORG/NAME, or a URL that fsspec
    writes to, such as s3://BUCKET/PATH or file:///PATH. Empty: nowhere."""
    profile_steps: str = ""
    """Steps that torch's profiler records on each trainer rank, as FIRST:END, such as 5:8 for the
    steps 5, 6 and 7. The traces are in the run's profile/. Empty: none."""
    runs_dir: str = "runs"
    """Directory of all runs. A leading ~ is the home directory."""
    placement: Literal["separate", "colocated"] = "separate"
    """separate: trainer and replicas have their own devices and work at the same time. colocated:
    each replica shares the devices of one trainer rank, or of rollout.tensor_parallel of them; they
    take turns, and the memory of the idle side is released (docs/cluster.md)."""
    trackers: tuple[TrackerName, ...] = ()
    """Trackers that get metrics, evaluations and samples while the run is under way, such as
    tensorboard or wandb (docs/trackers.md)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    asynchrony: AsyncConfig = field(default_factory=AsyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def __post_init__(self) -> None:
        conform(self)
        expand_home(self, "runs_dir")
        require(
            RUN_NAME.fullmatch(self.name) is not None,
            "name",
            self.name,
            rule="must start with a letter or digit and contain only letters, digits, '.', '_' "
            "and '-'",
            fix="Choose another name.",
        )
        require(
            len(self.name) <= MAX_NAME,
            "name",
            self.name,
            rule=f"has {len(self.name)} characters",
            fix=f"Use at most {MAX_NAME}.",
        )
        require(
            self.runs_dir != "",
            "runs_dir",
            self.runs_dir,
            rule="must be a directory",
            fix="Use one such as runs, or . for the current one.",
        )
        require(
            URL.match(self.runs_dir) is None,
            "runs_dir",
            self.runs_dir,
            rule="must be a directory of this machine or of a mounted file system",
            fix="Use a path, and copy the run's directory to the URL afterwards.",
        )
        check_adapters(self.model, self.trainer)
        check_at_least("seed", self.seed, 0)
        check_at_least("num_steps", self.num_steps, 1)
        check_at_least("prompts_per_step", self.prompts_per_step, 1)
        check_at_least("group_size", self.group_size, 1)
        require(
            self.rollouts_per_step <= MAX_ROLLOUTS,
            "prompts_per_step",
            self.prompts_per_step,
            rule=f"with group_size={self.group_size} a step has {self.rollouts_per_step} rollouts",
            fix=f"Use at most {MAX_ROLLOUTS}.",
        )
        require(
            self.rollout.weight_transport != "nccl" or self.trainer.num_gpus > 0,
            "rollout.weight_transport",
            self.rollout.weight_transport,
            rule="NCCL connects GPUs, and trainer.num_gpus=0",
            fix='Use "gloo", or a GPU.',
        )
        if self.rollout.weight_transport == "cuda_ipc":
            self._check_cuda_ipc()
        if self.rollout.engine == "vllm":
            check_vllm_temperature("sampling.temperature", self.sampling.temperature)
        require(
            self.checkpoint_steps is not None or self.checkpoint_s is not None,
            "checkpoint_every",
            self.checkpoint_every,
            rule="must be a time or a number of steps",
            fix="Use a time such as 90s, 10min or 1h, steps such as 50, or 0 for the end only.",
        )
        check_at_least("keep_checkpoints", self.keep_checkpoints, 1)
        check_at_least("keep_every", self.keep_every, 0, fix="Use 0 for none.")
        require(
            not self.push_to or URL.match(self.push_to) is not None,
            "push_to",
            self.push_to,
            rule="must be a URL",
            fix="Use hf://ORG/NAME, s3://BUCKET/PATH or file:///PATH, or leave it out.",
        )
        self._check_stop_conditions()
        _ = self.profiled_steps
        check_quantized(self.rollout, self.model.dtype)
        if self.rollout.sends_adapters:
            self._check_sent_adapters()
        if self.placement == "colocated":
            self._check_colocated()
        if self.rollout.borrow:
            self._check_borrowed()
        updates, staleness = self.trainer.updates_per_step, self.asynchrony.max_staleness
        require(
            staleness >= updates - 1,
            "asynchrony.max_staleness",
            staleness,
            rule=f"a step makes {updates} updates of the weights (trainer.num_minibatches x "
            f"trainer.num_epochs), and the last one trains on tokens at least {updates - 1} "
            "updates old",
            fix=f"Use at least {updates - 1}, or at least {2 * updates - 1} to sample one step "
            "ahead.",
        )
        self._check_prompts_divide()

    def _check_prompts_divide(self) -> None:
        """Check that all data ranks and minibatches of each layout get the same number of groups.

        Raises:
            InvalidValue: prompts_per_step is not divisible.
        """
        num_minibatches = self.trainer.num_minibatches
        for layout in self.trainer.layouts:
            num_parts, parts = layout.num_data, f"trainer.layout={str(layout)!r}"
            if num_minibatches > 1:
                num_parts *= num_minibatches
                parts += f" times trainer.num_minibatches={num_minibatches}"
            require(
                self.prompts_per_step % num_parts == 0,
                "prompts_per_step",
                self.prompts_per_step,
                rule=f"is not divisible by {num_parts}, the number of data ranks of {parts}",
                fix=f"Use a multiple of {num_parts}.",
            )

    def _check_sent_adapters(self) -> None:
        """Check that vLLM can get the policy's adapters, and that it keeps the base model.

        Raises:
            InvalidValue: There are none, they are too large, or replicas give their memory back.
        """
        check_sent_adapters(self.model.adapters)
        require(
            self.placement == "separate" and not self.rollout.borrow,
            "rollout.vllm.enable_lora",
            True,
            rule="a replica on a trainer's devices frees the base model while the trainer works, "
            "and an update brings only the adapters",
            fix="Use placement=separate and rollout.borrow=0, or leave it out.",
        )
        require(
            self.rollout.pipeline_parallel == 1,
            "rollout.vllm.enable_lora",
            True,
            rule="adapters have not run with rollout.vllm.pipeline_parallel_size="
            f"{self.rollout.pipeline_parallel}",
            fix="Leave one of them out.",
        )

    def _check_cuda_ipc(self) -> None:
        """Check that versions of the weights can be in the trainer's GPUs while replicas generate.

        Raises:
            InvalidValue: The trainer has no GPU, or gives its memory to replicas.
        """
        field, transport = "rollout.weight_transport", self.rollout.weight_transport
        require(
            self.trainer.num_gpus > 0,
            field,
            transport,
            rule="CUDA IPC shares memory of GPUs, and trainer.num_gpus=0",
            fix='Use "auto", or a GPU.',
        )
        require(
            self.placement == "separate" and not self.rollout.borrow,
            field,
            transport,
            rule="a version stays in the memory of the trainer's GPU, which replicas with "
            "placement=colocated or rollout.borrow need for themselves",
            fix='Use "auto", or placement=separate and rollout.borrow=0.',
        )

    def _check_colocated(self) -> None:
        """Check that each replica can share the devices of as many trainer ranks as it needs.

        Raises:
            InvalidValue: The layout, the replicas or the way of updating weights do not allow it.
        """
        require(
            not self.rollout.urls,
            "placement",
            self.placement,
            rule="the servers of rollout.urls keep their devices",
            fix="Use placement=separate.",
        )
        require(
            len(self.trainer.layouts) == 1,
            "trainer.layout",
            self.trainer.layout,
            rule="placement=colocated needs exactly one layout, since a lost node takes ranks and "
            "replicas",
            fix="Use one layout, or placement=separate.",
        )
        num_ranks, size = self.trainer.parallel.num_ranks, self.rollout.num_devices
        share = "one trainer rank" if size == 1 else f"{size} trainer ranks"
        require(
            size <= num_ranks,
            "rollout.tensor_parallel",
            self.rollout.tensor_parallel,
            rule=f"with placement=colocated a replica shares the devices of {size} trainer ranks, "
            f"and trainer.layout={self.trainer.layout!r} has {num_ranks}",
            fix=f"Use a layout with a multiple of {size} ranks, a smaller "
            "rollout.tensor_parallel, or placement=separate.",
        )
        require(
            self.rollout.num_replicas * size <= num_ranks,
            "rollout.num_replicas",
            self.rollout.num_replicas,
            rule=f"with placement=colocated each replica shares the devices of {share}, and "
            f"trainer.layout={self.trainer.layout!r} has {num_ranks}",
            fix=f"Use rollout.num_replicas={num_ranks // size} or fewer, or placement=separate.",
        )
        require(
            self.rollout.num_gpus == size * self.trainer.num_gpus,
            "rollout.num_gpus",
            self.rollout.num_gpus,
            rule=f"with placement=colocated a replica shares the devices of {share}, and each has "
            f"trainer.num_gpus={self.trainer.num_gpus:g}",
            fix=f"Use rollout.num_gpus={size * self.trainer.num_gpus:g}, or placement=separate.",
        )
        require(
            self.asynchrony.weight_update == "in_flight",
            "asynchrony.weight_update",
            self.asynchrony.weight_update,
            rule="with placement=colocated completions pause during training instead of ending "
            "before the update",
            fix="Use asynchrony.weight_update=in_flight, or placement=separate.",
        )

    def _check_borrowed(self) -> None:
        """Check that trainer ranks can lend their devices to replicas.

        Raises:
            InvalidValue: The placement, the layout or the way of updating weights do not allow it.
        """
        field, num_borrowed = "rollout.borrow", self.rollout.borrow
        require(
            self.placement == "separate",
            field,
            num_borrowed,
            rule="with placement=colocated the replicas have the trainer's devices already",
            fix="Use rollout.borrow=0, or placement=separate.",
        )
        require(
            len(self.trainer.layouts) == 1,
            field,
            num_borrowed,
            rule="it needs exactly one trainer.layout, since a lost node takes ranks and replicas",
            fix="Use one layout, or rollout.borrow=0.",
        )
        num_ranks = self.trainer.parallel.num_ranks
        require(
            num_borrowed <= num_ranks,
            field,
            num_borrowed,
            rule=f"each borrowed replica has the devices of one rank, and trainer.layout="
            f"{self.trainer.layout!r} has {num_ranks}",
            fix=f"Use rollout.borrow={num_ranks} or fewer.",
        )
        require(
            self.rollout.num_gpus == self.trainer.num_gpus,
            field,
            num_borrowed,
            rule=f"a borrowed replica has the devices of one rank, and rollout.num_gpus="
            f"{self.rollout.num_gpus:g} differs from trainer.num_gpus={self.trainer.num_gpus:g}",
            fix="Use the same number for both, or rollout.borrow=0.",
        )
        require(
            self.asynchrony.weight_update == "in_flight",
            field,
            num_borrowed,
            rule="completions move between replicas, and with asynchrony.weight_update=delayed "
            "each must end on the weights with which it began",
            fix="Use asynchrony.weight_update=in_flight, or rollout.borrow=0.",
        )

    def _check_stop_conditions(self) -> None:
        for condition in self.stop_conditions:
            require(
                self.evaluation.every > 0 or not condition.is_about_evaluations,
                "stop_when",
                condition.text,
                rule=f"{condition.metric} needs evaluations, and evaluation.every=0",
                fix="Set evaluation.every to a number of steps.",
            )

    @property
    def stop_conditions(self) -> tuple[StopCondition, ...]:
        """The conditions of stop_when."""
        return tuple(StopCondition.parse(text) for text in self.stop_when)

    @property
    def profiled_steps(self) -> range:
        """The steps of profile_steps."""
        return parse_steps(self.profile_steps, "profile_steps", at_most=MAX_PROFILED_STEPS)

    @property
    def checkpoint_steps(self) -> int | None:
        """Optimizer steps between checkpoints; 0 for none; None if checkpoint_every is a time."""
        every = self.checkpoint_every
        return every if isinstance(every, int) and every >= 0 else None

    @property
    def checkpoint_s(self) -> float | None:
        """Seconds between checkpoints; None if checkpoint_every is a number of steps."""
        match = TIME.fullmatch(str(self.checkpoint_every))
        seconds = float(match[1]) * UNITS_S[match[2]] if match else 0.0
        return seconds if 0 < seconds <= MAX_SECONDS else None

    @property
    def max_version_lag(self) -> int:
        """Largest number of policy versions between a token and the start of its training step.

        This is max_staleness, which counts updates, in versions.
        """
        return (self.asynchrony.max_staleness + 1) // self.trainer.updates_per_step - 1

    @property
    def is_repeatable(self) -> bool:
        """Return whether two runs give bit-identical numbers: on policy, with the torch engine."""
        return self.asynchrony.max_staleness == 0 and self.rollout.engine == "torch"

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts that one step trains on."""
        return self.prompts_per_step * self.group_size
