"""Trackers for tests, healthy and sick. They write what they get to trackers/fake.jsonl."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.runs.observe.trackers.tracker_kinds import TrackerKind
from rlsys.runs.observe.trackers.tracker_protocol import (
    Event,
    Opened,
    Position,
    Samples,
    TrackedRun,
)

BAD_STEP = 3


def kind(name: str) -> TrackerKind:
    """The kind of a tracker of this module."""
    return TrackerKind(adapter=f"{__name__}:{name}", extra="fake")


def logged(directory: Path) -> list[dict[str, Any]]:
    """What the fake tracker of a run has, without the openings."""
    path = directory / "trackers" / "fake.jsonl"
    lines = [parse_json(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["kind"] != "open"]


def openings(directory: Path) -> list[dict[str, Any]]:
    path = directory / "trackers" / "fake.jsonl"
    lines = [parse_json(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "open"]


def block() -> None:
    """Never return."""
    threading.Event().wait()


class Healthy:
    """Cannot remove anything."""

    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        self.path = run.files / "fake.jsonl"
        self.marker = run.files / "failed"
        self.write(kind="open", run_id=run_id, name=run.name, pid=os.getpid())
        return Opened(run_id=run_id or "first", address="a file", position=recorded)

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(dump_json(line) + "\n")

    def rewind(self, step: int) -> bool:
        return False

    def log(self, event: Event) -> None:
        if event.kind == "metrics" and event.step == BAD_STEP:
            self.at_bad_step()
        found: Any = event.rows if isinstance(event, Samples) else event.values
        self.write(kind=event.kind, step=event.step, values=found)

    def at_bad_step(self) -> None:
        """Nothing."""

    def finish(self, *, failed: bool) -> None:
        self.write(kind="finish", failed=failed)

    def is_first_time(self) -> bool:
        if self.marker.exists():
            return False
        self.marker.touch()
        return True


class Rewinding(Healthy):
    def rewind(self, step: int) -> bool:
        lines = [parse_json(line) for line in self.path.read_text().splitlines()]
        kept = [line for line in lines if line.get("step", 0) <= step]
        self.path.write_text("".join(dump_json(line) + "\n" for line in kept))
        return True


class RaisesOnce(Healthy):
    def at_bad_step(self) -> None:
        if self.is_first_time():
            raise ConnectionError("no route\nto host")


class ExitsOnce(Healthy):
    def at_bad_step(self) -> None:
        if self.is_first_time():
            raise SystemExit(3)


class KilledOnce(Healthy):
    def at_bad_step(self) -> None:
        if self.is_first_time():
            os.kill(os.getpid(), signal.SIGKILL)


class HangsOnce(Healthy):
    def at_bad_step(self) -> None:
        if self.is_first_time():
            block()


class HoldsTheLockOnce(Healthy):
    """Hangs in C code, so that no other thread of its process runs."""

    def at_bad_step(self) -> None:
        if self.is_first_time():
            re.match(r"(a+)+$", "a" * 60 + "b")


class RefusesOneEvent(Healthy):
    def at_bad_step(self) -> None:
        raise ValueError("a name that it does not take")


class HangsInOpen(Healthy):
    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        block()
        raise AssertionError


class RaisesInOpen(Healthy):
    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        raise PermissionError("no key")


class HangsInFinish(Healthy):
    def finish(self, *, failed: bool) -> None:
        block()


class HangsInLog(Healthy):
    def at_bad_step(self) -> None:
        block()
