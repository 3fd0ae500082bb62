"""What the evaluations of a run came to, on disk, and whether it still is.

    evaluations.jsonl    a line for each, by their steps
    .evaluated           what stands there (Tally), or all but the line that is being added, and
                         nothing of it while lines are removed; and of best/ the manifest's
                         checksum, also of the one that is to take its place
    best/                the best model, with manifest.json and evaluation.json: its line, and the
                         run's id

In: what was found out about an exported model. Out: these, or what is wrong with them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsys import metrics
from rlsys.common.append_only_file import Tally, regular_file
from rlsys.common.atomic_directory import replace_directory
from rlsys.common.atomic_files import write_atomically, writing
from rlsys.common.manifest import MANIFEST_FILE, faults_of, manifest_checksum, write_manifest
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.runs.observe.step_log import StepLog, read_lines
from rlsys.runs.run_directory import RunFiles

# In best/, beside the model.
EVALUATION_FILE = "evaluation.json"


class EvaluationLog:
    """What the evaluations of a run came to: evaluations.jsonl, a line each, and the best model.

    The best is that of the highest mean reward, or where nothing is sampled of the lowest loss; of
    equal ones the earliest. Lines of steps beyond `after_step` are removed, as those steps are
    trained again; best/ stays: it is what it says.
    """

    def __init__(self, files: RunFiles, *, after_step: int) -> None:
        self._files = files
        self._run_id = files.run_id
        self._best = [manifest_checksum(files.best)] if files.best.exists() else []
        self._write_standing(None)  # what is cut next is not missed
        self._log = StepLog(files.evaluations, after_step=after_step)
        self._steps = {int(line[metrics.STEP]) for line in read_lines(files.evaluations)}
        self._write_standing(self._log.tally)

    def has(self, step: int) -> bool:
        return step in self._steps

    def go_back(self, step: int) -> None:
        """Training went back to `step`."""
        self._write_standing(None)
        self._log.go_back(step)
        self._steps = {one for one in self._steps if one <= step}
        self._write_standing(self._log.tally)

    def add(self, step: int, found: Mapping[str, float], exported: Path) -> dict[str, float]:
        """Record what was found; `exported` is kept as best/ or removed. Returns the line."""
        line = {metrics.STEP: step, **found}
        best = best_of(self._files)
        line[metrics.EVAL_IS_BEST] = int(best is None or goodness(line) > goodness(best))
        if line[metrics.EVAL_IS_BEST]:
            with writing(exported):
                told = {**line, "run_id": self._run_id}
                (exported / EVALUATION_FILE).write_text(dump_json(told, indent=1) + "\n")
                seal = write_manifest(exported)
            self._best.append(seal)
            self._write_standing(self._log.tally)
            replace_directory(exported, self._files.best)
            self._best = [seal]
        else:
            shutil.rmtree(exported, ignore_errors=True)
        if step not in self._steps:
            self._write_standing(self._log.tally)  # which failed, it may be, after the last line
            self._log.append(line)
            self._steps.add(step)
        self._write_standing(self._log.tally)
        return line

    def close(self) -> None:
        self._log.close()

    def _write_standing(self, tally: Tally | None) -> None:
        """Raises OSError with the cause and the fix."""
        with writing(self._files.evaluated):
            if self._files.evaluations.exists():
                with self._files.evaluations.open("rb") as file:
                    os.fsync(file.fileno())  # a crash of the machine must not leave less than told
            told = {**({} if tally is None else tally.to_dict()), "best": self._best}
            write_atomically(self._files.evaluated, dump_json(told) + "\n")


def best_of(files: RunFiles) -> dict[str, Any] | None:
    """What the evaluation of best/ came to, and the run's id; None where there is none."""
    try:
        best: dict[str, Any] = parse_json(regular_file(files.best / EVALUATION_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return best


def goodness(line: Mapping[str, float]) -> float:
    """Of an evaluation: its mean reward, where it has one."""
    for name, value in line.items():
        if metrics.is_mean_at(name):
            return value
    return -line[metrics.EVAL_LOSS]


def read_evaluations(path: Path) -> list[dict[str, float]]:
    """The lines of an evaluations.jsonl; none where there is no such file."""
    return list(read_lines(path)) if path.exists() else []


def damages_of(files: RunFiles) -> list[str]:
    """What was changed of evaluations.jsonl and best/, which is all read; what is gone of them is
    no damage. Raises ValueError as `RunFiles.run_id`.
    """
    damages: list[str] = []
    stood: Tally | None = None
    seals: list[str] | None = None
    if os.path.lexists(files.evaluated):
        try:
            told = parse_json(regular_file(files.evaluated).read_bytes())
            seals = [str(seal) for seal in told.pop("best")]
            stood = Tally.from_dict(told) if told else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            damages.append(
                f"{files.evaluated} cannot be read ({type(error).__name__}: {error}): it was "
                "edited, or written by another version of rlsys"
            )
    if os.path.lexists(files.evaluations) and (fault := _fault(files.evaluations, stood)):
        damages.append(f"{files.evaluations} {fault}")
    if os.path.lexists(files.best):
        if faults := faults_of(files.best):
            damages += [f"{files.best} is damaged: {fault}" for fault in faults]
        elif fault := _foreign(files, seals):
            damages.append(f"{files.best} {fault}")
    return damages


def _foreign(files: RunFiles, seals: Sequence[str] | None) -> str | None:
    """Why best/, whole as it is, is not what the run wrote there. `seals`: checksums that its
    manifest may have, where they are known.
    """
    own = files.run_id
    try:
        best = best_of(files) or {}
        told = best.pop("run_id", None)
        is_evaluation = _is_evaluation(best)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"has an {EVALUATION_FILE} that cannot be read ({type(error).__name__}: {error})"
    if told != own:
        return (
            f"has run_id={dump_json(told)} in its {EVALUATION_FILE} where this run's is "
            f"{dump_json(own)}: it is another run's, or of another version of rlsys"
        )
    if not is_evaluation:
        return f"has no evaluation in its {EVALUATION_FILE}: it was edited"
    if seals is not None and manifest_checksum(files.best) not in seals:
        return (
            f"is not the model that was kept there, of which {files.evaluated.name} has the "
            f"checksum: its files were exchanged or edited, {MANIFEST_FILE} too"
        )
    return None


def losses_of(files: RunFiles) -> list[str]:
    """What is gone of them, where nothing of the rest is damaged."""
    if not files.evaluations.exists():
        is_missed = files.evaluated.exists() or files.best.exists()
        return [f"{files.evaluations} is missing"] if is_missed else []
    lines = read_evaluations(files.evaluations)
    if not lines:
        return []
    if not files.evaluated.exists():
        return [f"{files.evaluated} is missing, which says what stood in {files.evaluations.name}"]
    top = max(lines, key=goodness)
    if (best := best_of(files)) is None:
        return [f"{files.best} is missing; the best model was that of step {top[metrics.STEP]}"]
    if goodness(best) < goodness(top):
        return [
            f"{files.best} holds the model of step {best[metrics.STEP]}; that of step "
            f"{top[metrics.STEP]} was better"
        ]
    return []


def _fault(evaluations: Path, stood: Tally | None) -> str | None:
    """`stood`: what .evaluated says; None where it says nothing."""
    if stood is not None and (fault := stood.fault(evaluations)):
        return fault
    last, number = -1, 0
    try:
        for number, line in enumerate(read_lines(evaluations), start=1):
            if not _is_evaluation(line):
                return f"has no evaluation in line {number}: it was edited"
            if line[metrics.STEP] <= last:
                return (
                    f"has one of step {line[metrics.STEP]} in line {number}, behind one of step "
                    f"{last}: lines were doubled or moved"
                )
            last = line[metrics.STEP]
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    if stood is not None and number > stood.num_lines + 1:
        return (
            f"has {number:,} lines where there were {stood.num_lines:,}, and one that was being "
            "added: lines were put there"
        )
    return None


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    measured = metrics.EVAL_LOSS in line or any(map(metrics.is_mean_at, line))
    numbers = all(type(value) in (int, float) for value in line.values())
    return measured and numbers and {metrics.STEP, metrics.EVAL_IS_BEST} <= line.keys()
