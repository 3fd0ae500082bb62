"""A run's configuration, and its sections but for models and their training."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from rlsys.config.checks import MAX_PROCESSES, MAX_SECONDS, MIN_CPUS, check_k, require
from rlsys.config.fields import Section, conform
from rlsys.config.training_config import ModelConfig, TrainerConfig, check_adapters
from rlsys.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Where prompts come from."""

    source: str = ""
    """Hub dataset, file (.jsonl, .json, .csv, .parquet, .arrow), pattern such as a-*.jsonl, or
    directory. Several: A,B one after another; A*0.7,B*0.3 as a mixture (docs/formats.md). A recipe
    that makes its own rows refuses it."""
    subset: str | None = None
    """Configuration of a hub dataset, such as "main"."""
    split: str = "train"
    """Split of a hub dataset or a directory. Of every source also a part, such as train[:90%]."""
    prompt_column: str = "prompt"
    """Column with the prompt, or a dotted path such as extra_info.question: a string, or a list of
    chat messages."""
    system_prompt: str | None = None
    """System message put before each prompt; needs chat_template."""
    chat_template: bool = False
    """Render prompts with the tokenizer's chat template instead of taking them as plain text."""
    template_options: tuple[str, ...] = ()
    """Options of the model's chat template as NAME=VALUE, such as enable_thinking=false; VALUE is
    JSON, or else text. Environments render with them too."""
    max_prompt_tokens: int = 1024
    """Longest prompt admitted, in tokens; a longer one is an error unless skip_long_prompts."""
    skip_long_prompts: bool = False
    """Leave rows out whose prompt is too long, or the completion that a dataset holds, with a
    warning, instead of refusing the dataset."""
    shuffle: bool = True
    """A new order each epoch, from the run's seed."""
    retire_at: float | None = None
    """Mean reward of a prompt's rollouts from which on it is not issued again in later epochs;
    unset: all come again."""

    def __post_init__(self) -> None:
        conform(self, "data")
        require(
            self.max_prompt_tokens >= 1,
            f"data.max_prompt_tokens={self.max_prompt_tokens} admits no prompt; use at least 1.",
        )
        require(
            self.system_prompt is None or self.chat_template,
            "data.system_prompt is set, but data.chat_template is off, so it would be ignored; "
            "set data.chat_template=true.",
        )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(Section):
    """How completions are sampled."""

    temperature: float = 1.0
    """Of the sampling distribution; the trainer computes log-probabilities at the same one. Where a
    dataset holds the completions, they are learnt at 1."""
    top_p: float = 1.0
    """Nucleus: smallest set of tokens with at least this probability; 1 is off.
    Below 1 the trainer's ratios, over all tokens, are too large: see the warning."""
    top_k: int = 0
    """Sample among this many most likely tokens; 0 is off. Ratios are as with top_p."""
    max_tokens: int = 256
    """Longest completion, in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion and stay part of it; special tokens count as their text."""
    interrupt_after: int | None = None
    """Completion tokens after which thinking that is not over is interrupted: the interruption
    follows, which is not trained on, and an answer within max_tokens. Unset: never."""
    interruption: str = "\n\nTime is up; I answer with what I have.\n</think>\n\n"
    """Text that brings it to its end. Its last word, </think>, says in a completion that the
    thinking is over."""

    def __post_init__(self) -> None:
        conform(self, "sampling")
        require(
            self.temperature > 0,
            f"sampling.temperature={self.temperature} has no log-probabilities to train on; "
            "use a value above 0.",
        )
        require(
            0 < self.top_p <= 1,
            f"sampling.top_p={self.top_p} lies outside (0, 1]; use 1 to turn it off.",
        )
        require(self.top_k >= 0, f"sampling.top_k={self.top_k} is negative; use 0 to turn it off.")
        require(
            self.max_tokens >= 1,
            f"sampling.max_tokens={self.max_tokens} leaves nothing to sample; use at least 1.",
        )
        require(
            all(self.stop),
            f"sampling.stop={self.stop} holds an empty string, which ends every completion at "
            "once; leave it out.",
        )
        require(
            self.interrupt_after is None or 1 <= self.interrupt_after < self.max_tokens,
            f"sampling.interrupt_after={self.interrupt_after} lies outside 1 to "
            f"sampling.max_tokens={self.max_tokens}, of which an answer needs some; use less, or "
            "leave it out.",
        )
        require(
            bool(self.interruption.split()),
            f"sampling.interruption={self.interruption!r} is no text that ends a thinking; give "
            "one whose last word does.",
        )

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """The generation replicas."""

    engine: Literal["torch", "vllm"] = "torch"
    """torch: embedded, starts at once, deterministic. vllm: for real work."""
    num_replicas: int = 1
    """Rollout actors, each with a copy of the model."""
    min_replicas: int | None = None
    """Replicas that must find room before the run starts; the others join when a node has room for
    them. Unset: all."""
    tensor_parallel: int = 1
    """GPUs (or CPU processes) that share one replica; vllm only."""
    max_running: int = 256
    """Completions that one replica samples at a time."""
    kv_cache_gib: float = 1.0
    """Memory for keys and values of one replica; vllm on GPUs goes by gpu_memory_frac instead."""
    gpu_memory_frac: float = 0.85
    """Share of a GPU's memory that vllm takes."""
    num_cpus: float = 1
    """CPU cores that Ray reserves for one replica; also its compute threads."""
    num_gpus: float = 0
    """GPUs that Ray reserves for one replica; 0 runs on the CPU."""
    quantization: Literal["fp8_per_tensor", "fp8_per_channel"] | None = None
    """Linear layers' weights in 8 bits, from each new version again: less memory, faster, further
    from the trainer; vllm only. Per channel runs on the CPU too."""
    replay_routing: bool = False
    """Of a mixture of experts: record which experts the sampler sends each token to, and train on
    these in place of the trainer's own choice (R3, 2510.11370); torch only."""

    def __post_init__(self) -> None:
        conform(self, "rollout")
        require(
            not self.replay_routing or self.engine == "torch",
            f"rollout.replay_routing=True with rollout.engine={self.engine!r}: rlsys takes the "
            'experts of tokens from the torch engine alone; use rollout.engine="torch", or '
            "replay_routing=False.",
        )
        require(
            self.quantization is None or self.engine == "vllm",
            f"rollout.quantization={self.quantization!r} with rollout.engine={self.engine!r}: only "
            'vLLM has kernels for it; use rollout.engine="vllm", or leave it out.',
        )
        require(
            self.quantization in (None, "fp8_per_channel") or self.num_gpus > 0,
            f"rollout.quantization={self.quantization!r} with rollout.num_gpus=0: vLLM has no "
            'kernels for it on the CPU; use "fp8_per_channel", or a GPU.',
        )
        require(
            self.quantization is None or self.num_gpus > 0 or self.tensor_parallel == 1,
            f"rollout.quantization={self.quantization!r} with rollout.tensor_parallel="
            f"{self.tensor_parallel} on the CPU: vLLM's ranks agree on scales in the midst of "
            "generation, where theirs could be at different updates; use tensor_parallel=1.",
        )
        require(
            1 <= self.num_replicas <= MAX_PROCESSES,
            f"rollout.num_replicas={self.num_replicas} is no number of processes; use 1 to "
            f"{MAX_PROCESSES}.",
        )
        require(
            self.min_replicas is None or 1 <= self.min_replicas <= self.num_replicas,
            f"rollout.min_replicas={self.min_replicas} lies outside 1 to rollout.num_replicas="
            f"{self.num_replicas}; leave it out to wait for all of them.",
        )
        require(
            self.max_running >= 1,
            f"rollout.max_running={self.max_running} generates nothing; use at least 1.",
        )
        require(
            self.tensor_parallel >= 1,
            f"rollout.tensor_parallel={self.tensor_parallel} is below 1; use 1 for no sharing.",
        )
        require(
            self.engine == "vllm" or self.tensor_parallel == 1,
            f"rollout.tensor_parallel={self.tensor_parallel} needs the vllm engine; the torch "
            'engine runs in one process. Use rollout.engine="vllm" or tensor_parallel=1.',
        )
        require(
            self.kv_cache_gib > 0,
            f"rollout.kv_cache_gib={self.kv_cache_gib} leaves no cache; use a positive number.",
        )
        require(
            0 < self.gpu_memory_frac <= 1,
            f"rollout.gpu_memory_frac={self.gpu_memory_frac} lies outside (0, 1]; use a share of "
            "the GPU's memory such as 0.85.",
        )
        require(
            self.num_cpus >= MIN_CPUS,
            f"rollout.num_cpus={self.num_cpus} leaves a replica no thread; use at least "
            f"{MIN_CPUS}.",
        )
        require(
            self.num_gpus in (0, 1)
            or MIN_CPUS <= self.num_gpus < 1
            or (self.num_gpus > 1 and self.num_gpus % 1 == 0),
            f"rollout.num_gpus={self.num_gpus} is no number that Ray can reserve; use 0 to run on "
            "the CPU, a share of one GPU such as 0.5, or a whole number.",
        )
        require(
            not self.num_gpus or self.tensor_parallel <= max(1, self.num_gpus),
            f"rollout.tensor_parallel={self.tensor_parallel} needs as many GPUs for a replica, and "
            f"rollout.num_gpus={self.num_gpus:g}; use rollout.num_gpus={self.tensor_parallel}, or "
            "rollout.tensor_parallel=1, as placement=colocated asks.",
        )

    @property
    def num_first(self) -> int:
        """Replicas that the run starts with."""
        return self.num_replicas if self.min_replicas is None else self.min_replicas


