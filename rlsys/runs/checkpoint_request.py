"""Requests for a checkpoint from outside of a run: by a preemption hook, a script or a user.

In: a run directory, and an empty file in it, which is the request. So a request needs no process id
and works on every node that sees the directory. Out: the run writes a checkpoint after the current
step, and removes the file when the checkpoint is complete on disk.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from rlsys.runs.run_directory import LOCK_FILE, REQUEST_FILE

LOOK_EVERY_S = 0.2  # network file systems notify nobody of a change


class Outcome(Enum):
    """End of a request."""

    WRITTEN = "the checkpoint is complete"
    NOT_ACTIVE = "no process trains this run"
    TIMEOUT = "the checkpoint is not complete yet"


class CheckpointRequest:
    """The request file of a run, as the run itself sees it."""

    def __init__(self, run: Path) -> None:
        self._path = run / REQUEST_FILE

    def is_pending(self) -> bool:
        """Return whether a checkpoint is requested."""
        return self._path.exists()

    def end(self) -> None:
        """Remove the request: its checkpoint is complete."""
        self._path.unlink(missing_ok=True)


def request_checkpoint(
    run: Path,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """Request a checkpoint of an active run and wait until it is complete.

    Raises:
        OSError: The run directory cannot be written.
    """
    deadline = clock() + timeout_s
    if not is_active(run):
        return Outcome.NOT_ACTIVE
    request = run / REQUEST_FILE
    request.touch()
    while request.exists():
        if not is_active(run):
            return Outcome.NOT_ACTIVE
        if clock() >= deadline:
            return Outcome.TIMEOUT
        sleep(LOOK_EVERY_S)
    return Outcome.WRITTEN


def is_active(run: Path) -> bool:
    """Return whether a process holds the lock of the run directory."""
    try:
        with (run / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
