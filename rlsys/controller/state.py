"""State that the controller's loops share: the running groups, and the functions that end them."""

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
    """Data of a rollout that no column of the store holds, until its group is trained.

    Rewards and advantages are columns. `components` and `text` are for the recorder only.
    """

    index: int = 0  # within the group
    is_greedy: bool = False  # the greedy baseline of its group, which is not trained on
    finished: FinishedRollout | None = None  # None while it is being sampled
    components: Mapping[str, float] = field(default_factory=dict)  # parts of its reward
    text: RolloutText | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return self._finished.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens."""
        return self._finished.num_tokens

    @property
    def num_injected(self) -> int:
        """Number of completion tokens that are not trained on."""
        return self._finished.num_injected

    @property
    def num_by_seat(self) -> Sequence[int]:
        """Number of trained tokens of each seat."""
        return self._finished.num_by_seat

    @property
    def finish_reason(self) -> FinishReason:
        """Reason of the rollout's end."""
        return self._finished.finish_reason

    @property
    def min_version(self) -> int:
        """Oldest version among its tokens."""
        return self._finished.min_version

    @property
    def _finished(self) -> FinishedRollout:
        assert self.finished is not None, "the rollout is still being sampled"
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
    """A prompt and its rollouts, from issue to the end."""

    group_id: int
    prompt: Prompt
    rows: Sequence[int]  # ids in the store
    rollouts: list[RolloutNote]
    version: int = 0  # the oldest that any of its tokens may have
    attempt: int = 0  # number of earlier issues, whose rollouts are not used
    unassigned: list[int] = field(default_factory=list)  # indices of rollouts without a replica

    @property
    def lengths(self) -> GroupLengths:
        """Numbers of tokens of the prompt and of all completions."""
        return GroupLengths(
            prompt=self.rollouts[0].num_prompt_tokens,
            completions=[note.num_tokens for note in self.rollouts],
        )

    def origin(self, index: int) -> RolloutMetadata:
        """Return the metadata of a finished rollout."""
        return RolloutMetadata(
            group_id=self.group_id,
            index=index,
            prompt_text=self.prompt.text,
            metadata=self.prompt.metadata,
            finish_reason=self.rollouts[index].finish_reason,
        )

    def of_trained(self, values: Sequence[float]) -> list[float]:
        """Select from values of all rollouts those of the ones that are trained on."""
        notes = zip(values, self.rollouts, strict=True)
        return [value for value, note in notes if not note.is_greedy]

    def num_trained_tokens(self, seats: Sequence[int] | None = None) -> int:
        """Count the completion tokens that are trained on, of these seats or (None) of all."""
        if seats is None:
            return sum(note.num_tokens - note.num_injected for note in self.rollouts)
        by_seat = (one for note in self.rollouts for one in enumerate(note.num_by_seat))
        return sum(num for seat, num in by_seat if seat in seats)

    @property
    def oldest_version(self) -> int:
        """The oldest version among the tokens of its rollouts, which have finished.

        NO_VERSION, which is newer than every other, if nothing was sampled.
        """
        return min(note.min_version for note in self.rollouts)


@dataclass(frozen=True, kw_only=True)
class OpenWork:
    """Unfinished work that a checkpoint keeps and a resumed run continues from.

    Attributes:
        finished: Finished rollouts of groups that are not trained.
        parts: Parts of running rollouts, those of each rollout in their order.
        coefficients: Coefficients of the next step, by stage.
        nodes: In a resumed run, the node with the finished rollouts of each group.
    """

    finished: Sequence[FinishedRollout] = ()
    parts: Sequence[StepPart] = ()
    coefficients: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[int, str] = field(default_factory=dict)


NO_WORK = OpenWork()


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """An optimizer step, for the observer."""

    step: int
    result: StepResult
    groups: Sequence[RunningGroup]
    columns: Mapping[int, Mapping[str, Sequence[float]]]  # per group, columns with a value per row


