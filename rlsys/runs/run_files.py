"""Files of a run. Each run has its own directory.

    runs/<name>/
        config.json      the resolved configuration, versions, git revision, the run's id
        metrics.jsonl    one line per optimizer step
        rollouts.jsonl   sampled rollouts
        ledger.jsonl     how every group ended
        external.jsonl   groups of other runs that were trained on (rollout sharing only)
        trace.json       timeline of all actors, for Perfetto
        report.html      the report page, written when the run ends (rlsys.report)
        plan.json        what the planner knows and predicted; with --plan also plan.toml
        outcome.json     how the run ended; missing while it runs, and after a kill
        profile/         torch profiles of the steps in profile_steps
        checkpoints/     for --resume
        .checkpointed    name of the newest finished checkpoint
        hf/              the trained model in the Hugging Face format
        hf-NAME/         another trained policy of an environment
        evaluations.jsonl, best/    with evaluation.every: one line per evaluation, the best model
        .evaluated       checksums of evaluations.jsonl and best/
        trackers/        files of the trackers, such as TensorBoard's, and what each of them has

A run whose model.path is empty trains a model that the recipe builds from its seed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import regular_file
from rlsys.common.manifest import OnBytes, ignore_bytes
from rlsys.common.option_names import option
from rlsys.common.safe_json import parse_json
from rlsys.errors import InvalidValue
from rlsys.runs.checkpoint import find_checkpoints
from rlsys.runs.export_seal import export_faults, is_exported

LOCK_FILE = ".lock"
REQUEST_FILE = ".checkpoint-request"  # exists while a checkpoint is requested from outside

# Numbered copies of config.json from before each resume.
FORMER_CONFIG = re.compile(r"config-(\d+)\.json")

# Models that may wait in .evaluating while another one is evaluated. Training waits after that.
MAX_WAITING = 2


class RunFiles:
    """Paths of the files in the run directory `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.external = path / "external.jsonl"
        self.trace = path / "trace.json"
        self.report = path / "report.html"
        self.outcome = path / "outcome.json"
        self.plan = path / "plan.json"
        self.plan_settings = path / "plan.toml"
        self.profile = path / "profile"
        self.checkpoints = path / "checkpoints"
        self.checkpointed = path / ".checkpointed"
        self.hf = path / "hf"
        self.evaluations = path / "evaluations.jsonl"
        self.evaluated = path / ".evaluated"
        self.best = path / "best"
        self.evaluating = path / ".evaluating"  # exported models that wait to be evaluated

    def hf_path(self, model: str) -> Path:
        """Return the export directory of a policy other than the main one."""
        return self.path / f"hf-{model}"

    @property
    def records(self) -> tuple[Path, ...]:
        """Files that grow with the run and that its checkpoints refer to."""
        return self.ledger, self.metrics, self.rollouts

    @property
    def has_checkpoint(self) -> bool:
        """Return whether a finished checkpoint exists. Its files may still be damaged."""
        return bool(find_checkpoints(self.checkpoints))

    @property
    def has_steps(self) -> bool:
        """Return whether an optimizer step was recorded."""
        return num_steps_in(self.metrics) > 0

    def has_finished(
        self,
        num_steps: int,
        stop_when: Sequence[str] = (),
        *,
        on_bytes: OnBytes = ignore_bytes,
    ) -> bool:
        """Return whether the last model of a run with this configuration is here and undamaged.

        All files of the export are read.
        """
        return is_exported(self.hf, num_steps, stop_when) and not export_faults(
            self.hf, run_id=self.run_id, on_bytes=on_bytes
        )

    @property
    def run_id(self) -> str:
        """Identifier of this run and its copies, which stays the same over all resumes.

        Raises:
            InvalidValue: config.json has no run_id.
        """
        return read_run_id(self.config)

    def __repr__(self) -> str:
        return f"RunFiles({str(self.path)!r})"


def num_steps_in(metrics: Path) -> int:
    """Return the number of recorded steps. A line counts once its newline is written."""
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a config.json.

    Raises:
        InvalidValue: The file is missing or damaged.
    """
    try:
        config = parse_json(regular_file(path).read_bytes())["config"]
        if not isinstance(config, dict):
            raise TypeError(f"config is {config!r}")
    except FileNotFoundError:
        raise InvalidValue(
            str(path),
            rule="there is no such file, so the directory holds no run or a damaged one",
            fix=f"Check the path, or restore that file{_former(path)}.",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidValue(
            str(path),
            rule=f"it holds no configuration of a run ({type(error).__name__}: {error})",
            fix=f"Restore it{_former(path)}, or start a new run under another {option('name')}.",
        ) from error
    return config


def read_run_id(path: Path) -> str:
    """Return the run_id in a config.json.

    Raises:
        InvalidValue: The file is missing or damaged.
    """
    read_config(path)
    run_id = parse_json(path.read_bytes()).get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise InvalidValue(
            f"{path}: run_id",
            run_id,
            rule="must be the text that the run got when it began, so the file was edited or "
            "written by another version of rlsys",
            fix="Set it to the run_id in the lines of rollouts.jsonl, or restore the file"
            f"{_former(path)}.",
        )
    return run_id


def _former(config: Path) -> str:
    """Return where else the file may be found, for a message."""
    others = [p for p in config.parent.glob("config-*.json") if p != config and p.is_file()]
    newest = max(others, key=lambda path: path.stat().st_mtime, default=None)
    return f" from a copy, or from {newest}" if newest else " from a copy"
