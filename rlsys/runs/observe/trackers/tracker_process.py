"""Supervision of one tracker's process, from the process of the run.

    RunTrackers ── step N ──► TrackerProcess ── pipe ──► tracker_child.py ──► library of the tracker
                                   ▲                          │
                                   └── doing, error, end ─────┘   a thread reads these messages

The tracker reads the run's files, so the pipe carries only step numbers, and a write never blocks.
A tracker that raises, hangs or dies is started again after a growing delay and continues with the
event that failed. An event that fails MAX_TRIES times is skipped.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlsys.common.background_tasks import start_thread
from rlsys.common.safe_json import parse_json
from rlsys.runs.observe.trackers.tracker_child import START
from rlsys.runs.observe.trackers.tracker_kinds import TrackerKind
from rlsys.runs.observe.trackers.tracker_protocol import Position
from rlsys.runs.observe.trackers.tracker_state import (
    TrackerState,
    log_file,
    state_file,
    tracker_files,
)

CHILD = Path(__file__).with_name("tracker_child.py")
MAX_TRIES = 3  # of one event
READ_BYTES = 2**16
EXIT_S = 5.0  # between a process's last message and its end


@dataclass(frozen=True, kw_only=True)
class TrackerLimits:
    """Time limits of a tracker, in seconds."""

    start_s: float = 300.0
    """Start: the process, the import, the opening of the run. Past it the process is ended."""
    operation_s: float = 300.0
    """One event, or the end. Past it the process is ended."""
    first_delay_s: float = 5.0
    """Before the first restart. It doubles with each failure."""
    max_delay_s: float = 600.0
    finish_s: float = 60.0
    """From the end of the run until trackers that still work are ended."""
    failed_finish_s: float = 8.0
    """The same for a run that failed or was interrupted. An event loop that is blocked for longer
    is taken for one that waits for a dead Ray (actors/cluster/local_ray.py)."""


class RestartPolicy:
    """Decide after each failure when to start again, and which events to skip."""

    def __init__(self, limits: TrackerLimits) -> None:
        self._limits = limits
        self._tries: Counter[str] = Counter()
        self.num_failures = 0

    def failed(self, event: str | None) -> float:
        """Count a failure during an event, or outside of events, and return the delay in s."""
        self.num_failures += 1
        if event is not None:
            self._tries[event] += 1
        delay_s = self._limits.first_delay_s * 2.0 ** min(self.num_failures - 1, 32)
        return min(delay_s, self._limits.max_delay_s)

    @property
    def skipped(self) -> list[str]:
        """Events that failed too often."""
        return sorted(event for event, tries in self._tries.items() if tries >= MAX_TRIES)


class TrackerProcess:
    """A tracker in a process of its own.

    Args:
        name: Name of the tracker in the configuration.
        kind: Which tracker it is.
        directory: Directory of the run.
        first_step: Resume point: the last step that is trained. Later ones are trained again.
        limits: Time limits.
        note: Called with the address of the tracker's run, in another thread.
        warn: Called with the cause of the first failure, in another thread.
    """

    def __init__(
        self,
        name: str,
        kind: TrackerKind,
        directory: Path,
        *,
        first_step: int,
        limits: TrackerLimits,
        note: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.name = name
        self._kind = kind
        self._directory = directory
        self._limits = limits
        self._note = note
        self._warn = warn
        self._policy = RestartPolicy(limits)
        self._lock = threading.Lock()  # of the following
        self._process: subprocess.Popen[bytes] | None = None
        self._last_step = first_step
        self._back_to: int | None = first_step  # the tracker has not yet confirmed it
        self._is_failed_run: bool | None = None  # None: the run has not ended
        self._is_abandoned = False
        self._has_address = False
        self._ending = threading.Event()
        self._thread = start_thread(
            self._supervise, name=f"rlsys-tracker-{name}", fail=self._supervision_failed
        )

    def stepped(self, step: int) -> None:
        """Announce that the files have everything up to a step."""
        with self._lock:
            self._last_step = step
            self._send(f"step {step}")

    def go_back(self, step: int) -> None:
        """Announce that later steps will be removed from the files. Call it before that."""
        with self._lock:
            self._last_step = step
            self._back_to = step if self._back_to is None else min(step, self._back_to)
            if not self._send(f"back {self._back_to}"):
                self._kill()  # its successor learns the step at its start

    def finish(self, *, failed: bool) -> None:
        """Announce the end of the run."""
        with self._lock:
            self._is_failed_run = failed
            if not self._send(f"finish {failed:d} {self._last_step}"):
                self._kill()
            self._ending.set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the tracker has ended within a time after `finish`; otherwise end it."""
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        with self._lock:
            self._is_abandoned = True
            self._kill()
        self._thread.join(EXIT_S)
        return False

    @property
    def num_failures(self) -> int:
        """Number of failures of the tracker."""
        return self._policy.num_failures

    @property
    def skipped(self) -> list[str]:
        """Events that the tracker could not take, as "metrics 3"."""
        return self._policy.skipped

    @property
    def position(self) -> Position:
        """Recorded position of the tracker, the first one if the record cannot be read."""
        try:
            return TrackerState.read(state_file(self._directory, self._kind.extra)).position
        except (OSError, ValueError, TypeError, LookupError):
            return Position()

    def _supervise(self) -> None:
        num_left = MAX_TRIES  # attempts after the end of the run
        while num_left:
            num_left -= self._ending.is_set()
            life = _Life(self._limits, on_address=self._show_address, on_back=self._went_back)
            with self._started() as process:
                cause = life.attend(process)
            if cause is None or self._is_abandoned:
                return
            delay_s = self._policy.failed(life.event)
            if self._policy.num_failures == 1:
                self._warn(
                    f"tracker {self.name}: {cause}. The run continues. The tracker is started "
                    "again and gets what it has missed. Its output is in "
                    f"{log_file(self._directory, self._kind.extra)}"
                )
            self._ending.wait(delay_s)

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run a process of the tracker until the block ends."""
        command = [sys.executable, "-P", str(CHILD), self._kind.adapter, self._kind.extra]
        command += [str(self._directory), "--start-s", str(self._limits.start_s)]
        command += ["--operation-s", str(self._limits.operation_s)]
        command += ["--skipped", *self._policy.skipped]
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        tracker_files(self._directory).mkdir(exist_ok=True)
        with log_file(self._directory, self._kind.extra).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # no Ctrl-C, and one group with the library's processes
            )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        with self._lock:
            self._process = process
            if self._is_abandoned:
                self._kill()
            if self._back_to is not None:
                self._send(f"back {self._back_to}")
            self._send(f"step {self._last_step}")
            if self._is_failed_run is not None:
                self._send(f"finish {self._is_failed_run:d} {self._last_step}")
        try:
            yield process
        finally:
            with self._lock:
                self._kill()
                self._process = None
            process.stdin.close()
            assert process.stdout is not None
            process.stdout.close()
            process.wait()

    def _send(self, command: str) -> bool:
        """Send a command if the process exists, and return whether it can get it.

        A command of this length is written as a whole or not at all.
        """
        if self._process is None:
            return True
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), f"{command}\n".encode())
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it has just ended
            return True
        return True

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _went_back(self, step: int) -> None:
        with self._lock:
            if self._back_to == step:
                self._back_to = None

    def _show_address(self, address: str) -> None:
        if not self._has_address:
            self._has_address = True
            self._note(f"{self.name}: {address}")

    def _supervision_failed(self, error: BaseException) -> None:
        self._warn(f"tracker {self.name}: {error}. The run continues without it")


class _Life:
    """State of one process of a tracker, from its messages."""

    def __init__(
        self,
        limits: TrackerLimits,
        *,
        on_address: Callable[[str], None],
        on_back: Callable[[int], None],
    ) -> None:
        self._limits = limits
        self._on_address = on_address
        self._on_back = on_back
        self._doing: str | None = START
        self._error = ""
        self._has_finished = False

    @property
    def event(self) -> str | None:
        """The event during which the process ended, as "metrics 3"."""
        is_event = self._doing is not None and " " in self._doing
        return self._doing if is_event else None

    def attend(self, process: subprocess.Popen[bytes]) -> str | None:
        """Wait for the end, and return the cause if it came too early."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        rest = b""
        since_s = time.monotonic()
        while True:
            limit_s = EXIT_S if self._is_ending else self._limit_s + EXIT_S
            left_s = None if self._waits else max(0.0, since_s + limit_s - time.monotonic())
            if not poller.poll(None if left_s is None else 1000 * left_s):
                break
            if not (data := os.read(descriptor, READ_BYTES)):
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._receive(line)
            since_s = time.monotonic()
        if self._has_finished:
            return None
        if self._error:
            return self._error
        if time.monotonic() - since_s >= self._limit_s:
            return f"it did not answer for {self._limit_s:g} s{self._during}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_S)
        return f"its process ended (exit code {process.returncode}){self._during}"

    def _receive(self, line: bytes) -> None:
        message = parse_json(line)
        if "doing" in message:
            self._doing = message["doing"]
        elif "address" in message:
            self._on_address(message["address"])
        elif "at" in message:
            self._on_back(message["at"])
        elif "error" in message:
            self._error = message["error"] + self._during
        elif "finished" in message:
            self._has_finished = True

    @property
    def _limit_s(self) -> float:
        return self._limits.start_s if self._doing == START else self._limits.operation_s

    @property
    def _waits(self) -> bool:
        return self._doing is None and not self._is_ending

    @property
    def _is_ending(self) -> bool:
        return bool(self._error) or self._has_finished

    @property
    def _during(self) -> str:
        return "" if self._doing is None else f" (during: {self._doing})"
