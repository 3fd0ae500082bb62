"""Where a resumed run goes on.

    newest checkpoint ─ controller.json ─► how its records began ─┐
    ledger, metrics, rollouts ────────────────────────────────────┴─► History, or why not

A checkpoint says how much of each file of records was there when it was written (Tally). Nothing is
changed here: files that do not belong together are refused while they can still be mended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsys.common.append_only_file import Tally
from rlsys.common.option_names import option
from rlsys.common.safe_json import parse_json
from rlsys.dataflow.scheduling.ledger import Event, Ledger, LedgerError, read_events
from rlsys.runs.checkpoint import Checkpoint, beginning_fault, find_checkpoints, find_strays
from rlsys.runs.evaluation_log import damages_of, losses_of
from rlsys.runs.run_directory import RunFiles, nothing_to_resume
from rlsys.runs.run_history import State, read_state, record_faults, some

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class History:
    """Where a resumed run goes on. `last_step` is the last one that was trained, which may have
    come after the checkpoint.
    """

    checkpoint: Checkpoint
    state: State
    events: Sequence[Event]
    last_step: int


def read_history(files: RunFiles, *, groups_per_step: int, num_steps: int) -> History:
    """The newest checkpoint with the history that led to it.

    Raises ValueError, with the fix, for a checkpoint that is not whole, for a ledger, metrics,
    rollouts or external.jsonl that do not begin as they did when it was written, or go on with what
    does not belong there, and for fewer steps than it has.
    """
    for stray in find_strays(files.checkpoints):
        logger.warning("%s is no checkpoint of this run and is not used", stray)
    found = find_checkpoints(files.checkpoints)
    if not found:
        raise ValueError(nothing_to_resume(files))
    newest = found[-1]
    if faults := newest.faults():
        raise ValueError(f"{newest.path} is damaged: {some(faults)}; {_way_out(found, files)}")
    try:
        state = read_state(newest)
    except ValueError as error:
        raise ValueError(
            f"{error}. Restore it from a copy; without one, {_way_out(found, files)}"
        ) from error
    if fault := beginning_fault(files.checkpoints, state.beginning):
        raise ValueError(
            f"{fault}. A reference or a critic begins with the weights there, which must be those "
            "that a warm start of this run had taught: restore them from a copy, move away what is "
            f"none of the run's, or start again under another {option('name')}."
        )
    for path in files.records:
        if fault := state.records[path.name].fault(path):
            raise ValueError(
                f"{path} {fault}, and {newest.path} builds on what was there. Restore it from a "
                f"copy; without one, {_way_out(found, files)}"
            )
    if state.external is not None and (fault := state.external.fault(files.external)):
        raise ValueError(  # and an older checkpoint needs all of it too: what is issued stays so
            f"{files.external} {fault}, and {newest.path} builds on what was there. Restore it "
            f"from a copy; without one, {_begin_anew(files)}"
        )
    if damages := damages_of(files):
        raise ValueError(
            f"{some(damages)}. Restore it from a copy; without one, move it away: the run goes on, "
            "and evaluates from there."
        )
    for loss in losses_of(files):
        logger.warning("%s; the run goes on without", loss)
    events, ledger = _read_ledger(files.ledger, groups_per_step, state.records[files.ledger.name])
    if ledger.step < newest.step:
        raise ValueError(
            f"{newest.path} is beyond {files.ledger}, whose last trained step is {ledger.step}: "
            f"they are of different runs. Restore the ledger from a copy; without one, "
            f"{_way_out(found, files)}"
        )
    for path in (files.metrics, files.rollouts):
        _check_what_follows(path, newest, state.records[path.name])
    if num_steps < newest.step:
        raise ValueError(
            f"num_steps={num_steps} lies below step {newest.step}, which this run has reached; it "
            f"counts all steps of the run, resumed parts included: use more than {newest.step}."
        )
    return History(checkpoint=newest, state=state, events=events, last_step=ledger.step)


def _read_ledger(path: Path, groups_per_step: int, kept: Tally) -> tuple[list[Event], Ledger]:
    """`kept` is how it began, and still begins, when the checkpoint was written."""
    try:
        events = read_events(path)
        return events, Ledger.replay(events, _never_written, groups_per_step=groups_per_step)
    except ValueError as error:
        fault = str(error)
    except LedgerError as error:
        fault = f"{path} contradicts itself: {error}; it was edited or damaged"
    raise ValueError(
        f"{fault}. Its first {kept.num_lines} lines are whole, on which the newest checkpoint "
        f"builds. Restore it from a copy; without one, cut it there: truncate -s {kept.num_bytes} "
        f"{path}"
    )


def _never_written(event: Event) -> None:
    raise AssertionError(f"{event} while a ledger is only read")


def _check_what_follows(path: Path, checkpoint: Checkpoint, kept: Tally) -> None:
    """Behind what a checkpoint builds on stand lines of later steps, which will be trained again.
    They may be torn, as a crash leaves them, but lines of earlier steps have been put there.
    """
    with path.open("rb") as file:
        file.seek(kept.num_bytes)
        for number, line in enumerate(file, start=kept.num_lines + 1):
            try:
                step = parse_json(line)["step"]
            except (ValueError, TypeError, KeyError):
                continue
            if step <= checkpoint.step:
                raise ValueError(
                    f"{path}, line {number} is of step {step}, but stands behind all that was "
                    f"there at step {checkpoint.step}: lines were doubled or moved. Restore the "
                    f"file from a copy; without one, cut it: truncate -s {kept.num_bytes} {path}"
                )


def _way_out(found: Sequence[Checkpoint], files: RunFiles) -> str:
    """What to do where the last of these checkpoints cannot be gone on from."""
    for older in reversed(found[:-1]):
        if not _is_usable(older, files):
            continue
        doomed = " and ".join(str(c.path) for c in found if c.step > older.step)
        return (
            f"delete {doomed} to continue from {older.path}, which is whole; later steps are "
            "trained again."
        )
    return f"there is nothing to go on from, as no older one is whole: {_begin_anew(files)}"


def _begin_anew(files: RunFiles) -> str:
    begin = ""
    if files.hf.is_dir():
        begin = f", from its last exported model ({option('model.path', str(files.hf))})"
    return f"start again under another {option('name')}{begin}."


def _is_usable(checkpoint: Checkpoint, files: RunFiles) -> bool:
    try:
        return not checkpoint.faults() and not record_faults(read_state(checkpoint), files)
    except ValueError:
        return False
