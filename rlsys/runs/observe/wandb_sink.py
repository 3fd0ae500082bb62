"""Weights & Biases: a mirror of metrics.jsonl and evaluations.jsonl.

This is the only module that imports wandb. Input: the metrics of each step and of each evaluation.
Output: a wandb run, online, or offline in the run's directory, from which `wandb sync` uploads it
later. Mode "off" does nothing and imports nothing.

An evaluation often ends some steps after the step whose model it evaluates. wandb's own step counts
logged lines and only grows, so it is neither of these steps. Training metrics are drawn over
"step", metrics of an evaluation over "eval/step".
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlsys.errors import InvalidValue
from rlsys.metrics import EVAL_STEP, STEP


class WandbSink:
    """Mirror of one run. Its files are in wandb/ in the run directory.

    A resumed run continues its wandb run, whose id is in the directory. Steps that are trained
    again are logged again, under the same "step".

    Raises:
        InvalidValue: wandb is enabled and not installed.
    """

    def __init__(
        self,
        mode: Literal["off", "offline", "online"],
        *,
        name: str,
        directory: Path,
        config: Mapping[str, Any],
    ) -> None:
        self._run: Any = None
        self._defined: set[str] = set()
        if mode == "off":
            return
        try:
            import wandb
        except ImportError as error:
            raise InvalidValue(
                "observe.wandb",
                mode,
                rule=f"needs the wandb package ({error})",
                fix="Install it with pip install 'rlsys[wandb]', or use observe.wandb=\"off\".",
            ) from error
        self._run = wandb.init(
            mode=mode,
            project=os.environ.get("WANDB_PROJECT") or "rlsys",
            name=name,
            id=_run_id(directory / "wandb"),
            resume="allow",
            dir=str(directory),
            config=dict(config),
            # By default, wandb wraps the standard output, on which the console draws, and logs
            # metrics of the machine.
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def log(self, line: Mapping[str, float]) -> None:
        """Log the metrics of an optimizer step."""
        self._log(dict(line), over=STEP)

    def log_evaluation(self, line: Mapping[str, float]) -> None:
        """Log a line of evaluations.jsonl, whose "step" becomes "eval/step"."""
        values = {name: value for name, value in line.items() if name != STEP}
        self._log({EVAL_STEP: line[STEP], **values}, over=EVAL_STEP)

    def _log(self, values: Mapping[str, float], *, over: str) -> None:
        """Log one line, with the metric `over` as the horizontal axis of all others."""
        if self._run is None:
            return
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=None if name == over else over)
        self._defined.update(values)
        self._run.log(values)

    def close(self, *, failed: bool = False) -> None:
        """Upload or write what is left. Idempotent."""
        if self._run is not None:
            self._run.finish(exit_code=1 if failed else 0)
            self._run = None


def _run_id(directory: Path) -> str:
    path = directory / "run_id"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()
