"""What the files of a run say about its past.

    ledger, metrics, rollouts, checkpoints ─► read_history  ─► where a resumed run goes on
                                          └─► read_evidence ─► what rlsys.audit looks at

Nothing is changed here. A resumed run reads its history before it cuts or writes a file, so that
files that do not belong together are refused while they can still be mended.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from rlsys import metrics
from rlsys.audit import Evidence
from rlsys.checkpoint import Checkpoint, find_checkpoints, find_strays
from rlsys.data.external_log import read_external
from rlsys.data.shared import SharedGroup
from rlsys.dataflow.ledger import Event, Ledger, LedgerError, read_events
from rlsys.observe.records import RolloutRecord
from rlsys.observe.step_log import read_lines
from rlsys.run_directory import RunFiles, read_config

# What every line of rollouts.jsonl has.
RECORD_NAMES = {
    f.name for f in fields(RolloutRecord) if f.default is MISSING and f.default_factory is MISSING
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class History:
    """Where a resumed run goes on. `state` is what controller.json holds."""

    checkpoint: Checkpoint
    state: Mapping[str, Any]
    events: Sequence[Event]


def read_history(files: RunFiles, *, groups_per_step: int, num_steps: int) -> History:
    """The newest checkpoint with the history that led to it.

    Raises ValueError, with the fix, for a checkpoint that is not whole, for a ledger, metrics or
    rollouts that are missing, damaged or end before it, and for fewer steps than it has.
    """
    for stray in find_strays(files.checkpoints):
        logger.warning("%s is no checkpoint of this run and is not used", stray)
    found = find_checkpoints(files.checkpoints)
    if not found:
        raise ValueError(
            f"{files.path} holds no checkpoint to resume from; delete it and start again without "
            "--resume (checkpoint_every sets how often one is written)."
        )
    newest = found[-1]
    if faults := newest.faults():
        raise ValueError(f"{newest.path} is damaged: {_some(faults)}; {_older(found)}")
    events, ledger = _read_ledger(files.ledger, groups_per_step)
    if ledger.step < newest.step:
        raise ValueError(
            f"{newest.path} is beyond {files.ledger}, whose last trained step is {ledger.step}: "
            "they are of different runs, or the ledger was cut. Restore the ledger from a copy. "
            "Without one: "
            f"{_older(found, at_most=ledger.step)}"
        )
    _check_metrics(files.metrics, newest.step)
    _check_rollouts(files.rollouts, newest.step)
    if num_steps < newest.step:
        raise ValueError(
            f"num_steps={num_steps} lies below step {newest.step}, which this run has reached; it "
            f"counts all steps of the run, resumed parts included: use more than {newest.step}."
        )
    return History(checkpoint=newest, state=_read_state(newest), events=events)


def read_evidence(path: Path) -> tuple[Evidence, list[str]]:
    """What an audit looks at, and what of it could not be read.

    Raises ValueError where there is no run's config.json to go by.
    """
    files = RunFiles(path)
    config = read_config(files.config)
    faults: list[str] = []
    for name in ("prompts_per_step", "group_size", "seed", "asynchrony"):
        for former in path.glob("config-*.json"):
            if read_config(former)[name] != config[name]:
                faults.append(f"{former.name} has another {name} than config.json")
    events: list[Event] = []
    try:
        events = read_events(files.ledger)
    except (OSError, ValueError) as error:
        faults.append(f"ledger.jsonl cannot be read: {error}")
    external: Mapping[int, SharedGroup | None] = {}
    try:
        external = read_external(files.external)
    except (OSError, ValueError) as error:
        faults.append(f"external.jsonl cannot be read: {error}")
    steps: dict[int, Mapping[str, Any]] = {}
    for checkpoint in find_checkpoints(files.checkpoints):
        if broken := checkpoint.faults():
            faults.append(f"checkpoint {checkpoint.path.name} is damaged: {_some(broken)}")
            continue
        try:
            steps[checkpoint.step] = _read_state(checkpoint)
        except ValueError as error:
            faults.append(str(error))
    trainer = config["trainer"]
    updates = trainer["num_minibatches"] * trainer["num_epochs"]
    recorded = {read_config(p)["observe"]["record_groups"] for p in path.glob("config*.json")}
    evidence = Evidence(
        groups_per_step=config["prompts_per_step"],
        group_size=config["group_size"],
        # In versions, of which each has several updates where a step has.
        max_staleness=(config["asynchrony"]["max_staleness"] + 1) // updates - 1,
        updates_per_step=updates,
        num_steps=config["num_steps"],
        recorded_groups=recorded.pop() if len(recorded) == 1 else None,
        shuffle=config["data"]["shuffle"],
        prompt_order=steps[max(steps)]["prompts"] if steps else None,
        events=events,
        external=external,
        metrics=list(_lines(files.metrics, {metrics.STEP}, faults)),
        rollouts=list(_lines(files.rollouts, RECORD_NAMES, faults)),
        checkpoints=sorted(steps),
        exported=(files.hf / "config.json").is_file(),
    )
    return evidence, faults


def _read_ledger(path: Path, groups_per_step: int) -> tuple[list[Event], Ledger]:
    try:
        events = read_events(path)
        return events, Ledger.replay(events, _never_written, groups_per_step=groups_per_step)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is missing, and without it nobody knows which prompts were trained; restore "
            "it from a copy, or start a new run under another --name."
        ) from error
    except LedgerError as error:
        raise ValueError(
            f"{path} contradicts itself: {error}; it was edited or damaged, or written by another "
            "version of rlsys. Restore it from a copy."
        ) from error


def _never_written(event: Event) -> None:
    raise AssertionError(f"{event} while a ledger is only read")


def _read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        state = json.loads(checkpoint.controller_file.read_bytes())
        if state["step"] != checkpoint.step:
            raise ValueError(f"it is of step {state['step']}")
        _ = state["prompts"]["seed"], state["prompts"]["num_prompts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{checkpoint.controller_file} does not belong to its checkpoint "
            f"({type(error).__name__}: {error}); restore it from a copy, or delete "
            f"{checkpoint.path} to continue from the one before."
        ) from error
    assert isinstance(state, dict)
    return state


def _check_metrics(path: Path, step: int) -> None:
    """Every step up to the checkpoint's stands there once."""
    steps = [line["step"] for line in _existing(path)]
    kept = [number for number in steps if number <= step]
    if kept != [*range(1, step + 1)] or steps[:step] != kept:
        shown = "no line" if not steps else f"lines of steps {steps[0]} to {steps[-1]}"
        raise ValueError(
            f"{path} has {shown} where the checkpoint has {step} steps behind it, each of which "
            "must stand there once, in order; it was edited or cut. Restore it from a copy."
        )


