"""The configuration of a server of the Tinker API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlsys.common.option_names import option
from rlsys.config import ClusterConfig, RolloutConfig, TrainerConfig, require
from rlsys.config.fields import conform
from rlsys.config.training_config import Precision


@dataclass(frozen=True, kw_only=True)
class BaseModelConfig:
    """The model that is offered."""

    path: str = ""
    """Hugging Face hub name or directory of a causal language model with its tokenizer."""
    name: str = ""
    """As clients name it, base_model="..."; empty: its path."""
    dtype: Precision = "float32"
    """Precision of forward and backward pass, and of sampling; float32 or bfloat16."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations that the backward pass computes again, as in training runs."""

    def __post_init__(self) -> None:
        conform(self, "model")
        require(
            self.dtype != "float16",
            "model.dtype=float16 may have to compute a batch twice, which commands of a client "
            "cannot; use bfloat16 or float32.",
        )


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """Of each model's trainer. Learning rate and the rest of AdamW are the client's."""

    layout: str = "dp1"
    """Ranks, one process each: of dp alone where adapters are trained, as the client asks for."""
    micro_batch_tokens: int = 16384
    """Tokens of one rank's forward and backward pass, at most."""
    num_cpus: float = 1
    """Compute threads of one rank."""
    num_gpus: float = 0
    """GPUs of one rank: 0 or 1."""

    def __post_init__(self) -> None:
        conform(self, "trainer")
        _ = self.whole

    @property
    def whole(self) -> TrainerConfig:
        return TrainerConfig(
            layout=self.layout,
            micro_batch_tokens=self.micro_batch_tokens,
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
        )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """A server of the Tinker API."""

    model: BaseModelConfig = field(default_factory=BaseModelConfig)
    trainer: RanksConfig = field(default_factory=RanksConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    host: str = "127.0.0.1"
    """Address to listen at. Beyond this machine nothing is encrypted: put a proxy with TLS before
    it."""
    port: int = 8000
    """0: any free one, which is printed."""
    checkpoints_dir: str = "runs/primitives"
    """Where what clients save lies; all nodes must see it."""
    max_models: int = 4
    """Models that are trained at a time; each has a copy of the base model in its trainer."""
    max_body_mib: int = 256
    """Of one request."""
    session_timeout_s: float = 600.0
    """Seconds without a heartbeat after which a client's session ends and its models are unloaded;
    30 when another client needs the room. Checkpoints stay."""

    def __post_init__(self) -> None:
        conform(self, "server")
        require(
            bool(self.model.path),
            "model.path is empty; name the model that is served: "
            f"{option('model.path', 'Qwen/Qwen3-0.6B')}.",
        )
        require(0 <= self.port < 65536, f"port={self.port} is none; use 0 to 65535.")
        require(
            self.max_models >= 1, f"max_models={self.max_models} trains nothing; use 1 or more."
        )
        require(
            1 <= self.max_body_mib <= 4096,
            f"max_body_mib={self.max_body_mib}; use 1 to 4096.",
        )
        require(
            self.session_timeout_s >= 30,
            f"session_timeout_s={self.session_timeout_s:g}: the client sends a heartbeat every 10 "
            "s; use at least 30.",
        )