class Observer(Protocol):
    """The receiver of a run's events. It never changes the run."""

    def step_trained(self, trained: TrainedStep) -> None:
        """Record an optimizer step."""

    def rollouts_sampled(self, num_rollouts: int, *, num_tokens: int) -> None:
        """Record finished rollouts, some of which may be dropped later."""

    def weights_loaded(
        self, manifest: WeightManifest, *, sync_s: float, pauses_s: Sequence[float]
    ) -> None:
        """Record a load of weights and the pauses of the replicas."""

    def reward_failed(self, failure: RewardFailure) -> None:
        """Record a rollout without a reward."""

    def group_refused(self, function: str, columns: Mapping[str, Sequence[float]]) -> None:
        """Record a group that a function refused, with the values of its rollouts."""

    def parts_missing(self, parts: Sequence[str], given: Sequence[str], num_episodes: int) -> None:
        """Record parts of flow.play(parts=) that no episode gave, and the parts that were given."""

    def replica_died(self, name: str, reason: str, *, num_continued: int, num_dropped: int) -> None:
        """Record the death of a replica.

        Of its unfinished rollouts, `num_continued` continue on other replicas, and the groups of
        `num_dropped` are dropped.
        """

    def replica_joined(self, name: str, *, version: int) -> None:
        """Record a replica that samples with a version from now on."""

    def trainer_restarted(self, reason: str, *, step: int, lost_steps: int, seconds: float) -> None:
        """Record a restart after `step` optimizer steps; undo the records of the lost steps."""

    def devices_lent(self, seconds: float, *, num_rollouts: int) -> None:
        """Record that the trainer's devices were lent, and the rollouts that finished there."""

    def not_lent(self, reason: str) -> None:
        """Record a step for which they were not lent, and why."""

    def waited(self, stage: str, reason: str, seconds: float) -> None:
        """Record a time in which a loop had nothing to do."""


class RunState:
    """The groups that are issued and have not ended; `step` counts optimizer steps.

    The run ends after `last_step`, which `end_after` lowers for an early stop.
    """

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
        self.last_step = config.num_steps
        self.clock = clock
        self.gate = AdmissionGate(
            groups_per_step=config.prompts_per_step,
            max_staleness=config.max_version_lag,
            num_steps=config.num_steps,
            over_issue=config.asynchrony.over_issue,
        )
        self.gate.restore(num_trained=ledger.num_trained, version=step)
        # In the order of their last issue, as in the store.
        self.groups: dict[int, RunningGroup] = {}
        self.to_reissue = deque(ledger.open_groups)  # in the order of their ids
        # Ended groups that replicas may still sample.
        self.cancelled: asyncio.Queue[RunningGroup] = asyncio.Queue()
        # Notified when the gate, the replicas or the unassigned rollouts have changed.
        self.may_issue = AsyncCondition()
        self.progress = AsyncCondition()  # any kind of progress

    def end_after(self, step: int) -> None:
        """Make `step` the last one, unless the run ends before it anyway."""
        if step < self.last_step:
            self.last_step = step
            self.gate.end_after(step)

    def oldest_version_allowed(self, num_steps: int) -> int:
        """Return the oldest version of tokens that may be trained after `num_steps` steps."""
        return num_steps - self.config.max_version_lag

    def records(self, group_id: int) -> bool:
        """Return whether rollouts.jsonl records the group."""
        config = self.config
        return group_id % config.prompts_per_step < config.observe.record_groups

    def drop(self, group_id: int, reason: str) -> None:
        """End a group without training it; a new group is issued for it."""
        group = self.groups.pop(group_id)
        self.store.drop_group(group_id)
        self.ledger.drop(group_id, reason=reason)
        self._cancel(group)

    def drop_rest(self, reason: str) -> None:
        """End all groups that are left after the last step."""
        self.gate.close()
        for group_id in list(self.groups):
            self.drop(group_id, reason)
        while self.to_reissue:
            self.ledger.drop(self.to_reissue.popleft().group_id, reason=reason)

    def reissue(self, group: RunningGroup) -> None:
        """Issue a group again from its prompt, under its id, once the gate opens.

        The store must have dropped its rows.
        """
        del self.groups[group.group_id]
        opened = OpenGroup(
            group_id=group.group_id, prompt_index=group.prompt.index, version=group.version
        )
        bisect.insort(self.to_reissue, opened, key=lambda opened: opened.group_id)
        self._cancel(group)

    def roll_back(self, step: int) -> None:
        """Undo the steps after `step`: issue their groups and all running groups again.

        Groups are issued once the samplers have loaded the weights of this step.
        """
        for group in list(self.groups.values()):
            if self.store.is_live(group.rows[0]):  # else it was lost with its shard
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
        """Report the duration of the block to the observer as waiting time."""
        start = self.clock()
        try:
            yield
        finally:
            self.observer.waited(stage, reason, self.clock() - start)
