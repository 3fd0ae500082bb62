"""Every group ends exactly once: trained, or dropped with a reason.

    issued ──► trained(step)
       │
       └─────► dropped(reason)

A pure state machine that writes each event to a sink before it counts. The file of a run
(`ledger.jsonl`) holds the events in order and is enough to audit the run and to resume it:
`resumed(step)` says that training after `step` was lost with the weights that it had made, so that
groups trained later than that are open again and are issued anew under their own id.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Event = dict[str, Any]


class LedgerError(RuntimeError):
    """A group would end twice, or an unknown one would end: a bug, never a user's mistake."""


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    group_id: int
    prompt_index: int


class Ledger:
    def __init__(self, sink: Callable[[Event], None]) -> None:
        self._sink = sink
        self._open: dict[int, OpenGroup] = {}
        self._trained: dict[int, tuple[int, OpenGroup]] = {}  # group id -> (step, group)
        self._dropped: dict[int, str] = {}
        self._next_prompt = 0

    @property
    def num_issued(self) -> int:
        return len(self._open) + len(self._trained) + len(self._dropped)

    @property
    def num_trained(self) -> int:
        return len(self._trained)

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
        """Index of the first prompt that no group has been issued for."""
        return self._next_prompt

    def issue(self, group_id: int, *, prompt_index: int, version: int) -> None:
        self._apply(
            {"event": "issued", "group": group_id, "prompt": prompt_index, "version": version}
        )

    def train(self, group_ids: Iterable[int], *, step: int) -> None:
        """One event for the whole optimizer step, so that a step is recorded whole or not."""
        self._apply({"event": "trained", "groups": sorted(group_ids), "step": step})

    def drop(self, group_id: int, *, reason: str) -> None:
        self._apply({"event": "dropped", "group": group_id, "reason": reason})

    def resume(self, *, step: int) -> None:
        """Go back to the state that a checkpoint after `step` optimizer steps belongs to."""
        self._apply({"event": "resumed", "step": step})

    def _apply(self, event: Event, *, record: bool = True) -> None:
        self._check(event)
        if record:
            self._sink(event)
        match event["event"]:
            case "issued":
                group = OpenGroup(group_id=event["group"], prompt_index=event["prompt"])
                self._open[group.group_id] = group
                self._next_prompt = max(self._next_prompt, group.prompt_index + 1)
            case "trained":
                for group_id in event["groups"]:
                    self._trained[group_id] = (event["step"], self._open.pop(group_id))
            case "dropped":
                del self._open[event["group"]]
                self._dropped[event["group"]] = event["reason"]
            case "resumed":
                lost = [g for g, (step, _) in self._trained.items() if step > event["step"]]
                for group_id in lost:
                    self._open[group_id] = self._trained.pop(group_id)[1]

    def _check(self, event: Event) -> None:
        match event["event"]:
            case "issued":
                if self._ended(event["group"]) or event["group"] in self._open:
                    raise LedgerError(f"group {event['group']} was issued already")
            case "trained" | "dropped":
                for group_id in event.get("groups", [event.get("group")]):
                    if group_id not in self._open:
                        ended = self._ended(group_id) or "never issued"
                        raise LedgerError(f"group {group_id} cannot be {event['event']}: {ended}")
            case "resumed":
                pass
            case other:
                raise LedgerError(f"unknown ledger event {other!r}")

    def _ended(self, group_id: int) -> str | None:
        if group_id in self._trained:
            return f"trained in step {self._trained[group_id][0]}"
        if group_id in self._dropped:
            return f"dropped ({self._dropped[group_id]})"
        return None

    @classmethod
    def replay(cls, events: Iterable[Event], sink: Callable[[Event], None]) -> Ledger:
        """The ledger that these events lead to. Raises LedgerError where they contradict."""
        ledger = cls(sink)
        for event in events:
            ledger._apply(event, record=False)
        return ledger


class LedgerFile:
    """Appends events to a file; each reaches the operating system before it counts."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        _cut_torn_line(self._file)

    def __call__(self, event: Event) -> None:
        self._file.write(json.dumps(event).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Onto the disk: called before a checkpoint counts as complete."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut_torn_line(file: IO[bytes]) -> None:
    """Drop a last line without its end: a crash came in the middle of writing it."""
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def read_events(path: Path) -> list[Event]:
    """The events of a ledger file, less a last line that a crash cut off.

    Raises ValueError for a broken line anywhere else, with its number.
    """
    events: list[Event] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            events.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path} line {number} is no JSON ({error}); the ledger was edited or damaged, "
                "restore it from a copy."
            ) from error
    return events
