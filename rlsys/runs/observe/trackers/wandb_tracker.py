"""Weights & Biases. This is the only module that imports wandb.

An evaluation often ends some steps after the step whose model it evaluates. wandb's own step counts
logged lines and only grows, so it is neither of these steps. Training metrics are drawn over
"step", metrics of an evaluation over "eval/step". wandb cannot remove what was logged.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any, Literal

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
    table,
)


class OnlineWandb:
    """A run on wandb's server."""

    mode: Literal["online", "offline"] = "online"

    def __init__(self) -> None:
        self._run: Any = None
        self._defined: set[str] = set()

    def open(self, run: TrackedRun, run_id: str | None, recorded: Position) -> Opened:
        """Create or continue the run in the project WANDB_PROJECT."""
        import wandb

        run_id = run_id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            mode=self.mode,
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=str(run.files),
            config=dict(run.config),
            # The process has no output of its own, and metrics of the machine are Ray's.
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        return Opened(run_id=run_id, address=self._run.url or self._run.dir, position=recorded)

    def rewind(self, step: int) -> bool:
        """Return False."""
        return False

    def log(self, event: Event) -> None:
        """Log one line."""
        match event:
            case StepMetrics():
                self._log(event.values, over=STEP)
            case Evaluation():
                self._log({EVAL_STEP: event.step, **event.values}, over=EVAL_STEP)
            case Samples():
                import wandb

                rows = wandb.Table(columns=list(COLUMNS), data=table(event))
                self._log({STEP: event.step, SAMPLES: rows}, over=STEP)

    def _log(self, values: Mapping[str, Any], *, over: str) -> None:
        """Log a line with the metric `over` as the horizontal axis of all others."""
        for name in values.keys() - self._defined:
            if name != SAMPLES:
                self._run.define_metric(name, step_metric=None if name == over else over)
        self._defined.update(values)
        self._run.log(dict(values))

    def finish(self, *, failed: bool) -> None:
        """Upload what is left.

        wandb's service writes the end of the file after `finish` has returned, and `teardown`
        waits for the end of the service.
        """
        import wandb

        self._run.finish(exit_code=1 if failed else 0)
        wandb.teardown()


class OfflineWandb(OnlineWandb):
    """Files of a run in the run's directory, which `wandb sync` uploads."""

    mode = "offline"
