"""Every group ends exactly once: trained, or dropped with a reason.

    prompt ──► skipped(reason), or:

    issued ──► trained(step)
      │ ▲
      │ └───── reissued(version): sampled anew, because what it had is lost
      └──────► dropped(reason)

A pure state machine that writes each event to a sink before it counts. The file of a run
(`ledger.jsonl`) holds the events in order, one JSON object a line:

    {"event": "issued", "group": 7, "prompt": 7, "version": 2}
    {"event": "reissued", "group": 7, "version": 3}
    {"event": "trained", "step": 4, "groups": [6, 7], "oldest_versions": [3, 3]}
    {"event": "dropped", "group": 8, "reason": "stale"}
    {"event": "resumed", "step": 3}
    {"event": "skipped", "prompt": 8, "reason": "retired"}

`version` is the oldest that any sampler had when the group was (re)issued; `oldest_versions` are
those of each group's oldest token, in the order of `groups`. `resumed` says that training went back
to `step`: groups that were trained in later steps are open again, under their own ids. So the file
is enough to resume a run and to audit it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import GrowingFile, Tally, regular_file
from rlsys.common.safe_json import dump_json, parse_json

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
    """A group would end twice, an unknown one would end, a step would be missing or not be whole:
    a bug, or a damaged file, never a user's mistake.
    """


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
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
        """Groups, each counted once however often it was issued again."""
        return len(self._open) + len(self._trained_in) + len(self._dropped)

    @property
    def step(self) -> int:
        """Optimizer steps in the history that counts, less those that a resume took back."""
        return len(self._trained)

    @property
    def num_trained(self) -> int:
        return self.step * self._groups_per_step

    @property
    def num_dropped(self) -> int:
        return len(self._dropped)

    @property
    def drop_reasons(self) -> Counter[str]:
        return Counter(self._dropped.values())

    @property
    def open_groups(self) -> list[OpenGroup]:
        """In the order of their ids."""
        return [self._open[group_id] for group_id in sorted(self._open)]

    @property
    def next_prompt(self) -> int:
        """Index of the first prompt that no group has been issued for, and that was not skipped."""
        return self._next_prompt

    @property
    def num_skipped(self) -> int:
        """Prompts."""
        return self._num_skipped

    def issue(self, group_id: int, *, prompt_index: int, version: int) -> None:
        self._apply(
            {"event": "issued", "group": group_id, "prompt": prompt_index, "version": version}
        )

    def skip(self, *, reason: str) -> None:
        """No group is issued for the next prompt."""
        self._apply({"event": "skipped", "prompt": self._next_prompt, "reason": reason})

    def reissue(self, group_id: int, *, version: int) -> None:
        """An open group is sampled anew, from its first token: what it had is lost."""
        self._apply({"event": "reissued", "group": group_id, "version": version})

    def train(self, oldest_versions: Mapping[int, int], *, step: int) -> None:
        """The groups of one optimizer step, each with the oldest policy_version among its tokens.
        One event for all, so that a step is recorded whole or not.
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
        self._apply({"event": "dropped", "group": group_id, "reason": reason})

    def resume(self, *, step: int) -> None:
        """Go back to the weights that have `step` optimizer steps behind them."""
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
                        f"prompt {event['prompt']} was skipped where {self._next_prompt} is next"
                    )
            case "reissued" | "dropped":
                self._check_open(event["group"], event["event"])
            case "trained":
                self._check_step(event)
            case "resumed":
                if not 0 <= event["step"] <= self.step:
                    raise LedgerError(
                        f"step {event['step']} cannot be gone back to: {self.step} are trained"
                    )

    def _check_step(self, event: Event) -> None:
        step, groups, oldest_versions = event["step"], event["groups"], event["oldest_versions"]
        if step != self.step + 1:
            raise LedgerError(f"step {step} was trained after step {self.step}")
        if len(set(groups)) != self._groups_per_step or len(groups) != len(oldest_versions):
            raise LedgerError(
                f"step {step} trained groups {groups} with tokens of versions {oldest_versions}: "
                f"a step has {self._groups_per_step} different groups, each with its version"
            )
        for group_id in groups:
            self._check_open(group_id, "trained")

    def _check_open(self, group_id: int, end: str) -> None:
        if group_id not in self._open:
            ended = self._ended(group_id) or "never issued"
            raise LedgerError(f"group {group_id} cannot be {end}: {ended}")

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
        """The ledger that these events lead to. Raises LedgerError, with the number of the event,
        where they contradict each other.
        """
        ledger = cls(sink, groups_per_step=groups_per_step)
        for number, event in enumerate(events, start=1):
            try:
                ledger._apply(event, record=False)
            except LedgerError as error:
                raise LedgerError(f"event {number}: {error}") from None
        return ledger


def check_fields(event: Event) -> None:
    """Raises LedgerError for what is no event."""
    what = event.get("event") if isinstance(event, dict) else None
    if not isinstance(what, str) or what not in FIELDS:
        raise LedgerError(f"{event!r} is no event of a ledger")
    fields = FIELDS[what]
    if event.keys() != {"event", *fields} or any(
        type(event[name]) is not kind for name, kind in fields.items()
    ):
        raise LedgerError(f"{event!r} has not just the fields {sorted(fields)} of their types")
    for name, kind in fields.items():
        if kind is list and any(type(item) is not int for item in event[name]):
            raise LedgerError(f"{event!r}: {name} holds more than integers")


class LedgerFile:
    """Appends events to a file; each reaches the operating system before it counts. What a crash
    left of an event behind the last line is dropped.
    """

    def __init__(self, path: Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        self._file = GrowingFile(path, kept=Tally().plus(content[: content.rfind(b"\n") + 1]))

    @property
    def tally(self) -> Tally:
        """What stands there."""
        return self._file.tally

    def __call__(self, event: Event) -> None:
        self._file.append(dump_json(event).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> list[Event]:
    """The events of a ledger file, less a last line that a crash cut off.

    Raises ValueError for a broken line anywhere else, with its number.
    """
    events: list[Event] = []
    for number, line in enumerate(regular_file(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            events.append(parse_json(line))
        except ValueError as error:
            raise ValueError(
                f"{path} line {number} is no JSON ({error}); it was edited or damaged"
            ) from error
    return events
