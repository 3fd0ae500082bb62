"""What the service asks of the machinery behind it: trainers, one a model, and samplers for all.

The service knows no Ray; `actors/tinker_server/tinker_backend.py` is the one that does, and tests
have one of their own. Each call has a time limit of the backend's, and fails with PartDied where an
actor has died; ValueError, FloatingPointError and OSError are a command's own failure, after which
the model goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlsys.algorithms.loss_inputs import LossFn
from rlsys.tinker_server.datum_rows import DataRows, ModelLimits
from rlsys.tinker_server.protobuf_messages import TopK
from rlsys.tinker_server.server_checkpoints import SamplerWeights
from rlsys.types import Float32Array, Generation, GenerationRequest, Int32Array


@dataclass(frozen=True, kw_only=True)
class StepParams:
    """As the client's AdamParams."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PassResult:
    logprobs: Sequence[Float32Array]  # of each datum, of the shape of its targets
    loss: float  # summed


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """One that the server offers."""

    name: str  # as clients say it
    path: str  # hub name or directory, of the tokenizer too
    limits: ModelLimits


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of one row of tokens: of all but the first, given those before."""

    logprobs: Float32Array  # [N - 1]
    top_k: TopK | None = None


class Trainer(Protocol):
    """Of one model; called by one task, one call at a time."""

    @property
    def version(self) -> int:
        """Optimizer steps so far."""

    async def forward_backward(
        self, data: DataRows, loss: LossFn, *, backward: bool
    ) -> PassResult: ...

    async def discard(self) -> None:
        """Forget the gradients that have added up."""

    async def optim_step(self, params: StepParams) -> dict[str, float]: ...

    async def save(self, directory: Path) -> None:
        """Parameters and moments, into an empty directory."""

    async def load(self, directory: Path, *, optimizer: bool) -> None: ...

    async def save_for_sampler(self, directory: Path, number: int | None) -> None:
        """Save weights for a sampler into an empty directory: a folder with a PEFT adapter or a
        whole model. Publish them under this number for samplers nearby; None: do not publish.
        """

    async def close(self) -> None: ...


class Backend(Protocol):
    @property
    def base_models(self) -> Sequence[BaseModel]: ...

    def adapters(self, base_model: str, *, rank: int, attention: bool, mlp: bool) -> str:
        """As model.lora names them. Raises ValueError for those that the model cannot have."""

    async def start_trainer(self, name: str, base_model: str, lora: str, seed: int) -> Trainer: ...

    async def sample(
        self, weights: SamplerWeights, requests: Sequence[GenerationRequest]
    ) -> Sequence[Generation]:
        """All of them, in their order. A cancelled call aborts them."""

    async def score(
        self, weights: SamplerWeights, rows: Sequence[Int32Array], top_k: int
    ) -> Sequence[Scores]: ...

    async def close(self) -> None: ...