# For Python, numpy and a few threads' stacks.
MIN_REWARD_MEMORY_GIB = 0.5


def check_quantized(rollout: RolloutConfig, dtype: str, setting: str = "model.dtype") -> None:
    """Raise ValueError for weights in a precision, of `setting`, that vLLM does not quantize."""
    require(
        rollout.quantization is None or dtype != "float32",
        f"rollout.quantization={rollout.quantization!r} with {setting}=float32: vLLM quantizes "
        f"models of 16 bits alone; use {setting}=bfloat16, or leave it out.",
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """The pool that runs reward functions."""

    num_workers: int = 1
    """Reward actors, each with a process that runs the functions."""
    concurrency: int = 16
    """Calls of reward functions that one worker runs at a time (threads for plain functions)."""
    timeout_s: float = 30.0
    """Limit for one reward function on one rollout; past it the rollout is dropped and counted."""
    memory_gib: float = 4.0
    """Memory in GiB of one worker's functions and all that they start; past it the call that takes
    it fails, or its process is ended."""

    def __post_init__(self) -> None:
        conform(self, "reward")
        require(
            1 <= self.num_workers <= MAX_PROCESSES,
            f"reward.num_workers={self.num_workers} is no number of processes; use 1 to "
            f"{MAX_PROCESSES}.",
        )
        require(
            1 <= self.concurrency <= MAX_PROCESSES,
            f"reward.concurrency={self.concurrency} is no number of threads; use 1 to "
            f"{MAX_PROCESSES}.",
        )
        require(
            0 < self.timeout_s <= MAX_SECONDS,
            f"reward.timeout_s={self.timeout_s} is no time limit; use more than 0 s, at most "
            f"{MAX_SECONDS:g} s.",
        )
        require(
            MIN_REWARD_MEMORY_GIB <= self.memory_gib < math.inf,
            f"reward.memory_gib={self.memory_gib} is not enough for the interpreter, or no number "
            f"of bytes; use at least {MIN_REWARD_MEMORY_GIB}.",
        )


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(Section):
    """Evaluation beside training, on held-out prompts, or tasks to play."""

    every: int = 0
    """Optimizer steps between evaluations; there is one before the first step and one after the
    last too. 0: none."""
    num_prompts: int | None = None
    """Held-out prompts or tasks to evaluate on, the first ones; unset: all."""
    num_samples: int = 1
    """Completions, or episodes, of each of them."""
    k: tuple[int, ...] = (1,)
    """Each k of pass@k: the probability that one of k completions is right."""
    greedy: bool = False
    """The most likely token each time, instead of samples; needs num_samples=1."""
    source: str = ""
    """As data.source, with the columns and the rendering of data; each row counts once. Unset:
    data.source."""
    split: str = "test"
    """Split of a hub dataset or a directory. Of every source also a part, such as train[90%:]."""
    num_cpus: float = 0
    """CPU cores that Ray reserves for the evaluating worker; 0: none, beside the others."""
    num_gpus: float = 0
    """GPUs that Ray reserves for it; 0 evaluates on the CPU."""

    def __post_init__(self) -> None:
        conform(self, "evaluation")
        require(
            self.every >= 0,
            f"evaluation.every={self.every} is negative; use 0 for no evaluation.",
        )
        require(
            self.num_cpus >= 0 and self.num_gpus >= 0,
            f"evaluation.num_cpus={self.num_cpus}, evaluation.num_gpus={self.num_gpus} are "
            "negative; use 0 to reserve none.",
        )
        check_samples(self.num_samples, self.k, self.greedy, self.num_prompts, "evaluation.")


def check_samples(
    num_samples: int, ks: tuple[int, ...], greedy: bool, num_prompts: int | None, prefix: str = ""
) -> None:
    """Raise ValueError for an evaluation that tells nothing; `prefix` stands before its fields."""
    require(
        num_samples >= 1,
        f"{prefix}num_samples={num_samples} draws nothing; use at least 1.",
    )
    require(
        bool(ks) and len(set(ks)) == len(ks),
        f"{prefix}k={ks} names none, or one twice; give each k once, such as 1,4.",
    )
    for k in ks:
        check_k(k, num_samples, prefix)
    require(
        not greedy or num_samples == 1,
        f"{prefix}num_samples={num_samples} of greedy decoding are all the same; use 1, or turn "
        f"{prefix}greedy off.",
    )
    require(
        num_prompts is None or num_prompts >= 2,
        f"{prefix}num_prompts={num_prompts} gives no interval; use at least 2.",
    )


@dataclass(frozen=True, kw_only=True)
class AsyncConfig(Section):
    """How far generation may run ahead of training."""

    max_staleness: int = 1
    """Bound η on the age of any token that enters a gradient, in updates of the weights, of which a
    step makes trainer.num_minibatches x trainer.num_epochs; 0 is exact on-policy training."""
    stream: bool = True
    """Train on micro-batches as their groups complete; off: wait for the whole batch."""
    order: Literal["issued", "complete"] = "issued"
    """issued: groups are trained in the order of issue; none is dropped for its length, and
    on-policy runs repeat exactly. complete: whichever group is complete first; stragglers that can
    no longer be trained within the bound are cancelled and replaced."""
    over_issue: int = 0
    """Groups in flight beyond what the bound asks for, so that a step never waits for the longest
    ones; needs order=complete."""
    weight_update: Literal["in_flight", "delayed"] = "in_flight"
    """in_flight: all replicas take new weights at once, in the middle of generation, KV cache kept.
    delayed: one replica after the other, when what it runs has ended."""

    def __post_init__(self) -> None:
        conform(self, "asynchrony")
        require(
            self.max_staleness >= 0,
            f"asynchrony.max_staleness={self.max_staleness} is negative; "
            "use 0 for on-policy training.",
        )
        require(
            self.over_issue >= 0,
            f"asynchrony.over_issue={self.over_issue} is negative; use 0 for none.",
        )
        require(
            self.over_issue == 0 or self.order == "complete",
            f"asynchrony.over_issue={self.over_issue} would never be cancelled in the order of "
            'issue; set asynchrony.order="complete", or over_issue=0.',
        )


MIN_STORE_GIB = 0.001


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Section):
    """The Ray cluster."""

    address: str | None = None
    """Ray address to join, "auto" for the one around; unset: RAY_ADDRESS, or a cluster started
    for this run on this machine."""
    store_gib: float = 0.5
    """Shared memory of each node for rollouts between stages, at most; the cluster holds the sum,
    and no more is taken than can be in flight. A group waits until a node with a replica has room
    for its longest rollouts in half of it."""
    start_timeout_s: float = 600.0
    """Limit for one actor's start, model loading included."""
    call_timeout_s: float = 600.0
    """Limit for one remote call, while the actor works on it; past it the actor is ended and
    counts as dead."""
    heartbeat_timeout_s: float = 30.0
    """An actor whose process shows no sign of life for this long is ended and counts as dead; above
    what a busy machine may keep a process waiting."""

    def __post_init__(self) -> None:
        conform(self, "cluster")
        require(
            self.store_gib >= MIN_STORE_GIB,
            f"cluster.store_gib={self.store_gib} holds no rollout; use {MIN_STORE_GIB} or more.",
        )
        for name in ("start_timeout_s", "call_timeout_s", "heartbeat_timeout_s"):
            value = getattr(self, name)
            require(
                0 < value <= MAX_SECONDS,
                f"cluster.{name}={value} is no time limit; use more than 0 s, at most "
                f"{MAX_SECONDS:g} s.",
            )


