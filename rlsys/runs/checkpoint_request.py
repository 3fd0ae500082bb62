"""Requests for a checkpoint from outside of a run: by a preemption hook or a user.

In: a run directory, and an empty file in it, which is the request. So a request needs no process id
and works on every node that sees the directory. Out: the run writes a checkpoint after the current
step, and removes the file when the checkpoint is complete on disk.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path

from rlsys.runs.run_files import LOCK_FILE, REQUEST_FILE

LOOK_EVERY_S = 0.2  # network file systems do not report changes


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


def request_checkpoints(
    runs: Iterable[Path],
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[Path, Outcome]:
    """Request a checkpoint of each active run and wait until all are complete.

    Raises:
        OSError: A run directory cannot be written.
    """
    deadline = clock() + timeout_s
    outcomes = {run: Outcome.TIMEOUT if is_active(run) else Outcome.NOT_ACTIVE for run in runs}
    waiting = [run for run, outcome in outcomes.items() if outcome is Outcome.TIMEOUT]
    for run in waiting:
        (run / REQUEST_FILE).touch()
    while True:
        for run in tuple(waiting):
            if not (run / REQUEST_FILE).exists():
                outcomes[run] = Outcome.WRITTEN
            elif not is_active(run):
                outcomes[run] = Outcome.NOT_ACTIVE
            else:
                continue
            waiting.remove(run)
        if not waiting or clock() >= deadline:
            return outcomes
        sleep(LOOK_EVERY_S)


def is_active(run: Path) -> bool:
    """Return whether a process holds the lock of the run directory."""
    try:
        with (run / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False
