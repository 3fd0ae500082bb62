"""Audit of a run's files: nothing was lost, repeated or trained too late.

Input: the contents of the files (rlsys.runs.run_history.read_evidence). Output: a list of faults,
which is empty if all of this holds:

- each group is issued once and ends once, trained or dropped, over any number of resumes;
- steps are consecutive and complete, and each counts once in the history that survived;
- prompts are issued in order, none skipped and none repeated;
- no trained token was sampled more than η versions before, or by weights that were lost;
- a group of another run is trained at its place in external.jsonl, unchanged, and once;
- metrics.jsonl has a line for each step, and rollouts.jsonl the groups that it should, with the
  versions in the ledger.

The audit follows the ledger by code of its own, independent of the code that writes the ledger
(rlsys.dataflow.scheduling.ledger), and goes on after a fault to find the others.
"""

from __future__ import annotations

import itertools
import reprlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsys import metrics
from rlsys.common.number_text import counted, span
from rlsys.common.safe_json import canonical
from rlsys.data.row_source import epoch_order
from rlsys.data.swarm.shared_pool import SharedGroup
from rlsys.dataflow.scheduling.ledger import Event, LedgerError, check_fields
from rlsys.runs.observe.records import plain
from rlsys.types import INJECTED, FinishReason


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Contents of a run's files."""

    groups_per_step: int
    group_size: int
    max_staleness: int  # versions of the policy
    num_steps: int  # configured
    recorded_groups: int | None  # of each step in rollouts.jsonl; None: a resume has changed it
    shuffle: bool
    prompt_order: Mapping[str, int] | None  # of the newest checkpoint; None without one
    events: Sequence[Event]
    metrics: Sequence[Mapping[str, Any]]
    rollouts: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[int]  # steps of undamaged ones
    exported: bool  # hf/ holds the undamaged model of the last step
    last_step: int | None = None  # after an early stop less than num_steps
    retires: bool = False  # prompts may be skipped
    injects: bool = False  # completions may hold tokens that are not trained on
    updates_per_step: int = 1  # of the weights; staleness in the metrics counts updates
    external: Mapping[int, SharedGroup | None] = field(default_factory=dict)  # by prompt index

    def sampled(self, record: Mapping[str, Any]) -> Sequence[int]:
        """Return the versions of a rollout's tokens that are trained on."""
        versions: Sequence[int] = record["policy_versions"]
        injects = self.injects or record.get("is_greedy", False) or bool(record.get("turns"))
        return [v for v in versions if v != INJECTED] if injects else versions


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of an audit."""

    faults: Sequence[str]
    summary: str  # one line about the run
    finished: bool  # every step trained, the model exported


def audit(evidence: Evidence) -> Verdict:
    """Return everything that is wrong, and a summary of the run."""
    past = LedgerHistory(evidence)
    past.follow(evidence.events)
    faults = [
        *past.faults,
        *_prompts(past),
        *_end(past, evidence),
        *_metrics(past, evidence),
        *_rollouts(past, evidence),
    ]
    staleness = max((past.staleness(step) for step in past.steps), default=0)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(past.reasons.items()))
    why = f" ({reasons})" if reasons else ""
    summary = (
        f"{past.step} of {counted(evidence.num_steps, 'step')}, "
        f"{counted(len(past.prompts), 'group')} issued, {len(past.trained)} trained, "
        f"{len(past.dropped)} dropped{why}, "
        f"{len(past.open)} open, {past.num_reissued} sampled again, "
        f"{counted(past.num_resumes, 'resume')}, staleness at most {staleness} of "
        f"{evidence.max_staleness}, {counted(len(evidence.checkpoints), 'undamaged checkpoint')}"
    )
    if not evidence.events and not evidence.checkpoints:
        summary = (
            f"none of {counted(evidence.num_steps, 'step')}; it ended before it issued a group"
        )
    return Verdict(faults=faults, summary=summary, finished=past.is_finished)


@dataclass
class LedgerHistory:
    """State of all groups and steps, followed through the events of a ledger."""

    evidence: Evidence
    faults: list[str] = field(default_factory=list)
    prompts: dict[int, int] = field(default_factory=dict)  # by group, in the order of issue
    versions: dict[int, int] = field(default_factory=dict)  # by group, when it was last issued
    skipped: set[int] = field(default_factory=set)  # prompts
    open: set[int] = field(default_factory=set)
    trained: dict[int, int] = field(default_factory=dict)  # step of each group
    dropped: dict[int, str] = field(default_factory=dict)
    steps: dict[int, dict[int, int]] = field(default_factory=dict)  # step -> group -> oldest token
    lost: set[int] = field(default_factory=set)  # open groups that were sampled by lost weights
    step: int = 0
    num_resumes: int = 0
    num_reissued: int = 0

    @property
    def is_finished(self) -> bool:
        """Return whether every step is trained and the model is exported."""
        evidence = self.evidence
        return evidence.exported and self.step == (evidence.last_step or evidence.num_steps)

    @property
    def reasons(self) -> Counter[str]:
        """Numbers of dropped groups by reason."""
        return Counter(self.dropped.values())

    def staleness(self, step: int) -> int:
        """Return the staleness of a step's oldest token, in policy versions."""
        return step - 1 - min(self.steps[step].values(), default=step - 1)

    def follow(self, events: Sequence[Event]) -> None:
        """Apply the events, and record the faults in them."""
        for number, event in enumerate(events, start=1):
            try:
                check_fields(event)
            except LedgerError as error:
                self.faults.append(f"ledger event {number}: {error}")
                continue
            for fault in getattr(self, f"_{event['event']}")(event):
                self.faults.append(f"ledger event {number}: {fault}")

    def _issued(self, event: Event) -> list[str]:
        group = event["group"]
        if group in self.prompts:
            return [f"group {group} is issued twice"]
        self.prompts[group] = event["prompt"]
        self.open.add(group)
        return self._sampled_by(event)

    def _skipped(self, event: Event) -> list[str]:
        self.skipped.add(event["prompt"])
        if self.evidence.retires:
            return []
        return [f"prompt {event['prompt']} is skipped, and data.retire_at is not set"]

    def _reissued(self, event: Event) -> list[str]:
        group = event["group"]
        if group not in self.open:
            return [f"group {group} is issued again, but {self._state(group)}"]
        self.num_reissued += 1
        self.lost.discard(group)
        return self._sampled_by(event)

    def _sampled_by(self, event: Event) -> list[str]:
        group, version = event["group"], event["version"]
        self.versions[group] = version
        if not 0 <= version <= self.step:
            return [f"group {group} is sampled by version {version} after {self.step} steps"]
        return []

    def _dropped(self, event: Event) -> list[str]:
        group = event["group"]
        if group not in self.open:
            return [f"group {group} is dropped, but {self._state(group)}"]
        self.open.remove(group)
        self.dropped[group] = event["reason"]
        return []

    def _trained(self, event: Event) -> list[str]:
        step, groups, oldest_versions = event["step"], event["groups"], event["oldest_versions"]
        faults = []
        if step != self.step + 1:
            faults.append(f"step {step} follows step {self.step}")
        if len(groups) != self.evidence.groups_per_step or len(groups) != len(oldest_versions):
            faults.append(
                f"step {step} has {len(groups)} groups with {len(oldest_versions)} versions, it "
                f"needs {self.evidence.groups_per_step}"
            )
        for group, oldest in zip(groups, oldest_versions, strict=False):
            if group not in self.open:
                faults.append(f"step {step} trains group {group}, but {self._state(group)}")
                continue
            self.open.remove(group)
            self.trained[group] = step
            if group in self.lost:
                faults.append(f"step {step} trains group {group}, sampled by weights that are lost")
            issued = self.versions[group]
            earliest = max(issued, step - 1 - self.evidence.max_staleness)
            if not earliest <= oldest <= step - 1:
                faults.append(
                    f"step {step} trains group {group} with tokens of version {oldest}; it was "
                    f"issued at {issued}, and the step may train versions {earliest} to {step - 1}"
                )
        self.step = step
        self.steps[step] = dict(zip(groups, oldest_versions, strict=False))
        return faults

    def _resumed(self, event: Event) -> list[str]:
        step = event["step"]
        self.num_resumes += 1
        if not 0 <= step <= self.step:
            return [f"step {step} is resumed after {self.step} steps"]
        for taken_back in [s for s in self.steps if s > step]:
            for group in self.steps.pop(taken_back):
                if self.trained.get(group) == taken_back:
                    del self.trained[group]
                    self.open.add(group)
        self.lost |= {group for group in self.open if self.versions[group] > step}
        self.step = step
        return []

    def _state(self, group: int) -> str:
        if group in self.trained:
            return f"was trained in step {self.trained[group]}"
        if group in self.dropped:
            return f"was dropped ({self.dropped[group]})"
        return "is open" if group in self.open else "was never issued"


