"""The section `rollout` of the configuration: the replicas that generate."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlsys.config.checks import (
    MIN_CPUS,
    check_above,
    check_at_least,
    check_between,
    check_fraction,
    check_num_processes,
)
from rlsys.config.fields import Section, conform
from rlsys.config.lora import VLLM_RANKS, Lora
from rlsys.config.server_urls import OF_SERVERS, check_urls, normalized_urls
from rlsys.config.speculation import Speculation
from rlsys.config.vllm_argument_types import check_types
from rlsys.config.vllm_arguments import check_scheduling, check_vllm_arguments
from rlsys.errors import InvalidValue, require

WeightTransport = Literal["auto", "objects", "gloo", "nccl", "cuda_ipc"]
Quantization = Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8"]


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """The generation replicas."""

    engine: Literal["torch", "vllm"] = "torch"
    """Generation engine. torch: embedded, starts at once, deterministic. vllm: for production."""
    num_replicas: int = 1
    """Rollout actors, each with a copy of the model."""
    min_replicas: int | None = None
    """Replicas to place before the run starts. The others join when a node has resources for them.
    Unset: all."""
    borrow: int = 0
    """Replicas on the devices of trainer ranks, one per rank, besides num_replicas. They generate
    while the trainer would wait (docs/cluster.md#lending-the-trainers-devices). 0: none."""
    tensor_parallel: int = 1
    """GPUs (or CPU processes) that share one replica; vllm only."""
    max_running: int = 256
    """Maximum number of completions that one replica samples at a time."""
    kv_cache_gib: float = 1.0
    """KV cache of one replica, in GiB. vllm on GPUs uses gpu_memory_frac instead."""
    gpu_memory_frac: float = 0.85
    """Fraction of a GPU's memory that vllm uses."""
    num_cpus: float = 1
    """CPU cores that Ray reserves for one replica, and its number of compute threads."""
    num_gpus: float = 0
    """GPUs that Ray reserves for one replica; 0 runs on the CPU."""
    quantization: Quantization | None = None
    """8-bit weights of linear layers, quantized again for each version: less memory and faster, but
    further from the trainer. vllm only; on the CPU not fp8_per_tensor. int8 is for experts, the
    others are for models without experts."""
    urls: tuple[str, ...] = ()
    """Addresses of vLLM servers that run already, such as http://host:8000. Each is a replica. They
    run rlsys's worker (docs/rollouts.md), and sizes, kernels and devices are their own options."""
    replay_routing: bool = False
    """Routing replay for mixtures of experts: record the experts that the sampler chooses for each
    token, and use the same ones in training (R3, arXiv 2510.11370)."""
    weight_transport: WeightTransport = "auto"
    """How weights reach nodes without a rank that has them. gloo: process groups. nccl: the same
    between GPUs. objects: Ray's object store. auto: gloo, and objects while gloo fails. cuda_ipc:
    as auto, and on a rank's node from GPU to GPU instead of through host memory; it has not run on
    a GPU yet."""
    speculation: dict[str, Any] = field(default_factory=dict)
    """Speculative decoding, as {method = "ngram", num_tokens = 4}: fewer passes, the same tokens.
    Methods: ngram; with vllm also draft_model, eagle3 (both with model) and mtp. eagle3 with
    trained_along = true: the trainer trains the head with the policy."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's engine, as {max_num_batched_tokens = 4096}. docs/rollouts.md lists those
    that are passed and those that other options set."""

    def __post_init__(self) -> None:
        conform(self, "rollout")
        object.__setattr__(self, "urls", normalized_urls(self.urls))
        self._check_vllm()
        require(
            not (self.replay_routing and self.speculation and self.engine == "vllm"),
            "rollout.speculation",
            self.speculation,
            rule="vLLM mixes the experts of rejected drafts with those of tokens, so that "
            "rollout.replay_routing=True would replay wrong ones",
            fix='Leave one of them out, or use rollout.engine="torch".',
        )
        self._check_quantization()
        require(
            self.weight_transport != "nccl" or (self.num_gpus > 0 and not self.urls),
            "rollout.weight_transport",
            self.weight_transport,
            rule="the servers of rollout.urls read host memory"
            if self.urls
            else "NCCL connects GPUs, and rollout.num_gpus=0",
            fix='Use "auto".' if self.urls else 'Use "gloo", or a GPU.',
        )
        if self.weight_transport == "cuda_ipc":
            self._check_cuda_ipc()
        if self.urls:
            check_urls(
                self.urls,
                engine=self.engine,
                num_replicas=self.num_replicas,
                of_servers={name: getattr(self, name) for name in OF_SERVERS},
            )
            object.__setattr__(self, "num_replicas", len(self.urls))
        check_num_processes("rollout.num_replicas", self.num_replicas)
        if self.min_replicas is not None:
            fix = "Use at most rollout.num_replicas, or leave it out to wait for all of them."
            check_between("rollout.min_replicas", self.min_replicas, 1, self.num_replicas, fix=fix)
        check_at_least("rollout.max_running", self.max_running, 1)
        check_at_least("rollout.borrow", self.borrow, 0, fix="Use 0 for none.")
        check_at_least("rollout.tensor_parallel", self.tensor_parallel, 1)
        require(
            not self.borrow or self.tensor_parallel == 1,
            "rollout.borrow",
            self.borrow,
            rule="a borrowed replica has the devices of one trainer rank, and "
            f"rollout.tensor_parallel={self.tensor_parallel} needs several",
            fix="Use rollout.tensor_parallel=1, or rollout.borrow=0.",
        )
        require(
            not (self.borrow and self.urls),
            "rollout.borrow",
            self.borrow,
            rule="the servers of rollout.urls have no part in the trainer's devices",
            fix="Leave one of them out.",
        )
        require(
            self.engine == "vllm" or self.tensor_parallel == 1,
            "rollout.tensor_parallel",
            self.tensor_parallel,
            rule="the torch engine runs in one process",
            fix='Use rollout.engine="vllm", or rollout.tensor_parallel=1.',
        )
        fix = "Use a size in GiB such as 1."
        check_above("rollout.kv_cache_gib", self.kv_cache_gib, 0, fix=fix)
        fix = "Use a fraction of the GPU's memory such as 0.85."
        check_fraction("rollout.gpu_memory_frac", self.gpu_memory_frac, fix=fix)
        check_at_least("rollout.num_cpus", self.num_cpus, MIN_CPUS)
        require(
            self.num_gpus in (0, 1)
            or MIN_CPUS <= self.num_gpus < 1
            or (self.num_gpus > 1 and self.num_gpus % 1 == 0),
            "rollout.num_gpus",
            self.num_gpus,
            rule="Ray cannot reserve this number of GPUs",
            fix="Use 0 for the CPU, a fraction of one GPU such as 0.5, or a whole number.",
        )
        require(
            not self.num_gpus or self.tensor_parallel <= max(1, self.num_gpus),
            "rollout.tensor_parallel",
            self.tensor_parallel,
            rule=f"a replica has only rollout.num_gpus={self.num_gpus:g}",
            fix=f"Use rollout.num_gpus={self.tensor_parallel}, or rollout.tensor_parallel=1.",
        )

    def _check_vllm(self) -> None:
        require(
            not self.vllm or self.engine == "vllm",
            "rollout.vllm",
            self.vllm,
            rule=f"has no effect with rollout.engine={self.engine}",
            fix='Use rollout.engine="vllm", or leave it out.',
        )
        check_vllm_arguments(self.vllm, num_gpus=self.num_gpus)
        check_types(self.vllm)
        check_scheduling(self.vllm, max_running=self.max_running)
        _ = self.draft
        stages = self.pipeline_parallel
        require(
            stages == 1 or self.num_gpus == self.tensor_parallel * stages,
            "rollout.num_gpus",
            self.num_gpus,
            rule=f"must be rollout.tensor_parallel={self.tensor_parallel} times "
            f"rollout.vllm.pipeline_parallel_size={stages}",
            fix=f"Use {self.tensor_parallel * stages}.",
        )
        require(
            not self.vllm.get("enable_expert_parallel") or self.tensor_parallel > 1,
            "rollout.vllm.enable_expert_parallel",
            True,
            rule="has no effect with rollout.tensor_parallel=1",
            fix="Raise rollout.tensor_parallel, or leave it out.",
        )

    def _check_cuda_ipc(self) -> None:
        field, transport = "rollout.weight_transport", self.weight_transport
        require(
            not self.urls,
            field,
            transport,
            rule="the servers of rollout.urls read host memory",
            fix='Use "auto".',
        )
        require(
            self.num_gpus > 0,
            field,
            transport,
            rule="CUDA IPC shares memory of GPUs, and rollout.num_gpus=0",
            fix='Use "auto", or a GPU.',
        )
        require(
            not self.sends_adapters,
            field,
            transport,
            rule="the adapters of rollout.vllm.enable_lora pass through host memory",
            fix='Use "auto".',
        )

    @property
    def pipeline_parallel(self) -> int:
        """Pipeline stages of one replica; vllm only."""
        stages = self.vllm.get("pipeline_parallel_size", 1)
        return stages if isinstance(stages, int) else 1

    @property
    def num_devices(self) -> int:
        """Devices, or processes on CPUs, over which one replica is split."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def draft(self) -> Speculation | None:
        """The options of speculation."""
        return Speculation.of(self.speculation, self.engine)

    def _check_quantization(self) -> None:
        require(
            self.quantization is None or self.engine == "vllm",
            "rollout.quantization",
            self.quantization,
            rule="only vLLM has kernels for it",
            fix='Use rollout.engine="vllm", or leave it out.',
        )
        require(
            self.quantization != "fp8_per_tensor" or self.num_gpus > 0,
            "rollout.quantization",
            self.quantization,
            rule="vLLM has no kernels for it on the CPU (rollout.num_gpus=0)",
            fix='Use "fp8_per_block" or "fp8_per_channel", or a GPU.',
        )
        require(
            self.quantization is None or self.num_gpus > 0 or self.tensor_parallel == 1,
            "rollout.quantization",
            self.quantization,
            rule=f"on the CPU it does not work with rollout.tensor_parallel={self.tensor_parallel}"
            ", since vLLM's ranks exchange scales during generation and may be at different "
            "weight versions then",
            fix="Use rollout.tensor_parallel=1.",
        )

    @property
    def sends_adapters(self) -> bool:
        """Return whether vLLM gets the adapters of model.lora instead of merged weights."""
        return self.vllm.get("enable_lora") is True

    def serving(self, lora: Lora | None) -> RolloutConfig:
        """Return the settings of engines for a policy with these adapters.

        A policy without adapters gets whole weights.
        """
        if lora is not None or not self.sends_adapters:
            return self
        vllm = {name: value for name, value in self.vllm.items() if name != "enable_lora"}
        return replace(self, vllm=vllm)

    @property
    def num_first(self) -> int:
        """Number of replicas with which the run starts."""
        return self.num_replicas if self.min_replicas is None else self.min_replicas


def check_quantized(rollout: RolloutConfig, dtype: str, setting: str = "model.dtype") -> None:
    """Raise an InvalidValue if vLLM cannot quantize weights of this precision.

    `setting` is the option that gives the precision.
    """
    require(
        rollout.quantization is None or dtype != "float32",
        "rollout.quantization",
        rollout.quantization,
        rule=f"vLLM only quantizes 16-bit models, and {setting}=float32",
        fix=f"Use {setting}=bfloat16, or leave it out.",
    )


def check_sent_adapters(lora: Lora | None, setting: str = "model.lora") -> None:
    """Raise an InvalidValue if vLLM cannot get these adapters (rollout.vllm.enable_lora).

    `setting` is the option that gives them.
    """
    if lora is None:
        raise InvalidValue(
            "rollout.vllm.enable_lora",
            True,
            rule=f"there are no adapters to send, since {setting} is empty",
            fix=f"Set {setting}, or leave it out.",
        )
    require(
        lora.vllm_rank is not None,
        setting,
        f"r{lora.rank}",
        rule=f"vLLM has kernels for ranks up to {VLLM_RANKS[-1]}",
        fix="Use a smaller rank, or leave out rollout.vllm.enable_lora, which merges the adapters.",
    )


def check_whole_weights(rollout: RolloutConfig) -> None:
    """Raise an InvalidValue if engines that no run trains shall get adapters."""
    require(
        not rollout.sends_adapters,
        "rollout.vllm.enable_lora",
        True,
        rule="only the replicas of a training run get adapters",
        fix="Leave it out.",
    )
