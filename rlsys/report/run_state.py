"""State of a run, from its directory: running, or how it ended.

| state | how it is recognized |
|---|---|
| finished, interrupted, failed | outcome.json; for finished also the exported model |
| running | a process holds the lock |
| died | none of these: the process was killed, or the run is of an older version |
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlsys.runs.export_seal import exported_step
from rlsys.runs.run_files import LOCK_FILE, RunFiles
from rlsys.runs.run_outcome import read_outcome

State = Literal["running", "finished", "interrupted", "failed", "died"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run."""

    state: State
    text: str  # one sentence
    reason: str = ""  # the message of the error that ended it


def run_state(files: RunFiles, *, step: int, num_steps: int | None) -> RunState:
    """Return the state of a run that has recorded `step` steps."""
    of = f" of {num_steps:,}" if num_steps else ""
    at = f"after step {step:,}{of}"
    ended = read_outcome(files.outcome)
    if ended is not None and ended.outcome == "finished":
        return RunState(state="finished", text=f"Finished {at}.")
    if ended is not None and ended.outcome == "interrupted":
        return RunState(state="interrupted", text=f"Interrupted {at}.")
    if ended is not None:
        reason = ended.reason or "The message is in the output of the run."
        return RunState(state="failed", text=f"Failed {at}.", reason=reason)
    if is_locked(files.path):
        return RunState(state="running", text=f"Running, {at}.")
    if num_steps is not None and exported_step(files.hf) == num_steps:
        return RunState(state="finished", text=f"Finished {at}.")
    return RunState(
        state="died",
        text=f"Ended {at} without recording why.",
        reason="The process was killed (out of memory, SIGKILL, a lost node), or the run was "
        "made by an older version of rlsys. The output of the run and the system log may say more.",
    )


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine holds the lock of a run directory."""
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return False


def header_rows(config: Mapping[str, Any], entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and text of each fact about a run that its config.json has."""

    def value(name: str, default: Any = None) -> Any:
        found: Any = config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    def devices(part: str, count: object, what: str) -> str:
        resources = [
            f"{value(f'{part}.{key}'):g} {unit}"
            for key, unit in (("num_gpus", "GPU"), ("num_cpus", "CPU"))
            if isinstance(value(f"{part}.{key}"), int | float) and value(f"{part}.{key}")
        ]
        return f"{count} {what}, {' and '.join(resources) or 'no device of its own'} each"

    versions = entry.get("versions")
    shown = (
        ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        if isinstance(versions, Mapping)
        else "unknown"
    )
    model = value("model.path") or "built by the recipe"
    replicas = value("rollout.num_replicas", "?")
    return [
        ("model", f"{model}, {value('model.dtype', '?')}"),
        ("layout", f"trainer {value('trainer.layout', '?')}, {value('placement', 'separate')}"),
        (
            "generation",
            devices(
                "rollout",
                replicas,
                f"{'replica' if replicas == 1 else 'replicas'} of {value('rollout.engine', '?')}",
            ),
        ),
        ("training", devices("trainer", "ranks of", str(value("trainer.layout", "?")))),
        ("staleness bound", str(value("asynchrony.max_staleness", "?"))),
        (
            "batch",
            f"{value('prompts_per_step', '?')} groups of {value('group_size', '?')} rollouts",
        ),
        ("seed", str(value("seed", "?"))),
        ("git revision", str(entry.get("git_revision") or "no checkout")),
        ("versions", shown),
        ("run id", str(entry.get("run_id") or "unknown")),
    ]
