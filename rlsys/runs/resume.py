"""Reading the history of a run that is resumed.

    newest checkpoint ─ controller.json ─► checksums of its records ─┐
    ledger, metrics, rollouts ───────────────────────────────────────┴─► History, or an error

A checkpoint has a checksum of each file of records at the time of writing (Tally). Nothing is
changed here: files that do not belong together are refused while they can still be repaired.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.common.append_only_file import Tally
from rlsys.common.manifest import OnBytes, ignore_bytes
from rlsys.common.option_names import option
from rlsys.common.safe_json import parse_json
from rlsys.dataflow.scheduling.ledger import Event, Ledger, LedgerError, read_events
from rlsys.errors import InvalidValue, InvalidValues
from rlsys.runs.checkpoint import (
    Checkpoint,
    find_checkpoints,
    find_strays,
    first_few,
    initial_weights_fault,
)
from rlsys.runs.evaluation_log import find_damage, find_missing
from rlsys.runs.run_directory import nothing_to_resume
from rlsys.runs.run_files import RunFiles
from rlsys.runs.run_history import State, read_state, record_faults

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class History:
    """State of a run at its newest checkpoint, and what was recorded up to and after it."""

    checkpoint: Checkpoint
    state: State
    events: Sequence[Event]
    last_step: int  # that was trained, possibly after the checkpoint


def read_history(
    files: RunFiles,
    *,
    groups_per_step: int,
    num_steps: int,
    on_bytes: OnBytes = ignore_bytes,
) -> History:
    """Return the newest checkpoint with the history that led to it.

    All files of the checkpoint are read, with their progress for `on_bytes`.

    Raises:
        InvalidValue: The checkpoint is damaged; the ledger, metrics, rollouts or external.jsonl do
            not begin as they did when it was written, or continue with lines that do not belong
            there; or `num_steps` is less than its step.
    """
    for stray in find_strays(files.checkpoints):
        logger.warning("%s is not a checkpoint of this run and is ignored", stray)
    found = find_checkpoints(files.checkpoints)
    if not found:
        raise nothing_to_resume(files)
    newest = found[-1]
    if faults := newest.faults(on_bytes):
        raise InvalidValue(
            str(newest.path),
            rule=f"it is damaged: {first_few(faults)}",
            fix=_older_checkpoint(found, files),
        )
    try:
        state = read_state(newest)
    except InvalidValue as error:
        raise InvalidValue(
            error.field, rule=error.rule, fix=_restore(_older_checkpoint(found, files))
        ) from error
    if fault := initial_weights_fault(files.checkpoints, state.beginning):
        raise fault
    for path in files.records:
        if broken := state.records[path.name].fault(path):
            fix = _restore(_older_checkpoint(found, files))
            raise _changed_records(path, broken, newest, fix)
    if state.external is not None and (broken := state.external.fault(files.external)):
        # Older checkpoints need the whole file too, because issued groups stay issued.
        raise _changed_records(files.external, broken, newest, _restore(_start_again(files)))
    if damages := find_damage(files):
        raise damages[0] if len(damages) == 1 else InvalidValues(tuple(damages))
    for missing in find_missing(files):
        logger.warning("%s; the run continues without it", missing)
    events, ledger = _read_ledger(files.ledger, groups_per_step, state.records[files.ledger.name])
    if ledger.step < newest.step:
        raise InvalidValue(
            str(files.ledger),
            rule=f"its last trained step is {ledger.step}, before that of {newest.path}, so the "
            "two belong to different runs",
            fix=_restore(_older_checkpoint(found, files)),
        )
    for path in (files.metrics, files.rollouts):
        _check_later_lines(path, newest, state.records[path.name])
    if num_steps < newest.step:
        raise InvalidValue(
            "num_steps",
            num_steps,
            rule=f"this run has reached step {newest.step}, and num_steps counts all steps of a "
            "run, those before a resume included",
            fix=f"Use more than {newest.step}.",
        )
    return History(checkpoint=newest, state=state, events=events, last_step=ledger.step)


def _changed_records(path: Path, fault: str, checkpoint: Checkpoint, fix: str) -> InvalidValue:
    rule = f"it {fault}, and {checkpoint.path} needs it as it was"
    return InvalidValue(str(path), rule=rule, fix=fix)


def _restore(otherwise: str) -> str:
    """Return the advice to restore a file, and what to do without a copy of it."""
    return f"Restore it from a copy. Without one: {otherwise}"


def _read_ledger(path: Path, groups_per_step: int, kept: Tally) -> tuple[list[Event], Ledger]:
    """Return the events of a ledger that begins as the checkpoint has it (`kept`)."""
    try:
        events = read_events(path)
        return events, Ledger.replay(events, _never_written, groups_per_step=groups_per_step)
    except ValueError as error:
        fault = str(error)
    except LedgerError as error:
        fault = f"its events contradict each other ({error}), so it was edited or damaged"
    raise InvalidValue(
        str(path),
        rule=f"{fault}. Its first {kept.num_lines} lines, which the newest checkpoint needs, are "
        "undamaged",
        fix="Restore it from a copy. Without one, cut it there: "
        f"truncate -s {kept.num_bytes} {path}",
    )


def _never_written(event: Event) -> None:
    raise AssertionError(f"{event} was written while the ledger is only read")


def _check_later_lines(path: Path, checkpoint: Checkpoint, kept: Tally) -> None:
    """Check that the lines after those of the checkpoint belong to later steps.

    Those steps are trained again. A crash may have torn a line. A line of an earlier step was
    moved there.
    """
    with path.open("rb") as file:
        file.seek(kept.num_bytes)
        for number, line in enumerate(file, start=kept.num_lines + 1):
            try:
                step = parse_json(line)["step"]
            except (ValueError, TypeError, KeyError):
                continue
            if step <= checkpoint.step:
                raise InvalidValue(
                    f"{path}, line {number}",
                    rule=f"it belongs to step {step}, but follows the lines of step "
                    f"{checkpoint.step}, so lines were duplicated or moved",
                    fix="Restore the file from a copy. Without one, cut it: "
                    f"truncate -s {kept.num_bytes} {path}",
                )


def _older_checkpoint(found: Sequence[Checkpoint], files: RunFiles) -> str:
    """Return what to do if the last of these checkpoints cannot be used."""
    for older in reversed(found[:-1]):
        if not _is_usable(older, files):
            continue
        unusable = " and ".join(str(c.path) for c in found if c.step > older.step)
        return (
            f"Delete {unusable} to continue from {older.path}, which is undamaged. Later steps "
            "are trained again."
        )
    return f"No older checkpoint is undamaged. {_start_again(files)}"


def _start_again(files: RunFiles) -> str:
    model = ""
    if files.hf.is_dir():
        model = f", from its last exported model ({option('model.path', str(files.hf))})"
    return f"Start again under another {option('name')}{model}."


def _is_usable(checkpoint: Checkpoint, files: RunFiles) -> bool:
    try:
        return not checkpoint.faults() and not record_faults(read_state(checkpoint), files)
    except ValueError:
        return False
