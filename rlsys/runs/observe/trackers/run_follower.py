"""Reader of the events that a run's files gain while the run is under way.

    metrics.jsonl, evaluations.jsonl, rollouts.jsonl ──► RunFollower ──► events in order of steps

The files keep what a tracker has missed, so nothing is queued in memory, and a tracker that starts
late, or again, gets everything.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsys.metrics import STEP
from rlsys.runs.observe.step_log import parse_line
from rlsys.runs.observe.trackers.tracker_protocol import (
    COLUMNS,
    TEXT_COLUMNS,
    Evaluation,
    Event,
    Position,
    Samples,
    StepMetrics,
)
from rlsys.runs.run_files import RunFiles

MAX_TEXT = 8_000  # characters of a prompt or a completion; longer ones are cut in the middle


class RunFollower:
    """Reader of the events of a run.

    Args:
        files: Files of the run.
        samples_every: Steps between samples, as on the console (observe.print_every).
    """

    def __init__(self, files: RunFiles, *, samples_every: int) -> None:
        self._metrics = _Tail(files.metrics)
        self._evaluations = _Tail(files.evaluations)
        self._rollouts = _Tail(files.rollouts)
        self._samples_every = samples_every

    def restart(self) -> None:
        """Read all files from their beginning again, because lines were removed from them."""
        for tail in (self._metrics, self._evaluations, self._rollouts):
            tail.restart()

    def events(self, position: Position, *, last_step: int) -> Iterator[Event]:
        """Yield the events after `position` that were not read before, in the order of steps.

        Lines of steps after `last_step` are left for the next call: they may be incomplete, or
        about to be removed.
        """
        found = heapq.merge(
            self._step_metrics(last_step),
            self._evaluated(last_step),
            self._samples(last_step),
            key=lambda event: event.step,
        )
        return (event for event in found if not position.has(event))

    def _step_metrics(self, last_step: int) -> Iterator[Event]:
        for line in self._metrics.lines(last_step):
            yield StepMetrics(step=line[STEP], values=line)

    def _evaluated(self, last_step: int) -> Iterator[Event]:
        for line in self._evaluations.lines(last_step):
            step = line.pop(STEP)
            yield Evaluation(step=step, values=line)

    def _samples(self, last_step: int) -> Iterator[Event]:
        lines = self._rollouts.lines(last_step)
        for step, records in itertools.groupby(lines, key=lambda line: int(line[STEP])):
            if step == 1 or step % self._samples_every == 0:
                yield Samples(step=step, rows=tuple(map(_row, records)))


class _Tail:
    """Complete lines after an offset of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.restart()

    def restart(self) -> None:
        """Begin with the first line."""
        self._offset = self._number = 0

    def lines(self, last_step: int) -> Iterator[dict[str, Any]]:
        """Yield the lines up to a step and move the offset behind them."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                value = parse_line(line, self._path, self._number + 1)
                if value[STEP] > last_step:
                    return
                self._offset += len(line)
                self._number += 1
                yield value


def _row(record: dict[str, Any]) -> dict[str, Any]:
    row = {name: record.get(name) for name in COLUMNS}
    return row | {name: _shortened(str(row[name])) for name in TEXT_COLUMNS}


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
