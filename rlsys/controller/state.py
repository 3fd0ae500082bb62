"""What the controller's loops share: the groups under way, and the one place where they end."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlsys.common.async_condition import AsyncCondition
from rlsys.config import RunConfig
from rlsys.controller.worker_protocols import (
    FinishedRollout,
    RolloutMetadata,
    RolloutText,
    StepPart,
)
from rlsys.dataflow.graph.stages import IS_GREEDY, NUM_TOKENS, PREFERENCE, TRUNCATED
from rlsys.dataflow.scheduling.admission import AdmissionGate
from rlsys.dataflow.scheduling.curriculum import Curriculum
from rlsys.dataflow.scheduling.ledger import Ledger, OpenGroup
from rlsys.dataflow.scheduling.microbatch_plan import GroupLengths
from rlsys.dataflow.store.stream_store import StreamStore
from rlsys.rewards import RewardFailure
from rlsys.types import FinishReason, Prompt, StepResult, WeightManifest


@dataclass(kw_only=True)
class RolloutNote:
    """What is remembered of a rollout until its group is trained, and no column of the store holds.
    Its reward and its advantage are columns; `components` and `text` are for the recorder alone:
    which parts a reward has is known when it is scored, and few of them have columns.
    """

    index: int = 0  # within its group
    is_greedy: bool = False  # the baseline of its group, which is not trained on
    finished: FinishedRollout | None = None  # None: it is still being sampled
    components: Mapping[str, float] = field(default_factory=dict)  # of its reward
    text: RolloutText | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return self._ended.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self._ended.num_tokens

    @property
    def num_injected(self) -> int:
        return self._ended.num_injected

    @property
    def num_by_seat(self) -> Sequence[int]:
        return self._ended.num_by_seat

    @property
    def finish_reason(self) -> FinishReason:
        return self._ended.finish_reason

    @property
    def min_version(self) -> int:
        return self._ended.min_version

    @property
    def _ended(self) -> FinishedRollout:
        assert self.finished is not None, "asked of a rollout that is still being sampled"
        return self.finished


# Columns with a value per row that no stage writes.
IMPLICIT_COLUMNS: Mapping[str, Callable[[RolloutNote], float]] = {
    NUM_TOKENS.name: lambda note: note.num_tokens,
    TRUNCATED.name: lambda note: note.finish_reason is FinishReason.LENGTH,
    IS_GREEDY.name: lambda note: note.is_greedy,
    PREFERENCE.name: lambda note: -1 if note.index else 1,
}


@dataclass(kw_only=True)
class RunningGroup:
    """One prompt and its rollouts, from issue to the end."""

    group_id: int
    prompt: Prompt
    rows: Sequence[int]  # ids in the store
    rollouts: list[RolloutNote]
    version: int = 0  # the oldest that any of its tokens may have
    attempt: int = 0  # counts issues of the same group: what an earlier one sampled is not used
    unassigned: list[int] = field(default_factory=list)  # rollouts that no replica samples

    @property
    def lengths(self) -> GroupLengths:
        return GroupLengths(
            prompt=self.rollouts[0].num_prompt_tokens,
            completions=[note.num_tokens for note in self.rollouts],
        )

    def origin(self, index: int) -> RolloutMetadata:
        """Of a rollout that has ended."""
        return RolloutMetadata(
            group_id=self.group_id,
            index=index,
            prompt_text=self.prompt.text,
            metadata=self.prompt.metadata,
            finish_reason=self.rollouts[index].finish_reason,
        )

    def of_trained(self, values: Sequence[float]) -> list[float]:
        """Of values of all its rollouts those of the ones that are trained on."""
        notes = zip(values, self.rollouts, strict=True)
        return [value for value, note in notes if not note.is_greedy]

    def num_trained_tokens(self, seats: Sequence[int] | None = None) -> int:
        """Of completions, less those that are not trained on; None: whoever's seat it is."""
        if seats is None:
            return sum(note.num_tokens - note.num_injected for note in self.rollouts)
        by_seat = (one for note in self.rollouts for one in enumerate(note.num_by_seat))
        return sum(num for seat, num in by_seat if seat in seats)

    @property
    def oldest_version(self) -> int:
        """Return the oldest version among the tokens of its rollouts, which have ended.

        NO_VERSION, which is newer than every other, where nothing was sampled.
        """
        return min(note.min_version for note in self.rollouts)


@dataclass(frozen=True, kw_only=True)
class OpenWork:
    """What has been sampled of groups that have not ended: for a checkpoint to keep, and for a
    resumed run to go on with. The bytes lie in the store. And the numbers that the next step goes
    by, of the stages that set them.
    """

    finished: Sequence[FinishedRollout] = ()
    parts: Sequence[StepPart] = ()  # of running rollouts, those of each in their order
    coefficients: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)  # where a group's lie, in a resumed run


