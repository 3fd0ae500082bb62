"""Interface between the service and the trainers and samplers behind it.

There is one trainer per model, and samplers for all models. actors/tinker_server/tinker_backend.py
implements the interface with Ray, and tests have a fake. Each call has a time limit of the backend
and fails with PartDied if an actor has died. ValueError, FloatingPointError and OSError are
failures of a single command, after which the model continues.
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
    """Settings of one optimizer step, the client's AdamParams."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """Results of a forward or backward pass."""

    logprobs: Sequence[Float32Array]  # of each datum, of the shape of its targets
    loss: float  # summed


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A model that the server offers."""

    name: str  # as clients name it
    path: str  # hub name or directory, also of the tokenizer
    limits: ModelLimits


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Rows of tokens to score with some weights.

    Attributes:
        weights: The weights.
        rows: Token ids of each row, [N].
        top_k: Number of the most likely tokens at each place that are returned too.
        temperature: Temperature of the log-probabilities.
    """

    weights: SamplerWeights
    rows: Sequence[Int32Array]
    top_k: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of one row's tokens but the first, at one temperature."""

    logprobs: Float32Array  # [N - 1]
    top_k: TopK | None = None  # [N - 1, top_k]


class Trainer(Protocol):
    """Trainer of one model. One task calls it, one call at a time."""

    @property
    def version(self) -> int:
        """Optimizer steps so far."""

    async def forward_backward(self, data: DataRows, loss: LossFn, *, backward: bool) -> PassResult:
        """Run a forward pass, and with `backward` add the gradient."""

    async def discard(self) -> None:
        """Discard the accumulated gradients."""

    async def optim_step(self, params: StepParams) -> dict[str, float]:
        """Take an optimizer step and return its metrics."""

    async def save(self, directory: Path) -> None:
        """Save parameters and moments into an empty directory."""

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        """Load parameters, and with `optimizer` the moments."""

    async def save_for_sampler(self, directory: Path, number: int | None) -> None:
        """Save weights for a sampler into an empty directory, and publish them.

        The directory gets a folder with a PEFT adapter or a whole model. `number` is the version
        for samplers on the same nodes; None: the weights are not published.
        """

    async def close(self) -> None:
        """End the trainer."""


class Backend(Protocol):
    """All trainers and samplers of a server."""

    @property
    def base_models(self) -> Sequence[BaseModel]:
        """Models that the server offers."""

    def adapters(self, base_model: str, *, rank: int, attention: bool, mlp: bool) -> str:
        """Return adapters as in model.lora.

        Raises:
            ValueError: The model cannot have them.
        """

    async def start_trainer(
        self, name: str, base_model: str, lora: str, seed: int, owner: str
    ) -> Trainer:
        """Start the trainer of a model. Owners take turns."""

    async def sample(
        self, weights: SamplerWeights, requests: Sequence[GenerationRequest], owner: str
    ) -> Sequence[Generation]:
        """Return the completions in the order of requests. Cancelling the call aborts them.

        Owners take turns.
        """

    async def score(self, request: ScoreRequest) -> Sequence[Scores]:
        """Return the scores of each row."""

    async def close(self) -> None:
        """End all trainers and samplers."""
