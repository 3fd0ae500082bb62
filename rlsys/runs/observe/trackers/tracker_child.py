"""Process of one tracker: follow the run's files and log their events.

    commands, one a line, on the standard input      messages, JSON lines, on the standard output
    step N      steps up to N are in the files        {"doing": "metrics 3"}   it works on an event
    back N      later steps were removed              {"doing": null}          it waits
                                                      {"at": N}                it went back to N
    finish F N  it ended after step N (F 1: failed)   {"address": ...}         the run is open
                                                      {"error": ...}           it ends
                                                      {"finished": true}       everything is logged

The end of the input means that the run's process has died; the tracker's run then ends as failed.
An operation that exceeds its limit ends the process, also in a library that holds the interpreter's
lock. Whatever libraries print goes to the standard error, a file in the run's directory.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.runs.observe.trackers.run_follower import RunFollower
from rlsys.runs.observe.trackers.tracker_protocol import TrackedRun, Tracker
from rlsys.runs.observe.trackers.tracker_state import TrackerState, state_file, tracker_files
from rlsys.runs.run_files import RunFiles

NICENESS = 10  # the run's own processes go first
START = "start"
MAX_ERROR = 500  # characters of an error's message
READ_BYTES = 2**16


class TrackerChild:
    """A tracker and the files that it follows.

    Args:
        adapter: "module:class" of the tracker.
        extra: Name of its files.
        directory: Directory of the run.
        skipped: Events that the tracker cannot take, as "metrics 3".
        start_s: Time limit of the import and the opening of the run.
        operation_s: Time limit of another operation.
        say: Sends a message to the run's process.
    """

    def __init__(
        self,
        adapter: str,
        extra: str,
        directory: Path,
        *,
        skipped: Sequence[str] = (),
        start_s: float,
        operation_s: float,
        say: Callable[..., None],
    ) -> None:
        files = RunFiles(directory)
        self._adapter = adapter
        self._skipped = skipped
        self._start_s, self._operation_s = start_s, operation_s
        self._say = say
        self._state_file = state_file(directory, extra)
        self._state = TrackerState.read(self._state_file)
        entry = parse_json(files.config.read_bytes())
        self._run = TrackedRun(
            name=directory.resolve().name,
            files=tracker_files(directory).resolve(),
            config=entry["config"],
        )
        self._follower = RunFollower(files, samples_every=entry["config"]["observe"]["print_every"])
        self._last_step = 0

    def open(self) -> Tracker:
        """Return the tracker with its run open."""
        with self._doing(START):
            module, _, name = self._adapter.partition(":")
            tracker: Tracker = getattr(importlib.import_module(module), name)()
            opened = tracker.open(self._run, self._state.run_id, self._state.position)
            self._record(run_id=opened.run_id, position=opened.position)
        self._say(address=opened.address)
        return tracker

    def handle(self, tracker: Tracker, command: str) -> bool:
        """Carry out a command and return whether the run has ended."""
        word, *numbers = command.split()
        if word == "back":
            self._go_back(tracker, int(numbers[0]))
        elif word == "step" or len(numbers) == 2:
            self._last_step = int(numbers[-1])
        self._log_new_events(tracker)
        if word == "finish":
            with self._doing("finish"):
                tracker.finish(failed=numbers[0] == "1")
            self._say(finished=True)
        return word == "finish"

    def _go_back(self, tracker: Tracker, step: int) -> None:
        self._last_step = step
        self._follower.restart()
        position = self._state.position
        with self._doing("rewind"):
            if position != position.cut(step) and tracker.rewind(step):
                self._record(position=position.cut(step))
        self._say(at=step)

    def _log_new_events(self, tracker: Tracker) -> None:
        for event in self._follower.events(self._state.position, last_step=self._last_step):
            key = f"{event.kind} {event.step}"
            if key not in self._skipped:
                with self._doing(key):
                    tracker.log(event)
            self._record(position=self._state.position.after(event))

    def _record(self, **changes: object) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        self._state.write(self._state_file)

    @contextlib.contextmanager
    def _doing(self, operation: str) -> Iterator[None]:
        """End this process if the block takes too long."""
        self._say(doing=operation)
        limit_s = self._start_s if operation == START else self._operation_s
        faulthandler.dump_traceback_later(limit_s, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._say(doing=None)


def commands(descriptor: int) -> Iterator[str]:
    """Yield the commands, and a failed end of the run at the end of the input."""
    rest = b""
    while data := os.read(descriptor, READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode() for line in lines)
    yield "finish 1"  # without a step: what was announced last


def main() -> None:
    """Run the process until the run has ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("adapter")
    parser.add_argument("extra")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--skipped", nargs="*", default=[])
    parser.add_argument("--start-s", type=float, required=True)
    parser.add_argument("--operation-s", type=float, required=True)
    arguments = parser.parse_args()
    channel = os.dup(1)
    os.dup2(2, 1)
    os.nice(NICENESS)

    def say(**message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the run's process has died
            os.write(channel, dump_json(message).encode() + b"\n")

    try:
        child = TrackerChild(
            arguments.adapter,
            arguments.extra,
            arguments.directory,
            skipped=arguments.skipped,
            start_s=arguments.start_s,
            operation_s=arguments.operation_s,
            say=say,
        )
        tracker = child.open()
        for command in commands(0):
            if child.handle(tracker, command):
                break
    except BaseException as error:
        text = " ".join(str(error).split())
        say(error=f"{type(error).__name__}: {text}"[:MAX_ERROR])
        raise
    # Threads that the library has left behind must not keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
