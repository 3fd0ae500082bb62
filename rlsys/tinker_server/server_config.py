"""The configuration of a server of the Tinker API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlsys.common.option_names import option
from rlsys.config import ClusterConfig, RolloutConfig, TrainerConfig, check_whole_weights
from rlsys.config.fields import conform, expand_home
from rlsys.config.speculation import check_untrained
from rlsys.config.training_config import Precision
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class BaseModelConfig:
    """The served model."""

    path: str = ""
    """Hugging Face hub name or directory of a causal language model with its tokenizer. A leading ~
    is the home directory."""
    name: str = ""
    """Its name for clients, base_model="..."; empty: its path."""
    dtype: Precision = "float32"
    """Precision of forward and backward pass, and of sampling; float32 or bfloat16."""
    gradient_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Activations that the backward pass recomputes, as in training runs."""

    def __post_init__(self) -> None:
        conform(self, "model")
        expand_home(self, "path")
        require(
            self.dtype != "float16",
            "model.dtype",
            "float16",
            rule="it may compute a batch twice, which commands of a client do not allow",
            fix="Use bfloat16 or float32.",
        )


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """Ranks of each model's trainer. The client sets the learning rate and the rest of AdamW."""

    layout: str = "dp1"
    """Ranks, one process each. Adapters, which the client chooses, need dp alone."""
    micro_batch_tokens: int = 16384
    """Tokens of one rank's forward and backward pass, at most. Requests of several models with
    adapters share a pass."""
    num_cpus: float = 1
    """Compute threads of one rank."""
    num_gpus: float = 0
    """GPUs of one rank: 0 or 1."""

    def __post_init__(self) -> None:
        conform(self, "trainer")
        _ = self.whole

    @property
    def whole(self) -> TrainerConfig:
        """The complete configuration of a trainer."""
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
    """Address to listen on. Connections to other machines are not encrypted: use a proxy with
    TLS."""
    port: int = 8000
    """0: any free port, which is printed."""
    checkpoints_dir: str = "runs/primitives"
    """Directory of clients' checkpoints, visible to all nodes."""
    max_models: int = 8
    """Models that are trained at the same time, of all clients together."""
    models_per_trainer: int = 8
    """Models with adapters in one trainer process, which share a copy of the base model. 1: each
    has a process of its own. A layout of several ranks always has its own."""
    max_adapters: int = 16
    """Adapters that a sampler runs in one batch, with rollout.engine=torch. Requests of more
    adapters wait."""
    max_body_mib: int = 256
    """Maximum size of one request."""
    session_timeout_s: float = 600.0
    """Seconds without a heartbeat after which a client's session ends and its models are unloaded;
    30 if another client needs the room. Checkpoints are kept."""

    def __post_init__(self) -> None:
        conform(self, "server")
        check_untrained(self.rollout.speculation, "the server")
        require(
            bool(self.model.path),
            "model.path",
            self.model.path,
            rule="must name the served model",
            fix=f"Use {option('model.path', 'Qwen/Qwen3-0.6B')}, for example.",
        )
        check_whole_weights(self.rollout)
        require(
            0 <= self.port < 65536,
            "port",
            self.port,
            rule="must be from 0 to 65535",
            fix="Use 0 for any free port.",
        )
        require(
            self.max_models >= 1,
            "max_models",
            self.max_models,
            rule="must be at least 1",
            fix="Use 1 or more.",
        )
        for name in ("models_per_trainer", "max_adapters"):
            require(
                getattr(self, name) >= 1,
                name,
                getattr(self, name),
                rule="must be at least 1",
                fix="Use 1 or more.",
            )
        require(
            1 <= self.max_body_mib <= 4096,
            "max_body_mib",
            self.max_body_mib,
            rule="must be from 1 to 4096",
            fix="Use 256, for example.",
        )
        require(
            self.session_timeout_s >= 30,
            "session_timeout_s",
            self.session_timeout_s,
            rule="must be at least 30, because the client sends a heartbeat every 10 s",
            fix="Use 30 or more.",
        )
