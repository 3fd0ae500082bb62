"""What the controller asks of the actors: three protocols and the messages that travel.

Messages carry metadata only. Token ids and log-probabilities stay in the store's shared memory;
a `Cell` says where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlsys.dataflow.blocks import Cell
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import FinishReason, Generation, GenerationRequest, StepResult, WeightManifest


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
class Unreadable:
    """The shard that held the rollout is gone; nothing was scored."""


Score = Scored | Unreadable
TellScores = Callable[[Mapping[int, Score]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTask:
    """One rollout of a micro-batch."""

    cell: Cell
    advantage: float
    group_id: int
    group_size: int
    group_num_tokens: int  # completion tokens of the whole group


class ReplicaDied(RuntimeError):
    """A replica's process is gone; the message names it and says why. Others can take over."""


class RowsLost(RuntimeError):
    """Rows could not be read: the shard of the store that held them is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What a replica has to tell."""

    finished: Sequence[FinishedRollout]
    partial: Sequence[Generation] = ()  # what long running requests have so far, now and then


class Replica(Protocol):
    """One generation engine. Every method but `bury` raises ReplicaDied if the process is gone."""

    @property
    def name(self) -> str: ...

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Generation]
    ) -> None:
        """Sample; `priors` holds, by request id, what another replica had sampled already."""

    async def collect(self) -> Collected:
        """What has ended since the last call; waits a bounded time for the first."""

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        """Load a new version: in the middle of generation, or delayed until what runs has ended.
        Returns the pause in seconds."""

    async def bury(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """The replica has died: take back the store's memory that it held, less the rows that are
        still needed (StreamStore.live_rows)."""


class Scorer(Protocol):
    async def score(self, tasks: Sequence[ScoreTask], tell: TellScores) -> None:
        """Calls `tell` with scores by the task's place, in parts, as they come; returns when every
        task has one."""


class Learner(Protocol):
    """All ranks of the trainer. Calls are carried out one after another, in the order in which they
    were made, whether or not the one before has been answered."""

    async def accumulate(self, shares: Sequence[Sequence[TrainTask]]) -> None:
        """Forward and backward; `shares[r]` goes to rank r."""

    async def optimizer_step(self) -> StepResult: ...

    async def publish(self) -> WeightManifest: ...
