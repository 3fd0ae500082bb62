"""Results of a run's evaluations on disk, and checks that they are undamaged.

    evaluations.jsonl    one line per evaluation, in the order of steps
    .evaluated           Tally of evaluations.jsonl, without a line that is being added and without
                         any line while lines are removed; and the checksums that best/manifest.json
                         may have, also while best/ is being replaced
    best/                the best model, with manifest.json and evaluation.json (its line and the
                         run's id)

Input: metrics of an exported model. Output: these files, or a list of what is wrong with them.
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
from rlsys.errors import InvalidValue
from rlsys.runs.checkpoint import first_few
from rlsys.runs.observe.step_log import StepLog, read_lines
from rlsys.runs.run_files import RunFiles

# The file in best/ with the evaluation of that model.
EVALUATION_FILE = "evaluation.json"


class EvaluationLog:
    """Writer of evaluations.jsonl and best/.

    The best model is the one with the highest mean reward, or the lowest loss if nothing is
    sampled; of equal ones, the earliest. Lines of steps beyond `after_step` are removed, because
    those steps are trained again. best/ is kept: its own evaluation.json describes it.
    """

    def __init__(self, files: RunFiles, *, after_step: int) -> None:
        self._files = files
        self._run_id = files.run_id
        self._best = [manifest_checksum(files.best)] if files.best.exists() else []
        self._write_seal(None)  # lines that are removed next are not reported as missing
        self._log = StepLog(files.evaluations, after_step=after_step)
        self._steps = {int(line[metrics.STEP]) for line in read_lines(files.evaluations)}
        self._write_seal(self._log.tally)

    def has(self, step: int) -> bool:
        """Return whether a step is recorded."""
        return step in self._steps

    def go_back(self, step: int) -> None:
        """Remove the lines of steps after `step`, to which training went back."""
        self._write_seal(None)
        self._log.go_back(step)
        self._steps = {known for known in self._steps if known <= step}
        self._write_seal(self._log.tally)

    def add(
        self, step: int, metrics_found: Mapping[str, float], exported: Path
    ) -> dict[str, float]:
        """Record an evaluation and return its line. Keep `exported` as best/, or remove it."""
        line = {metrics.STEP: step, **metrics_found}
        best = best_of(self._files)
        line[metrics.EVAL_IS_BEST] = int(best is None or goodness(line) > goodness(best))
        if line[metrics.EVAL_IS_BEST]:
            with writing(exported):
                entry = {**line, "run_id": self._run_id}
                (exported / EVALUATION_FILE).write_text(dump_json(entry, indent=1) + "\n")
                seal = write_manifest(exported)
            self._best.append(seal)
            self._write_seal(self._log.tally)
            replace_directory(exported, self._files.best)
            self._best = [seal]
        else:
            shutil.rmtree(exported, ignore_errors=True)
        if step not in self._steps:
            self._write_seal(self._log.tally)  # the last one may have failed after its line
            self._log.append(line)
            self._steps.add(step)
        self._write_seal(self._log.tally)
        return line

    def close(self) -> None:
        """Close evaluations.jsonl."""
        self._log.close()

    def _write_seal(self, tally: Tally | None) -> None:
        """Write .evaluated.

        Raises:
            OSError: The disk refuses. The message has the cause and the fix.
        """
        with writing(self._files.evaluated):
            if self._files.evaluations.exists():
                with self._files.evaluations.open("rb") as file:
                    os.fsync(file.fileno())  # the lines must reach the disk before their tally
            entry = {**({} if tally is None else tally.to_dict()), "best": self._best}
            write_atomically(self._files.evaluated, dump_json(entry) + "\n")


def best_of(files: RunFiles) -> dict[str, Any] | None:
    """Return the evaluation in best/ and the run's id, or None if there is none."""
    try:
        best: dict[str, Any] = parse_json(regular_file(files.best / EVALUATION_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return best


def goodness(line: Mapping[str, float]) -> float:
    """Return the mean reward of an evaluation, or its negative loss. Higher is better."""
    for name, value in line.items():
        if metrics.is_mean_at(name):
            return value
    return -line[metrics.EVAL_LOSS]


def read_evaluations(path: Path) -> list[dict[str, float]]:
    """Return the lines of an evaluations.jsonl. A missing file has none."""
    return list(read_lines(path)) if path.exists() else []


def find_damage(files: RunFiles) -> list[InvalidValue]:
    """Return errors about what was changed in evaluations.jsonl and best/. All of both is read.

    Missing files and lines are not damage: `find_missing` returns those.

    Raises:
        InvalidValue: As `RunFiles.run_id`.
    """
    damages: list[InvalidValue] = []
    sealed: Tally | None = None
    seals: list[str] | None = None
    if os.path.lexists(files.evaluated):
        try:
            entry = parse_json(regular_file(files.evaluated).read_bytes())
            seals = [str(seal) for seal in entry.pop("best")]
            sealed = Tally.from_dict(entry) if entry else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            fault = (
                f"cannot be read ({type(error).__name__}: {error}), so it was edited or written by "
                "another version of rlsys"
            )
            damages.append(_damaged(files.evaluated, fault))
    if os.path.lexists(files.evaluations) and (found := _fault(files.evaluations, sealed)):
        damages.append(_damaged(files.evaluations, found))
    if os.path.lexists(files.best):
        if faults := faults_of(files.best):
            damages.append(_damaged(files.best, f"is damaged: {first_few(faults)}"))
        elif found := _foreign(files, seals):
            damages.append(_damaged(files.best, found))
    return damages


def _damaged(path: Path, fault: str) -> InvalidValue:
    return InvalidValue(
        str(path),
        rule=f"it {fault}",
        fix="Restore it from a copy. Without one, move it away: the run continues, and evaluates "
        "from there on.",
    )


def _foreign(files: RunFiles, seals: Sequence[str] | None) -> str | None:
    """Return why an undamaged best/ is not what the run wrote there.

    Args:
        files: The run's files.
        seals: Checksums that its manifest may have, if they are known.
    """
    own = files.run_id
    try:
        best = best_of(files) or {}
        run_id = best.pop("run_id", None)
        is_evaluation = _is_evaluation(best)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"has an {EVALUATION_FILE} that cannot be read ({type(error).__name__}: {error})"
    if run_id != own:
        return (
            f"has run_id={dump_json(run_id)} in its {EVALUATION_FILE}, and this run has "
            f"{dump_json(own)}, so it belongs to another run or version of rlsys"
        )
    if not is_evaluation:
        return f"has no evaluation in its {EVALUATION_FILE}, so it was edited"
    if seals is not None and manifest_checksum(files.best) not in seals:
        return (
            f"has another checksum than {files.evaluated.name} has for it, so its files and its "
            f"{MANIFEST_FILE} were replaced or edited"
        )
    return None


def find_missing(files: RunFiles) -> list[str]:
    """Return what is missing from evaluations.jsonl and best/, if the rest is undamaged."""
    if not files.evaluations.exists():
        is_missed = files.evaluated.exists() or files.best.exists()
        return [f"{files.evaluations} is missing"] if is_missed else []
    lines = read_evaluations(files.evaluations)
    if not lines:
        return []
    if not files.evaluated.exists():
        return [f"{files.evaluated} , the checksum of {files.evaluations.name}, is missing"]
    top = max(lines, key=goodness)
    if (best := best_of(files)) is None:
        return [f"{files.best} is missing; the best model was of step {top[metrics.STEP]}"]
    if goodness(best) < goodness(top):
        return [
            f"{files.best} holds the model of step {best[metrics.STEP]}, but the one of step "
            f"{top[metrics.STEP]} was better"
        ]
    return []


def _fault(evaluations: Path, sealed: Tally | None) -> str | None:
    """Return what is wrong with evaluations.jsonl. `sealed` is the tally in .evaluated, if any."""
    if sealed is not None and (fault := sealed.fault(evaluations)):
        return fault
    last, number = -1, 0
    try:
        for number, line in enumerate(read_lines(evaluations), start=1):
            if not _is_evaluation(line):
                return f"has no evaluation in line {number}, so it was edited"
            if line[metrics.STEP] <= last:
                return (
                    f"has step {line[metrics.STEP]} in line {number}, after step {last}, so lines "
                    "were duplicated or moved"
                )
            last = line[metrics.STEP]
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    if sealed is not None and number > sealed.num_lines + 1:
        return (
            f"has {number:,} lines, and the run wrote {sealed.num_lines:,} and at most one more, "
            "so lines were added"
        )
    return None


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    measured = metrics.EVAL_LOSS in line or any(map(metrics.is_mean_at, line))
    numbers = all(type(value) in (int, float) for value in line.values())
    return measured and numbers and {metrics.STEP, metrics.EVAL_IS_BEST} <= line.keys()