def _prompts(past: LedgerHistory) -> list[str]:
    kept = (prompt for prompt in itertools.count() if prompt not in past.skipped)
    return [
        f"group {group} has prompt {prompt} where prompt {expected} follows"
        for expected, (group, prompt) in zip(kept, past.prompts.items(), strict=False)
        if prompt != expected
    ]


def _end(past: LedgerHistory, evidence: Evidence) -> list[str]:
    faults = [
        f"the checkpoint of step {step} is after the end of the ledger, step {past.step}"
        for step in evidence.checkpoints
        if step > past.step
    ]
    if past.step > evidence.num_steps:
        faults.append(f"{past.step} steps are trained, {evidence.num_steps} are configured")
    if past.is_finished:
        faults += [f"group {group} never ended" for group in sorted(past.open)]
        if past.step not in evidence.checkpoints:
            faults.append(f"the run has ended without an undamaged checkpoint of step {past.step}")
    return faults


def _metrics(past: LedgerHistory, evidence: Evidence) -> list[str]:
    faults = []
    steps = [line[metrics.STEP] for line in evidence.metrics]
    # A process that is killed may have the last step in the ledger alone; a resume trains it again.
    lag = 0 if past.is_finished else 1
    if steps != [*range(1, len(steps) + 1)] or not past.step - lag <= len(steps) <= past.step:
        shown = counted(len(steps), "line") + (
            f", of steps {span(steps[0], steps[-1])}" if steps else ""
        )
        faults.append(
            f"metrics.jsonl has {shown}, not one for each of {counted(past.step, 'step')} in order"
        )
    rollouts_per_step = evidence.groups_per_step * evidence.group_size
    for line in evidence.metrics:
        step = line[metrics.STEP]
        if step not in past.steps:
            continue
        for name, expected in (
            (metrics.POLICY_VERSION, step),
            (metrics.ROLLOUTS_TRAINED, step * rollouts_per_step),
            (metrics.STALENESS_MAX, _staleness_in_updates(past, evidence, line)),
        ):
            if line.get(name) != expected:
                faults.append(
                    f"metrics.jsonl has {name}={line.get(name)} for step {step}, the ledger "
                    f"{expected}"
                )
    return faults


