"""The ledger of groups: each ends exactly once, trained or dropped with a reason.

    prompt ──► skipped(reason), or:

    issued ──► trained(step)
      │ ▲
      │ └───── reissued(version): sampled again, because its rollouts are lost
      └──────► dropped(reason)

A pure state machine that writes each event to a sink before it counts. The file of a run
(`ledger.jsonl`) holds the events in order, one JSON object a line:

    {"event": "issued", "group": 7, "prompt": 7, "version": 2}
    {"event": "reissued", "group": 7, "version": 3}
    {"event": "trained", "step": 4, "groups": [6, 7], "oldest_versions": [3, 3]}
    {"event": "dropped", "group": 8, "reason": "stale"}
    {"event": "resumed", "step": 3}
    {"event": "skipped", "prompt": 8, "reason": "retired"}

`version` is the oldest version of any sampler when the group was (re)issued. `oldest_versions` are
those of each group's oldest token, in the order of `groups`. `resumed` means that training went
back to `step`: groups of later steps are open again, under their ids. So the file is enough to
resume a run and to audit it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import GrowingFile, Tally, regular_file
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue

Event = dict[str, Any]

# The fields of each event.
FIELDS: dict[str, dict[str, type]] = {
    "issued": {"group": int, "prompt": int, "version": int},
    "reissued": {"group": int, "version": int},
    "trained": {"step": int, "groups": list, "oldest_versions": list},
    "dropped": {"group": int, "reason": str},
    "resumed": {"step": int},
    "skipped": {"prompt": int, "reason": str},
}


class LedgerError(RuntimeError):
    """A contradiction between events, such as a group that ends twice or a missing step.

    The cause is a bug or a damaged file, never a user's mistake.
    """


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    """A group that was issued and has not ended."""

    group_id: int
    prompt_index: int
    version: int  # when it was issued, or issued again


class Ledger:
    """The history of a run whose optimizer steps train `groups_per_step` groups each."""

    def __init__(self, sink: Callable[[Event], None], *, groups_per_step: int) -> None:
        self._sink = sink
        self._groups_per_step = groups_per_step
        self._open: dict[int, OpenGroup] = {}
        self._trained: list[list[OpenGroup]] = []  # by step, the first at 0
        self._trained_in: dict[int, int] = {}  # group id -> step
        self._dropped: dict[int, str] = {}
        self._next_prompt = 0
        self._num_skipped = 0

    @property
    def num_issued(self) -> int:
        """Number of groups; issuing a group again does not count."""
        return len(self._open) + len(self._trained_in) + len(self._dropped)

    @property
    def step(self) -> int:
        """Number of optimizer steps, without those that a resume has undone."""
        return len(self._trained)

    @property
    def num_trained(self) -> int:
        """Number of groups in these steps."""
        return self.step * self._groups_per_step

    @property
    def num_dropped(self) -> int:
        """Number of dropped groups."""
        return len(self._dropped)

    @property
    def drop_reasons(self) -> Counter[str]:
        """Number of dropped groups by reason."""
        return Counter(self._dropped.values())

    @property
    def open_groups(self) -> list[OpenGroup]:
        """Groups that have not ended, by ascending id."""
        return [self._open[group_id] for group_id in sorted(self._open)]

    @property
    def next_prompt(self) -> int:
        """Index of the first prompt that was neither issued nor skipped."""
        return self._next_prompt

    @property
    def num_skipped(self) -> int:
        """Number of skipped prompts."""
        return self._num_skipped

    def issue(self, group_id: int, *, prompt_index: int, version: int) -> None:
        """Record a new group of the next prompt."""
        self._apply(
            {"event": "issued", "group": group_id, "prompt": prompt_index, "version": version}
        )

    def skip(self, *, reason: str) -> None:
        """Record that no group is issued for the next prompt."""
        self._apply({"event": "skipped", "prompt": self._next_prompt, "reason": reason})

    def reissue(self, group_id: int, *, version: int) -> None:
        """Record that an open group is sampled again from its prompt."""
        self._apply({"event": "reissued", "group": group_id, "version": version})

    def train(self, oldest_versions: Mapping[int, int], *, step: int) -> None:
        """Record the groups of an optimizer step, each with the oldest version of its tokens.

        One event has all groups, so a step is recorded completely or not at all.
        """
        group_ids = sorted(oldest_versions)
        self._apply(
            {
                "event": "trained",
                "step": step,
                "groups": group_ids,
                "oldest_versions": [oldest_versions[group_id] for group_id in group_ids],
            }
        )

    def drop(self, group_id: int, *, reason: str) -> None:
        """Record the end of a group that is not trained."""
        self._apply({"event": "dropped", "group": group_id, "reason": reason})

    def resume(self, *, step: int) -> None:
        """Record a return to the weights after `step` optimizer steps."""
        self._apply({"event": "resumed", "step": step})

    def _apply(self, event: Event, *, record: bool = True) -> None:
        self._check(event)
        if record:
            self._sink(event)
        match event["event"]:
            case "issued":
                group = OpenGroup(
                    group_id=event["group"], prompt_index=event["prompt"], version=event["version"]
                )
                self._open[group.group_id] = group
                self._next_prompt += 1
            case "skipped":
                self._next_prompt += 1
                self._num_skipped += 1
            case "reissued":
                group = self._open[event["group"]]
                self._open[group.group_id] = replace(group, version=event["version"])
            case "trained":
                self._trained.append([self._open.pop(group_id) for group_id in event["groups"]])
                self._trained_in.update(dict.fromkeys(event["groups"], event["step"]))
            case "dropped":
                del self._open[event["group"]]
                self._dropped[event["group"]] = event["reason"]
            case "resumed":
                while self.step > event["step"]:
                    for group in self._trained.pop():
                        del self._trained_in[group.group_id]
                        self._open[group.group_id] = group

    def _check(self, event: Event) -> None:
        check_fields(event)
        match event["event"]:
            case "issued":
                if self._ended(event["group"]) or event["group"] in self._open:
                    raise LedgerError(f"group {event['group']} was issued already")
                if (event["group"], event["prompt"]) != (self.num_issued, self._next_prompt):
                    raise LedgerError(
                        f"group {event['group']} was issued for prompt {event['prompt']} where "
                        f"group {self.num_issued} for prompt {self._next_prompt} is next"
                    )
            case "skipped":
                if event["prompt"] != self._next_prompt:
                    raise LedgerError(
                        f"prompt {event['prompt']} was skipped, but {self._next_prompt} is next"
                    )
            case "reissued" | "dropped":
                self._check_open(event["group"], event["event"])
            case "trained":
                self._check_step(event)
            case "resumed":
                if not 0 <= event["step"] <= self.step:
                    raise LedgerError(
                        f"cannot return to step {event['step']}: {self.step} steps are trained"
                    )

    def _check_step(self, event: Event) -> None:
        step, groups, oldest_versions = event["step"], event["groups"], event["oldest_versions"]
        if step != self.step + 1:
            raise LedgerError(f"step {step} was trained after step {self.step}")
        if len(set(groups)) != self._groups_per_step or len(groups) != len(oldest_versions):
            raise LedgerError(
                f"step {step} trained groups {groups} with versions {oldest_versions}: a step has "
                f"{self._groups_per_step} different groups, each with a version"
            )
        for group_id in groups:
            self._check_open(group_id, "trained")

    def _check_open(self, group_id: int, end: str) -> None:
        if group_id not in self._open:
            ended = self._ended(group_id) or "never issued"
            raise LedgerError(f"group {group_id} cannot be {end}: it was {ended}")

    def _ended(self, group_id: int) -> str | None:
        if group_id in self._trained_in:
            return f"trained in step {self._trained_in[group_id]}"
        if group_id in self._dropped:
            return f"dropped ({self._dropped[group_id]})"
        return None

    @classmethod
    def replay(
        cls, events: Iterable[Event], sink: Callable[[Event], None], *, groups_per_step: int
    ) -> Ledger:
        """Return the ledger after these events.

        Raises:
            LedgerError: The events contradict each other. The message has the number of the event.
        """
        ledger = cls(sink, groups_per_step=groups_per_step)
        for number, event in enumerate(events, start=1):
            try:
                ledger._apply(event, record=False)
            except LedgerError as error:
                raise LedgerError(f"event {number}: {error}") from None
        return ledger


def check_fields(event: Event) -> None:
    """Raise LedgerError unless `event` is an event with its fields."""
    name = event.get("event") if isinstance(event, dict) else None
    if not isinstance(name, str) or name not in FIELDS:
        raise LedgerError(f"{event!r} is not an event of a ledger")
    fields = FIELDS[name]
    if event.keys() != {"event", *fields} or any(
        type(event[field]) is not kind for field, kind in fields.items()
    ):
        raise LedgerError(f"{event!r} does not have exactly the fields {sorted(fields)}, typed")
    for field, kind in fields.items():
        if kind is list and any(type(item) is not int for item in event[field]):
            raise LedgerError(f"{event!r}: {field} must hold integers only")


class LedgerFile:
    """A sink that appends events to a file.

    Each event reaches the operating system before it counts. An incomplete last line, which a crash
    can leave, is removed.
    """

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        self._file = GrowingFile(path, kept=Tally().plus(content[: content.rfind(b"\n") + 1]))

    @property
    def tally(self) -> Tally:
        """Length and checksum of the file's content."""
        return self._file.tally

    def __call__(self, event: Event) -> None:
        """Append an event."""
        self._file.append(dump_json(event).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> list[Event]:
    """Return the events of a ledger file, without an incomplete last line.

    Raises:
        InvalidValue: Another line is broken.
    """
    events: list[Event] = []
    for number, line in enumerate(regular_file(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            events.append(parse_json(line))
        except ValueError as error:
            raise InvalidValue(
                f"{path} line {number}",
                rule=f"is not JSON ({error})",
                fix="The file was edited or damaged; restore it from a copy.",
            ) from error
    return events
