"""A backend without a model, which records its calls and fails on request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.tinker_server.datum_rows import DataRows, ModelLimits
from rlsys.tinker_server.protobuf_messages import TopK
from rlsys.tinker_server.server_backend import (
    BaseModel,
    PassResult,
    ScoreRequest,
    Scores,
    StepParams,
)
from rlsys.tinker_server.server_checkpoints import SamplerWeights
from rlsys.types import FinishReason, Generation, GenerationRequest, TrainRow


class FakeTrainer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self.calls: list[str] = []
        self.rows: Sequence[TrainRow] = ()  # of the last pass
        self.fails: list[Exception] = []  # errors of the next calls
        self.is_closed = False
        self.is_slow = False  # it never ends

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.fails:
            raise self.fails.pop(0)

    async def forward_backward(self, data: DataRows, loss: Any, *, backward: bool) -> PassResult:
        self._called("forward_backward" if backward else "forward")
        self.rows = data.rows
        await asyncio.sleep(1000 if self.is_slow else 0)
        return PassResult(
            logprobs=[np.full(shape, -1.0, np.float32) for shape in data.shapes],
            loss=float(len(data.rows)),
        )

    async def discard(self) -> None:
        self._called("discard")

    async def optim_step(self, params: StepParams) -> dict[str, float]:
        self._called("optim_step")
        self.version += 1
        return {"learning_rate": params.learning_rate}

    async def save(self, directory: Path) -> None:
        self._called("save")
        (directory / "state").write_text(str(self.version))

    async def load(self, directory: Path, *, optimizer: bool) -> None:
        self._called(f"load optimizer={optimizer}")
        self.version = int((directory / "state").read_text())

    async def save_for_sampler(self, directory: Path, number: int | None) -> None:
        self._called(f"save_for_sampler {number}")
        (directory / "adapter").mkdir()
        (directory / "adapter" / "adapter_config.json").write_text('{"r": 8}')

    async def close(self) -> None:
        self.is_closed = True


class FakeBackend:
    """Samples wait until `is_free` is set."""

    def __init__(self) -> None:
        self.trainers: dict[str, FakeTrainer] = {}
        self.sampled: list[tuple[SamplerWeights, Sequence[GenerationRequest]]] = []
        self.fails: list[Exception] = []
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.num_cancelled = 0

    @property
    def base_models(self) -> Sequence[BaseModel]:
        limits = ModelLimits(vocab_size=100, max_context=64)
        return [BaseModel(name="tiny", path="/models/tiny", limits=limits)]

    async def start(self) -> None:
        """Start nothing."""

    def adapters(self, base_model: str, *, rank: int, attention: bool, mlp: bool) -> str:
        return f"r{rank}a32"

    async def start_trainer(
        self, name: str, base_model: str, lora: str, seed: int, owner: str
    ) -> FakeTrainer:
        if self.fails:
            raise self.fails.pop(0)
        self.trainers[name] = FakeTrainer(name)
        return self.trainers[name]

    async def sample(
        self, weights: SamplerWeights, requests: Sequence[GenerationRequest], owner: str
    ) -> Sequence[Generation]:
        self.sampled.append((weights, requests))
        try:
            await self.is_free.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.fails:
            raise self.fails.pop(0)
        return [
            Generation(
                request_id=one.request_id,
                token_ids=np.array([7, 8], np.int32),
                sampler_logprobs=np.array([-0.5, -0.25], np.float32),
                policy_versions=np.full(2, weights.number, np.int32),
                finish_reason=FinishReason.LENGTH,
            )
            for one in requests
        ]

    async def score(self, request: ScoreRequest) -> Sequence[Scores]:
        """Return −1 / temperature, −2 / temperature, ... as the numbers of each row."""
        found = []
        top_k = request.top_k
        for one in request.rows:
            logprobs = -np.arange(1, len(one), dtype=np.float32) / request.temperature
            top = None
            if top_k:
                top = TopK(
                    token_ids=np.repeat(one[1:, None], top_k, axis=1),
                    logprobs=np.repeat(logprobs[:, None], top_k, axis=1),
                )
            found.append(Scores(logprobs=logprobs, top_k=top))
        return found

    async def close(self) -> None:
        for trainer in self.trainers.values():
            await trainer.close()