def _check_rollouts(path: Path, step: int) -> None:
    last = 0
    for line in _existing(path):
        if line["step"] < last:
            raise ValueError(
                f"{path} has a rollout of step {line['step']} after one of step {last}; it was "
                "edited or damaged. Restore it from a copy."
            )
        last = line["step"]


def _existing(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, so the run's records would begin in its middle; restore it from a "
            "copy, or start a new run under another --name."
        )
    return read_lines(path)


def _lines(path: Path, names: Set[str], faults: list[str]) -> Iterator[dict[str, Any]]:
    """Up to the first that cannot be read or lacks one of the names, which joins `faults`."""
    try:
        for number, line in enumerate(read_lines(path), start=1):
            if missing := names - line.keys():
                raise ValueError(f"line {number} lacks {sorted(missing)}")
            yield line
    except (OSError, ValueError) as error:
        faults.append(f"{path.name} cannot be read: {error}")


def _older(found: Sequence[Checkpoint], *, at_most: int | None = None) -> str:
    """What to do about the last of these checkpoints; one of a step beyond `at_most` is no help."""
    for older in reversed(found[:-1]):
        if (at_most is None or older.step <= at_most) and not older.faults():
            doomed = " and ".join(str(c.path) for c in found if c.step > older.step)
            return f"delete {doomed} to continue from {older.path}, which is whole."
    return "no older one is whole: restore it from a copy, or start a new run under another --name."


def _some(faults: Sequence[str]) -> str:
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return ", ".join(faults[:3]) + more
