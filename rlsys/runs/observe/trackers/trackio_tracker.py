"""Trackio. This is the only module that imports trackio.

Trackio's own variables say where runs go: to TRACKIO_DIR, by default ~/.cache/huggingface/trackio,
to a Space with TRACKIO_SPACE_ID, or to a server with TRACKIO_SERVER_URL. Each line has a step of
its own, so an evaluation has the step whose model was evaluated. Trackio cannot remove lines.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from typing import Any

from rlsys.metrics import EVAL_STEP, STEP
from rlsys.runs.observe.trackers.tracker_protocol import (
    COLUMNS,
    PROJECT,
    SAMPLES,
    Evaluation,
    Event,
    Opened,
    Position,
    Samples,
    StepMetrics,
    TrackedRun,
    flat_config,
    table,
)

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioTracker:
    """A run of the project TRACKIO_PROJECT."""

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        """Create or continue the run. Trackio finds it by its name, which is made unique."""
        import trackio

        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        name = run_id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        is_local = not any(os.environ.get(variable) for variable in REMOTE)
        position = _stored(project, name, recorded) if is_local and run_id else recorded
        self._run = trackio.init(
            project=project,
            name=name,
            config=flat_config(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        address = f"trackio show --project {project}  (run {name})"
        return Opened(run_id=name, address=address, position=position)

    def rewind(self, step: int) -> bool:
        """Return False."""
        return False

    def log(self, event: Event) -> None:
        """Log one line."""
        match event:
            case StepMetrics(values=values):
                line: dict[str, Any] = {n: value for n, value in values.items() if n != STEP}
            case Evaluation(values=values):
                line = {EVAL_STEP: event.step, **values}
            case Samples():
                import trackio

                line = {SAMPLES: trackio.Table(columns=list(COLUMNS), data=table(event))}
        self._run.log(line, step=event.step)

    def finish(self, *, failed: bool) -> None:
        """Write or upload what is left."""
        self._run.finish()


def _stored(project: str, name: str, recorded: Position) -> Position:
    """Return the position of a run in Trackio's database.

    Trackio writes twice a second, so a process that was killed may have lost its last lines.
    """
    from trackio.sqlite_storage import SQLiteStorage

    lines = SQLiteStorage.get_logs(project, name)
    steps: dict[str, list[int]] = {"metrics": [0], "evaluation": [-1], "samples": [0]}
    for line in lines:
        kind = "samples" if SAMPLES in line else "evaluation" if EVAL_STEP in line else "metrics"
        steps[kind].append(int(line[STEP]))
    return replace(recorded, **{kind: max(found) for kind, found in steps.items()})
