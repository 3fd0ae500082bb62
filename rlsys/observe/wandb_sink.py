"""Weights & Biases: a mirror of metrics.jsonl. The only module that imports wandb.

In: the metrics of each step. Out: a wandb run, online, or offline in the run's directory, from
where `wandb sync` uploads it later. Mode "off" does nothing and imports nothing.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlsys.metrics import EVAL_STEP, STEP


class WandbSink:
    """Mirrors one run. `directory` is the run directory; files go to `directory`/wandb.

    A resumed run continues the wandb run of the one before: its id lies in the directory. Steps
    that are trained again keep the values that wandb has already.

    Raises ValueError where wandb is asked for and not installed.
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
        if mode == "off":
            return
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f'observe.wandb="{mode}" needs the wandb package ({error}); install it with '
                "pip install 'rlsys[wandb]', or use observe.wandb=\"off\"."
            ) from error
        self._run = wandb.init(
            mode=mode,
            project=os.environ.get("WANDB_PROJECT") or "rlsys",
            name=name,
            id=_run_id(directory / "wandb"),
            resume="allow",
            dir=str(directory),
            config=dict(config),
            # Without these wandb wraps the standard output, which the console draws on, and logs
            # metrics of the machine, which belong to its own agents.
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def log(self, line: Mapping[str, float]) -> None:
        if self._run is not None:
            self._run.log(dict(line), step=int(line[STEP]))

    def log_late(self, line: Mapping[str, float]) -> None:
        """Of an evaluation, which ends some steps after its own: shown with the next step that is
        logged, and its own as "eval/step"."""
        if self._run is not None:
            told = {name: value for name, value in line.items() if name != STEP}
            self._run.log(told | {EVAL_STEP: line[STEP]}, commit=False)

    def close(self, *, failed: bool = False) -> None:
        """Upload, or write, what is left. Idempotent."""
        if self._run is not None:
            self._run.finish(exit_code=1 if failed else 0)
            self._run = None


def _run_id(directory: Path) -> str:
    path = directory / "run_id"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()
