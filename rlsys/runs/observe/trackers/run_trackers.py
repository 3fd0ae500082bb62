"""All trackers of a run.

Every call returns within microseconds, except `close`, which has a time limit. Messages for the
user are collected, because the supervising threads must not print: `messages` returns them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlsys.common.number_text import counted
from rlsys.runs.observe.trackers.tracker_kinds import TRACKERS, TrackerKind
from rlsys.runs.observe.trackers.tracker_process import TrackerLimits, TrackerProcess

COPY_COMMAND = "python -m rlsys.runs.observe.trackers.copy_run"


class RunTrackers:
    """Trackers of one run.

    Args:
        names: Names of trackers.
        directory: Directory of the run.
        first_step: Step from which a resumed run continues.
        kinds: All kinds by name.
        limits: Time limits of each tracker.
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: Path,
        *,
        first_step: int = 0,
        kinds: Mapping[str, TrackerKind] = TRACKERS,
        limits: TrackerLimits | None = None,
    ) -> None:
        self._directory = directory
        self._limits = limits or TrackerLimits()
        self._last_step = first_step
        self._messages: deque[tuple[bool, str]] = deque()
        self._trackers = [
            TrackerProcess(
                name,
                kinds[name],
                directory,
                first_step=first_step,
                limits=self._limits,
                note=lambda text: self._messages.append((False, text)),
                warn=lambda text: self._messages.append((True, text)),
            )
            for name in names
        ]
        self._is_closed = False

    def stepped(self, step: int) -> None:
        """Announce that the lines and rollouts of a step are written."""
        self._last_step = step
        for tracker in self._trackers:
            tracker.stepped(step)

    def evaluated(self) -> None:
        """Announce that an evaluation is written."""
        self.stepped(self._last_step)

    def go_back(self, step: int) -> None:
        """Announce that training goes back to a step. Call it before lines are removed."""
        self._last_step = step
        for tracker in self._trackers:
            tracker.go_back(step)

    def messages(self) -> Iterator[tuple[bool, str]]:
        """Yield new messages for the user, each once, and whether it is a warning."""
        while self._messages:
            yield self._messages.popleft()

    def close(self, *, failed: bool) -> None:
        """Let the trackers log what is left, and end those that take too long. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for tracker in self._trackers:
            tracker.finish(failed=failed)
        limit_s = self._limits.failed_finish_s if failed else self._limits.finish_s
        deadline = time.monotonic() + limit_s
        for tracker in self._trackers:
            has_ended = tracker.wait(max(0.0, deadline - time.monotonic()))
            if text := self._shortfall(tracker, "" if has_ended else f"{limit_s:g} s"):
                self._messages.append((True, text))

    def _shortfall(self, tracker: TrackerProcess, ended_after: str) -> str:
        """Return a warning about a tracker that failed or lacks steps, or "".

        `ended_after` is the time after which it was ended, or empty.
        """
        parts = []
        if ended_after:
            parts.append(f"it was ended {ended_after} after the end of the run")
        if tracker.num_failures > 1:
            parts.append(f"it failed {counted(tracker.num_failures, 'time')}")
        if skipped := tracker.skipped:
            parts.append(f"it could not take {', '.join(skipped)}")
        if (position := tracker.position.metrics) < self._last_step:
            parts.append(
                f"it has {position} of {counted(self._last_step, 'step')}; {COPY_COMMAND} "
                f"{self._directory} {tracker.name} copies the others"
            )
        return f"tracker {tracker.name}: {'; '.join(parts)}" if parts else ""
