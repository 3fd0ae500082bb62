"""What the controller's loops share: the groups under way, and the one place where they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlsys.config import RunConfig
from rlsys.dataflow.admission import AdmissionGate
from rlsys.dataflow.ledger import Ledger, OpenGroup
from rlsys.dataflow.signal import Signal
from rlsys.dataflow.store import StreamStore
from rlsys.rewards import RewardFailure
from rlsys.types import FinishReason, Prompt, StepResult, WeightManifest
from rlsys.workers import RolloutText


@dataclass(kw_only=True)
class RolloutNote:
    """What is remembered of a rollout until its group is trained."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    finish_reason: FinishReason = FinishReason.ABORTED
    min_version: int = 0
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    text: RolloutText | None = None


@dataclass(kw_only=True)
class Group:
    """One prompt and its rollouts, from issue to the end."""

    group_id: int
    prompt: Prompt
    rows: Sequence[int]  # ids in the store
    rollouts: list[RolloutNote]
    version: int = 0  # the oldest that its samplers may have had when it was issued
    attempt: int = 0  # counts issues of the same group: what an earlier one sampled is not used
    replica: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(note.num_prompt_tokens + note.num_tokens for note in self.rollouts)

    @property
    def num_completion_tokens(self) -> int:
        return sum(note.num_tokens for note in self.rollouts)

    @property
    def oldest_version(self) -> int:
        """Of all tokens; 0 while a rollout has not ended."""
        return min(note.min_version for note in self.rollouts)


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One optimizer step, for the observer."""

    step: int
    result: StepResult
    groups: Sequence[Group]


class Observer(Protocol):
    """Told what happens; never changes it."""

    def step_trained(self, trained: TrainedStep) -> None: ...

    def tokens_generated(self, num_tokens: int) -> None: ...

    def weights_loaded(
        self, manifest: WeightManifest, *, sync_s: float, pauses_s: Sequence[float]
    ) -> None: ...

    def reward_failed(self, failure: RewardFailure) -> None: ...

    def replica_died(self, name: str, reason: str, *, num_requests: int) -> None: ...

    def waited(self, stage: str, reason: str, seconds: float) -> None:
        """A loop had nothing to do until now, and why."""


class RunState:
    """The groups that have been issued and have not ended; `step` counts optimizer steps."""

    def __init__(
        self,
        *,
        config: RunConfig,
        store: StreamStore,
        ledger: Ledger,
        observer: Observer,
        step: int,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.store = store
        self.ledger = ledger
        self.observer = observer
        self.step = step
        self.clock = clock
        self.gate = AdmissionGate(
            groups_per_step=config.prompts_per_step,
            max_staleness=config.asynchrony.max_staleness,
            num_steps=config.num_steps,
            over_issue=config.asynchrony.over_issue,
        )
        self.gate.restore(
            num_issued=ledger.num_issued, num_dropped=ledger.num_dropped, version=step
        )
        self.groups: dict[int, Group] = {}
        self.to_reissue = deque(ledger.open_groups)
        self.cancelled: asyncio.Queue[Group] = asyncio.Queue()  # replicas may still sample them
        self.gate_moved = Signal()
        self.progress = Signal()  # of any kind

    def oldest_version_allowed(self, num_steps: int) -> int:
        """Tokens of an older version may not enter the gradient of the step that comes after
        `num_steps` others."""
        return num_steps - self.config.asynchrony.max_staleness

    def drop(self, group_id: int, reason: str) -> None:
        """End a group without training it; another is issued in its stead."""
        group = self.groups.pop(group_id)
        self.store.drop_group(group_id)
        self.ledger.drop(group_id, reason=reason)
        self.gate.drop()
        self.cancelled.put_nowait(group)
        self.gate_moved.notify()

    def drop_rest(self, reason: str) -> None:
        """The run has what it needs: end every group that is left."""
        self.gate.close()
        for group_id in list(self.groups):
            self.drop(group_id, reason)
        while self.to_reissue:
            self.ledger.drop(self.to_reissue.popleft().group_id, reason=reason)

    def issue_again(self, group: Group) -> None:
        """From the beginning, under its own id; the store has dropped its rows."""
        del self.groups[group.group_id]
        self.cancelled.put_nowait(group)
        self.to_reissue.append(
            OpenGroup(
                group_id=group.group_id, prompt_index=group.prompt.index, version=group.version
            )
        )
        self.gate_moved.notify()

    @contextlib.contextmanager
    def waiting(self, stage: str, reason: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.observer.waited(stage, reason, self.clock() - start)
