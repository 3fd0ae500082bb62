"""TensorBoard event files. This is the only module that imports tensorboard.

Neither torch nor TensorFlow is needed. Scalars are 32-bit floats, as TensorBoard shows them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rlsys.common.safe_json import dump_json
from rlsys.metrics import EVAL_STEP, STEP, TIME_UNIX_S
from rlsys.runs.observe.trackers.tracker_protocol import (
    COLUMNS,
    SAMPLES,
    TEXT_COLUMNS,
    Evaluation,
    Event,
    Opened,
    Position,
    Samples,
    StepMetrics,
    TrackedRun,
    flat_config,
)


class TensorboardTracker:
    """Event files in trackers/tensorboard of the run's directory."""

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        """Begin another event file, which continues the earlier ones."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = run.files / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(directory))
        if run_id is None:
            rows = [[name, dump_json(value)] for name, value in flat_config(run.config).items()]
            self._add(0, time.time(), _text("config", [["option", "value"], *rows]))
        return Opened(run_id="tensorboard", address=_command(directory), position=recorded)

    def rewind(self, step: int) -> bool:
        """Mark a new start, from which on TensorBoard ignores earlier points of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event as EventRecord
        from tensorboard.compat.proto.event_pb2 import SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(EventRecord(wall_time=time.time(), step=step + 1, session_log=start))
        self._writer.flush()
        return True

    def log(self, event: Event) -> None:
        """Write an event to the file."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        match event:
            case StepMetrics(values=values):
                scalars = {name: value for name, value in values.items() if name != STEP}
                wall_time = values.get(TIME_UNIX_S, time.time())
            case Evaluation(values=values):
                scalars = {EVAL_STEP: event.step, **values}
                wall_time = time.time()
            case Samples():
                rows = [[_cell(name, row[name]) for name in COLUMNS] for row in event.rows]
                self._add(event.step, time.time(), _text(SAMPLES, [[*COLUMNS], *rows]))
                return
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()]
        )
        self._add(event.step, wall_time, summary)

    def _add(self, step: int, wall_time: float, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as EventRecord

        self._writer.add_event(EventRecord(wall_time=wall_time, step=step, summary=summary))
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


def _command(directory: Path) -> str:
    return f"tensorboard --logdir {directory}"


def _text(tag: str, rows: list[list[str]]) -> Any:
    """Return a summary with a table, whose first row is its header."""
    import numpy as np
    from tensorboard.plugins.text.summary import text_pb

    # The text of a damaged character has a half of it, which UTF-8 does not encode.
    cells = [[cell.encode(errors="replace") for cell in row] for row in rows]
    return text_pb(tag, np.array(cells, dtype=object))


def _cell(name: str, value: object) -> str:
    """Return a cell in Markdown. Texts are blocks of code, so that they are shown as they are."""
    if name in TEXT_COLUMNS:
        return "    " + str(value).replace("\n", "\n    ")
    return "" if value is None else str(value)