NO_WORK = OpenWork()


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One optimizer step, for the observer."""

    step: int
    result: StepResult
    groups: Sequence[RunningGroup]
    columns: Mapping[int, Mapping[str, Sequence[float]]]  # by group: those with a value per row


class Observer(Protocol):
    """Told what happens; never changes it."""

    def step_trained(self, trained: TrainedStep) -> None: ...

    def rollouts_sampled(self, num_rollouts: int, *, num_tokens: int) -> None:
        """So many rollouts have ended. Some of them may be dropped later."""

    def weights_loaded(
        self, manifest: WeightManifest, *, sync_s: float, pauses_s: Sequence[float]
    ) -> None: ...

    def reward_failed(self, failure: RewardFailure) -> None: ...

    def group_refused(self, function: str, columns: Mapping[str, Sequence[float]]) -> None:
        """A function over groups gave None for one with these values, one a rollout."""

    def parts_missing(self, parts: Sequence[str], given: Sequence[str], num_episodes: int) -> None:
        """Columns of flow.play(parts=) of which none of the first episodes gave a number; those of
        which they did.
        """

    def replica_died(self, name: str, reason: str, *, num_requests: int) -> None: ...

    def replica_joined(self, name: str, *, version: int) -> None: ...

    def trainer_restarted(self, reason: str, *, step: int, lost_steps: int, seconds: float) -> None:
        """The trainer goes on after `step` optimizer steps; those of `lost_steps` more are undone,
        and whatever was recorded of them.
        """

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
        curriculum: Curriculum,
    ) -> None:
        self.curriculum = curriculum
        self.config = config
        self.store = store
        self.ledger = ledger
        self.observer = observer
        self.step = step
        self.clock = clock
        self.gate = AdmissionGate(
            groups_per_step=config.prompts_per_step,
            max_staleness=config.max_version_lag,
            num_steps=config.num_steps,
            over_issue=config.asynchrony.over_issue,
        )
        self.gate.restore(num_trained=ledger.num_trained, version=step)
        self.groups: dict[
            int, RunningGroup
        ] = {}  # in the order of their last issue, as in the store
        self.to_reissue = deque(ledger.open_groups)  # in the order of their ids
        self.cancelled: asyncio.Queue[RunningGroup] = (
            asyncio.Queue()
        )  # replicas may still sample them
        self.may_issue = (
            AsyncCondition()
        )  # the gate, the replicas, or what they left behind has changed
        self.progress = AsyncCondition()  # of any kind

    def oldest_version_allowed(self, num_steps: int) -> int:
        """Tokens of an older version may not enter the gradient of the step that comes after
        `num_steps` others.
        """
        return num_steps - self.config.max_version_lag

    def records(self, group_id: int) -> bool:
        """Whether rollouts.jsonl gets the group."""
        config = self.config
        return group_id % config.prompts_per_step < config.observe.record_groups

    def drop(self, group_id: int, reason: str) -> None:
        """End a group without training it; another is issued in its stead."""
        group = self.groups.pop(group_id)
        self.store.drop_group(group_id)
        self.ledger.drop(group_id, reason=reason)
        self._cancel(group)

    def drop_rest(self, reason: str) -> None:
        """The run has what it needs: end every group that is left."""
        self.gate.close()
        for group_id in list(self.groups):
            self.drop(group_id, reason)
        while self.to_reissue:
            self.ledger.drop(self.to_reissue.popleft().group_id, reason=reason)

    def reissue(self, group: RunningGroup) -> None:
        """From the beginning, under its own id, as soon as the gate lets it; the store has dropped
        its rows.
        """
        del self.groups[group.group_id]
        opened = OpenGroup(
            group_id=group.group_id, prompt_index=group.prompt.index, version=group.version
        )
        bisect.insort(self.to_reissue, opened, key=lambda opened: opened.group_id)
        self._cancel(group)

    def roll_back(self, step: int) -> None:
        """The steps after `step` are lost: their groups and all that are under way are issued
        again, once the samplers have loaded the weights of this step.
        """
        for group in list(self.groups.values()):
            if self.store.is_live(group.rows[0]):  # else it went with its shard
                self.store.drop_group(group.group_id)
            self.reissue(group)
        self.ledger.resume(step=step)
        self.to_reissue = deque(self.ledger.open_groups)
        self.gate.restore(num_trained=self.ledger.num_trained, version=step, wait_for_samplers=True)
        self.step = step

    def _cancel(self, group: RunningGroup) -> None:
        self.gate.release()
        self.cancelled.put_nowait(group)
        self.may_issue.notify()

    @contextlib.contextmanager
    def waiting(self, stage: str, reason: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.observer.waited(stage, reason, self.clock() - start)
