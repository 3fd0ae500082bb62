"""SwanLab. This is the only module that imports swanlab.

A step that SwanLab has is not replaced, and it cannot remove what was logged. It has no tables of
text, so a sample is a text.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from rlsys.metrics import EVAL_STEP, STEP
from rlsys.runs.observe.trackers.tracker_protocol import (
    PROJECT,
    SAMPLES,
    TEXT_COLUMNS,
    Evaluation,
    Event,
    Opened,
    Position,
    Samples,
    StepMetrics,
    TrackedRun,
)


class OnlineSwanlab:
    """A run on SwanLab's server."""

    mode: Literal["online", "offline"] = "online"

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        """Create or continue the run in the project SWANLAB_PROJECT."""
        import swanlab

        run_id = run_id or uuid.uuid4().hex[:21]
        directory = run.files / "swanlab"
        directory.mkdir(parents=True, exist_ok=True)
        settings = swanlab.Settings()
        settings.merge_settings(
            {"interactive": False, "probe": {"monitor": False, "requirements": False}}
        )
        self._run = swanlab.init(
            mode=self.mode,
            project=os.environ.get("SWANLAB_PROJECT") or PROJECT,
            name=run.name,
            id=run_id,
            resume="allow",
            log_dir=str(directory),
            config=dict(run.config),
            settings=settings,
        )
        address = f"project {PROJECT}, run {run_id}" if self.mode == "online" else str(directory)
        return Opened(run_id=run_id, address=address, position=recorded)

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
                import swanlab

                line = {SAMPLES: [swanlab.Text(_text(row)) for row in event.rows]}
        self._run.log(line, step=event.step)

    def finish(self, *, failed: bool) -> None:
        """Upload what is left."""
        if failed:
            self._run.finish("crashed", error="The run failed or was interrupted.")
        else:
            self._run.finish()


class OfflineSwanlab(OnlineSwanlab):
    """Files of a run in the run's directory, which `swanlab sync` uploads."""

    mode = "offline"


def _text(row: Mapping[str, Any]) -> str:
    """Return a sample as text: its numbers, its prompt and its completion."""
    numbers = ", ".join(f"{name} {x}" for name, x in row.items() if name not in TEXT_COLUMNS)
    return "\n\n".join([numbers, *(f"{name}: {row[name]}" for name in TEXT_COLUMNS)])