def _staleness_in_updates(past: LedgerHistory, evidence: Evidence, line: Mapping[str, Any]) -> int:
    """Return what the metrics should have: any of the step's updates may have the oldest token."""
    updates = evidence.updates_per_step
    least = updates * past.staleness(line[metrics.STEP])
    recorded = line.get(metrics.STALENESS_MAX)
    return int(recorded) if recorded is not None and least <= recorded < least + updates else least


def _rollouts(past: LedgerHistory, evidence: Evidence) -> list[str]:
    faults = []
    found: defaultdict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    last = 0
    for record in evidence.rollouts:
        step, group, index = record["step"], record["group_id"], record["index"]
        name = f"rollouts.jsonl: rollout {index} of group {group} in step {step}"
        if step < last:
            faults.append(f"{name} follows one of step {last}")
        last = max(last, step)
        if step > past.step:
            faults.append(f"{name} is after the end of the ledger, step {past.step}")
        elif group not in past.steps.get(step, {}):
            faults.append(f"{name}, but that step did not train the group")
        elif any(one["index"] == index for one in found[step, group]):
            faults.append(f"{name} is there twice")
        else:
            found[step, group].append(record)
            faults += [f"{name} {fault}" for fault in _tokens(record, evidence)]
    for (step, group), records in found.items():
        name = f"rollouts.jsonl: group {group} in step {step}"
        if sorted(record["index"] for record in records) != [*range(evidence.group_size)]:
            if step < past.step or past.is_finished:
                faults.append(f"{name} lacks some of its {evidence.group_size} rollouts")
            continue
        sampled = [v for one in records for v in evidence.sampled(one)]
        if sampled and min(sampled) != past.steps[step][group]:
            faults.append(
                f"{name} has its oldest token from version {min(sampled)}, the ledger has "
                f"{past.steps[step][group]}"
            )
    if evidence.recorded_groups is not None:
        num_complete = past.step if past.is_finished else len(evidence.metrics) - 1
        faults += [
            f"rollouts.jsonl lacks group {group} of step {step}"
            for step, groups in past.steps.items()
            if step <= num_complete
            for group in groups
            if group % evidence.groups_per_step < evidence.recorded_groups
            and (step, group) not in found
        ]
    return faults + _order(past, evidence, found) + _external(past, evidence, found)


