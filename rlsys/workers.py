"""What the controller asks of the actors: three protocols and the messages that travel.

Messages carry metadata only. Token ids and log-probabilities stay in the store's shared memory;
a `Cell` says where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlsys.dataflow.blocks import Cell
from rlsys.engines.training.protocol import StepResult
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import FinishReason, GenerationRequest, WeightManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRollout:
    """A rollout whose tensors lie in the store."""

    request_id: str
    cell: Cell
    num_prompt_tokens: int
    num_tokens: int  # of the completion
    min_version: int
    max_version: int
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTask:
    group_id: int
    index: int
    cell: Cell
    prompt_text: str
    metadata: Mapping[str, Any]
    finish_reason: FinishReason
    record: bool  # return the texts for rollouts.jsonl


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutText:
    """What a recorded rollout said."""

    prompt: str
    completion: str
    token_ids: Sequence[int]
    policy_versions: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    outcome: RewardResult | RewardFailure
    text: RolloutText | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTask:
    """One rollout of a micro-batch."""

    cell: Cell
    advantage: float
    group_id: int
    group_size: int
    group_num_tokens: int  # completion tokens of the whole group


class Replica(Protocol):
    """One generation engine."""

    @property
    def name(self) -> str: ...

    async def submit(self, requests: Sequence[GenerationRequest]) -> None: ...

    async def collect(self) -> list[FinishedRollout]:
        """Rollouts that have ended since the last call; waits a bounded time for the first, and
        returns an empty list if none has ended."""

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def update_weights(self, manifest: WeightManifest) -> float:
        """Load a new version in the middle of generation; returns the pause in seconds."""


class Scorer(Protocol):
    async def score(self, tasks: Sequence[ScoreTask]) -> list[Scored]: ...


class Learner(Protocol):
    """All ranks of the trainer."""

    async def accumulate(self, shares: Sequence[Sequence[TrainTask]]) -> None:
        """Forward and backward; `shares[r]` goes to rank r."""

    async def optimizer_step(self) -> StepResult: ...

    async def publish(self) -> WeightManifest: ...
