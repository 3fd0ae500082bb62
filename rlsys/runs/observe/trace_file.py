"""trace.json: the events of every actor, for ui.perfetto.dev and chrome://tracing.

Input: the batches of the tracers. Output: the Trace Event Format, a JSON array of events with times
in microseconds (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). A
process of the format is an actor, a thread of it is one of the actor's tracks, and time 0 is the
beginning of the run.

The array is closed after each batch, so the file is complete JSON between two writes, also on a
full disk. If a crash interrupts a write, viewers still load the events before it, and a resumed run
removes the incomplete part and continues on the same time line.

Bound. At most `max_bytes`. The batch that would exceed them and all later ones are left out, and an
event at the end of the file says so.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import regular_file
from rlsys.common.atomic_files import write_all, writing
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.errors import InvalidValue
from rlsys.runs.observe.trace import (
    ARROW_IN,
    COUNTER,
    INSTANT,
    SPAN,
    Clock,
    Event,
    TraceBatch,
    unix_clock,
)

MAX_BYTES = 256 * 2**20  # about two million events; a viewer takes seconds to load that
RESERVED_BYTES = 1024  # for the event that marks the file as full
CLOSING = b"\n]\n"


class TraceFile:
    """Writer of trace.json, which continues an existing file.

    Raises:
        InvalidValue: The existing file was edited or damaged.
    """

    def __init__(
        self, path: Path, *, clock: Clock | None = None, max_bytes: int = MAX_BYTES
    ) -> None:
        self._clock = clock or unix_clock()
        self._max_bytes = max_bytes
        self._full = False
        self.num_lost = 0
        """Number of events left out, because a tracer or this file was full."""
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[int, str], int] = {}
        self._origin_ns = 0
        self._path = path
        self._end = self._continue() if path.exists() else 0
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(self._end)
        entries = []
        if self._end == 0:
            self._origin_ns = self._clock()
            entries.append(_metadata("origin", 0, 0, unix_ns=self._origin_ns))
        self._append(entries)

    def write(self, batch: TraceBatch) -> None:
        """Append the events of one process."""
        self.num_lost += batch.num_lost
        if self._full:
            self.num_lost += len(batch.events)
            return
        entries: list[dict[str, Any]] = []
        pid = self._pid(batch.process, entries)
        for event in batch.events:
            tid = self._tid(pid, event[2], entries)
            entries.append(_entry(event, pid, tid, self._origin_ns))
        if not self._append(entries):
            self._full = True
            self.num_lost += len(batch.events)
            name = f"trace.json is full ({self._max_bytes} bytes): later events are missing"
            now_us = (self._clock() - self._origin_ns) / 1000
            mark = {"ph": INSTANT, "name": name, "ts": now_us, "pid": 0, "tid": 0, "s": "g"}
            self._append([mark], reserved=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _pid(self, process: str, entries: list[dict[str, Any]]) -> int:
        if process not in self._pids:
            self._pids[process] = len(self._pids) + 1
            entries.append(_metadata("process_name", self._pids[process], 0, name=process))
        return self._pids[process]

    def _tid(self, pid: int, track: str, entries: list[dict[str, Any]]) -> int:
        if not track:  # counters and overlapping spans belong to the process
            return 0
        if (pid, track) not in self._tids:
            tid = self._tids[pid, track] = len(self._tids) + 1
            entries.append(_metadata("thread_name", pid, tid, name=track))
        return self._tids[pid, track]

    def _append(self, entries: list[dict[str, Any]], *, reserved: int = RESERVED_BYTES) -> bool:
        """Replace the closing bracket by entries and a new one. Return False if they do not fit."""
        lines = (dump_json(entry, allow_nan=False, separators=(",", ":")) for entry in entries)
        text = b"".join(b",\n" + line.encode() for line in lines)
        if self._end == 0:
            text = b"[" + text.removeprefix(b",")
        elif text and self._end + len(text) + len(CLOSING) > self._max_bytes - reserved:
            return False
        with writing(self._path):
            try:
                self._file.seek(self._end)
                write_all(self._file, text + CLOSING)
            except OSError:
                self._remove_partial_write()
                raise
        self._end += len(text)
        return True

    def _remove_partial_write(self) -> None:
        """Restore the file as it was before. Only existing bytes are overwritten."""
        closing = CLOSING if self._end else b""
        with contextlib.suppress(OSError):
            self._file.seek(self._end)
            write_all(self._file, closing)
        self._file.truncate(self._end + len(closing))

    def _continue(self) -> int:
        """Read the ids of processes and tracks. Return where the last complete event ends."""
        position = end = 0
        try:
            with regular_file(self._path).open("rb") as file:
                for line in file:
                    position += len(line)
                    if not (line.startswith(b"{") and line.endswith(b"\n")):
                        continue
                    end = position - (2 if line.endswith(b",\n") else 1)
                    if line.startswith(b'{"ph":"M"'):
                        self._restore(parse_json(line.rstrip(b",\n")))
        except ValueError as error:
            raise InvalidValue(
                str(self._path),
                rule=f"a resumed run cannot continue it ({error})",
                fix="Move it away: the run continues with a new one.",
            ) from error
        return end

    def _restore(self, metadata: object) -> None:
        match metadata:
            case {"name": "origin", "args": {"unix_ns": int(unix_ns)}}:
                self._origin_ns = unix_ns
            case {"name": "process_name", "pid": int(pid), "args": {"name": str(name)}}:
                self._pids[name] = pid
            case {
                "name": "thread_name",
                "pid": int(pid),
                "tid": int(tid),
                "args": {"name": str(name)},
            }:
                self._tids[pid, name] = tid
            case _:
                raise ValueError("it has metadata of another kind")


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _entry(event: Event, pid: int, tid: int, origin_ns: int) -> dict[str, Any]:
    phase, name, _, start_ns, number, args = event
    ts = (start_ns - origin_ns) / 1000
    entry: dict[str, Any] = {"ph": phase, "name": name, "ts": ts, "pid": pid, "tid": tid}
    if phase == SPAN:
        entry["dur"] = number / 1000
    elif phase == COUNTER:
        args = {"value": number}
    elif phase == INSTANT:
        entry["s"] = "t"  # drawn on its own track only
    else:
        entry["cat"] = "rlsys"
        entry["id"] = number
        if phase == ARROW_IN:
            entry["bp"] = "e"  # ends at the span around it, not at the next one
    if args is not None:
        entry["args"] = args
    return entry