def _tokens(record: Mapping[str, Any], evidence: Evidence) -> list[str]:
    """Return what is wrong with the versions of a recorded rollout's tokens."""
    step, versions = record["step"], record["policy_versions"]
    max_staleness = evidence.max_staleness
    if len(versions) != len(record["token_ids"]):
        return [f"has {len(record['token_ids'])} tokens and {len(versions)} versions"]
    versions = evidence.sampled(record)
    if not versions:
        return []
    if record.get("is_greedy", False):
        return ["is a greedy baseline, but has tokens that are trained on"]
    faults = []
    if max(versions) > step - 1:
        faults.append(f"has a token of version {max(versions)}, which is later")
    if step - 1 - min(versions) > max_staleness:
        faults.append(
            f"has a token of version {min(versions)}, {step - 1 - min(versions)} steps old where "
            f"{max_staleness} are allowed"
        )
    # Branches of an episode may have been sampled at the same time.
    is_tree = any(turn["branch"] for turn in record.get("turns", ()))
    if list(versions) != sorted(versions) and not is_tree:
        faults.append("has tokens whose versions go back")
    if record["staleness"] != step - 1 - min(versions):
        faults.append(
            f"has staleness {record['staleness']}, but its tokens have {step - 1 - min(versions)}"
        )
    return faults


def _order(
    past: LedgerHistory,
    evidence: Evidence,
    found: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]],
) -> list[str]:
    """Return the groups whose prompt is not at its place in the data.

    Prompts are issued in the order of the seed. In all epochs, one place has the same text.
    """
    if evidence.prompt_order is None:
        return []
    seed, num_prompts = evidence.prompt_order["seed"], evidence.prompt_order["num_prompts"]
    texts: dict[int, tuple[str, int]] = {}  # place in the data -> text, group
    faults = []
    for (step, group), records in found.items():
        if past.prompts.get(group, -1) < 0:  # reported by another check
            continue
        epoch, place = divmod(past.prompts[group], num_prompts)
        if evidence.shuffle:
            place = int(epoch_order(seed, epoch, num_prompts)[place])
        for record in records:
            if record.get("shared_by"):  # a prompt of another run replaces it
                continue
            text, first = texts.setdefault(place, (record["prompt"], group))
            if record["prompt"] != text:
                faults.append(
                    f"rollouts.jsonl: group {group} in step {step} has the prompt "
                    f"{reprlib.repr(record['prompt'])} and group {first} had "
                    f"{reprlib.repr(text)}, which the seed puts at the same place"
                )
    return faults


def _external(
    past: LedgerHistory,
    evidence: Evidence,
    found: Mapping[tuple[int, int], Sequence[Mapping[str, Any]]],
) -> list[str]:
    """Return what is wrong with groups of other runs.

    Each must be taken once, and be what was trained at its place.
    """
    taken = Counter(group.key for group in evidence.external.values() if group is not None)
    faults = [
        f"external.jsonl has {key} {count} times" for key, count in taken.items() if count > 1
    ]
    for (step, group), records in found.items():
        external = evidence.external.get(past.prompts.get(group, -1))
        peer = external.peer if external is not None else ""
        for record in records:
            shared_by = record.get("shared_by", "")
            name = f"rollouts.jsonl: rollout {record['index']} of group {group} in step {step}"
            if shared_by != peer:
                faults.append(
                    f"{name} is of {shared_by or 'the run itself'}, external.jsonl has one of "
                    f"{peer or 'the run itself'}"
                )
            elif external is not None and (different := _different(record, external)):
                faults.append(
                    f"{name} is not from group {external.group_id} of {peer}: external.jsonl has "
                    f"another {different}"
                )
    return faults


def _different(record: Mapping[str, Any], group: SharedGroup) -> str | None:
    """Return how a rollout differs from those of the group that it should belong to."""
    index: int = record["index"]
    if not 0 <= index < len(group.completions):
        return "number of rollouts"
    completion = group.completions[index]
    asked = record["prompt"] if record.get("asked") is None else record["asked"]
    for what, here, there in (
        ("completion", record.get("completion"), completion.text),
        ("finish_reason", record.get("finish_reason") == FinishReason.LENGTH, completion.truncated),
        ("prompt", asked, plain(group.asked)),
        ("row", record.get("row", {}), plain(group.row)),
    ):
        if canonical(here) != canonical(there):
            return what
    return None