@dataclass(frozen=True, kw_only=True)
class ObserveConfig(Section):
    """What a run shows and records."""

    print_samples: int = 1
    """Completions printed every print_every steps."""
    print_every: int = 10
    """Optimizer steps between printed completions."""
    record_groups: int = 1
    """Groups written to rollouts.jsonl each step."""
    trace: bool = True
    """Write trace.json (Perfetto, chrome://tracing)."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Mirror metrics to Weights & Biases, in the project that WANDB_PROJECT names (or "rlsys")."""

    def __post_init__(self) -> None:
        conform(self, "observe")
        for name in ("print_samples", "record_groups"):
            value = getattr(self, name)
            require(value >= 0, f"observe.{name}={value} is negative; use 0 for none.")
        require(
            self.print_every >= 1,
            f"observe.print_every={self.print_every} is no number of steps; use at least 1, and "
            "observe.print_samples=0 to print none.",
        )


# vLLM samples at the lowest where a lower one is asked for, and refuses what is above the highest.
VLLM_TEMPERATURES = (0.01, 2.0)

# Rollouts of one step: beyond any run, within what a controller can count one by one.
MAX_ROLLOUTS = 2**22

# A length of time, such as 90s, 10min or 1.5h.
TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_NAME = 200  # file systems take 255 bytes, and files beside it have longer names


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """One run; recipes add their algorithm's fields."""

    name: str = "run"
    """Name of the run's directory below runs_dir; two runs never share one."""
    num_steps: int = 100
    """Optimizer steps of the whole run, resumed parts included."""
    resume: bool | Literal["auto"] = False
    """Continue the run of this name from its newest checkpoint. auto: where there is one, else
    start anew; the same command then always does what is left to do."""
    prompts_per_step: int = 32
    """Groups in one optimizer step."""
    group_size: int = 8
    """Rollouts per prompt; one step trains prompts_per_step * group_size rollouts."""
    seed: int = 0
    """Of data order, sampling and initialisation."""
    checkpoint_every: int | str = "10min"
    """Time between checkpoints (90s, 10min, 1h), or optimizer steps (50); there is one at the end
    too, but none when the run is interrupted. 0: only at the end."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept on disk."""
    runs_dir: str = "runs"
    """Directory of all runs."""
    placement: Literal["separate", "colocated"] = "separate"
    """separate: trainer and replicas have devices of their own, and work at the same time.
    colocated: replica k has those of the trainer's rank k, in turns; the memory of whoever does not
    work is let go (docs/cluster.md)."""
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
        require(
            RUN_NAME.fullmatch(self.name) is not None,
            f"name={self.name!r} is no directory name; use letters, digits, '.', '_' and '-'.",
        )
        require(
            len(self.name) <= MAX_NAME,
            f"name={self.name!r} has {len(self.name)} characters; use at most {MAX_NAME}.",
        )
        require(
            self.runs_dir != "",
            "runs_dir='' names no directory; use one such as runs, or . for the one you are in.",
        )
        check_adapters(self.model, self.trainer)
        require(self.seed >= 0, f"seed={self.seed} is negative; use a number of at least 0.")
        require(self.num_steps >= 1, f"num_steps={self.num_steps} trains nothing; use at least 1.")
        require(
            self.prompts_per_step >= 1,
            f"prompts_per_step={self.prompts_per_step} trains nothing; use at least 1.",
        )
        require(
            self.group_size >= 1, f"group_size={self.group_size} samples nothing; use at least 1."
        )
        require(
            self.rollouts_per_step <= MAX_ROLLOUTS,
            f"prompts_per_step={self.prompts_per_step} and group_size={self.group_size} are "
            f"{self.rollouts_per_step} rollouts a step; use at most {MAX_ROLLOUTS}.",
        )
        lowest, highest = VLLM_TEMPERATURES
        require(
            self.rollout.engine != "vllm" or lowest <= self.sampling.temperature <= highest,
            f"sampling.temperature={self.sampling.temperature} lies outside [{lowest}, {highest}], "
            'where vLLM samples; change it, or use rollout.engine="torch".',
        )
        for trainer in self.trainer.in_each_layout:
            num_data = trainer.parallel.num_data
            require(
                self.prompts_per_step % num_data == 0,
                f"prompts_per_step={self.prompts_per_step} does not divide over the {num_data} "
                f"data ranks of trainer.layout={trainer.layout!r}: every one trains the same "
                "number of groups; use a multiple.",
            )
        require(
            self.checkpoint_steps is not None or self.checkpoint_s is not None,
            f"checkpoint_every={self.checkpoint_every!r} is no number of steps and no time; use a "
            "time such as 90s, 10min or 1h, steps such as 50, or 0 for the end only.",
        )
        require(
            self.keep_checkpoints >= 1,
            f"keep_checkpoints={self.keep_checkpoints} would delete the newest one; use >= 1.",
        )
        check_quantized(self.rollout, self.model.dtype)
        if self.placement == "colocated":
            self._check_colocated()
        updates, eta = self.trainer.updates_per_step, self.asynchrony.max_staleness
        require(
            eta >= updates - 1,
            f"asynchrony.max_staleness={eta} counts updates of the weights, and a step makes "
            f"{updates} (trainer.num_minibatches x trainer.num_epochs): the last of them trains on "
            f"tokens {updates - 1} updates old at least; use max_staleness >= {updates - 1}, or "
            f">= {2 * updates - 1} to let sampling run a step ahead.",
        )
        for trainer in self.trainer.in_each_layout:
            num_data = trainer.parallel.num_data
            require(
                self.prompts_per_step % (num_data * trainer.num_minibatches) == 0,
                f"prompts_per_step={self.prompts_per_step} does not divide over the {num_data} "
                f"data ranks of trainer.layout={trainer.layout!r} and trainer.num_minibatches="
                f"{trainer.num_minibatches}; use a multiple of their product.",
            )

    def _check_colocated(self) -> None:
        """Raise ValueError for replicas that do not fit into the places of the trainer's ranks."""
        require(
            len(self.trainer.in_each_layout) == 1,
            f"trainer.layout={self.trainer.layout!r} with placement=colocated: the replicas have "
            "the places of the trainer's ranks, and with a node both are lost; use one layout, or "
            "placement=separate.",
        )
        num_ranks = self.trainer.parallel.num_ranks
        require(
            self.rollout.num_replicas <= num_ranks,
            f"rollout.num_replicas={self.rollout.num_replicas} with placement=colocated: each has "
            f"the place of a rank of the trainer, of which trainer.layout={self.trainer.layout!r} "
            f"has {num_ranks}; use rollout.num_replicas={num_ranks} or fewer, or "
            "placement=separate.",
        )
        require(
            self.rollout.num_gpus == self.trainer.num_gpus,
            f"rollout.num_gpus={self.rollout.num_gpus:g} and trainer.num_gpus="
            f"{self.trainer.num_gpus:g} with placement=colocated: a replica has the devices of one "
            "rank, no more and no fewer; use the same number (so rollout.tensor_parallel=1 on "
            "GPUs), or placement=separate.",
        )
        require(
            self.asynchrony.weight_update == "in_flight",
            "asynchrony.weight_update=delayed waits until what runs has ended, but with "
            "placement=colocated it stops where it is when training's turn comes; use "
            "weight_update=in_flight, or placement=separate.",
        )

    @property
    def checkpoint_steps(self) -> int | None:
        """Optimizer steps between checkpoints, 0 for none; None where a time is given."""
        every = self.checkpoint_every
        return every if isinstance(every, int) and every >= 0 else None

    @property
    def checkpoint_s(self) -> float | None:
        """Seconds between checkpoints; None where steps are given."""
        match = TIME.fullmatch(str(self.checkpoint_every))
        seconds = float(match[1]) * UNITS_S[match[2]] if match else 0.0
        return seconds if 0 < seconds <= MAX_SECONDS else None

    @property
    def max_version_lag(self) -> int:
        """Versions of the policy between the weights of a token and those at the beginning of the
        step that trains on it, at most: max_staleness, which counts updates, in versions.
        """
        return (self.asynchrony.max_staleness + 1) // self.trainer.updates_per_step - 1

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.group_size
