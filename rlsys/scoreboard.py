"""What the evaluations of a run came to, on disk, and whether it still is.

    evaluations.jsonl    a line for each, by their steps
    .evaluated           what stands there (Tally), or all but the line that is being added
    best/                the best model, with evaluation.json, its line, and manifest.json

In: what was found out about an exported model. Out: these, or what is wrong with them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from rlsys import metrics
from rlsys.checkpoint import swapped_in
from rlsys.disk import write_whole, writing
from rlsys.growing_file import Tally, ordinary
from rlsys.json_text import parse_json
from rlsys.manifest import faults_of, write_manifest
from rlsys.observe.step_log import StepLog, read_lines
from rlsys.run_directory import RunFiles

# In best/, beside the model.
EVALUATION_FILE = "evaluation.json"


class Scoreboard:
    """What the evaluations of a run came to: evaluations.jsonl, a line each, and the best model.

    The best is that of the highest mean reward, or where nothing is sampled of the lowest loss; of
    equal ones the earliest. Lines of steps beyond `after_step` are removed, as those steps are
    trained again; best/ stays: it is what it says.
    """

    def __init__(self, files: RunFiles, *, after_step: int) -> None:
        self._files = files
        _write_tally(files, Tally())  # what is cut next is not missed
        self._log = StepLog(files.evaluations, after_step=after_step)
        self._steps = {int(line[metrics.STEP]) for line in read_lines(files.evaluations)}
        _write_tally(files, self._log.tally)

    def has(self, step: int) -> bool:
        return step in self._steps

    def go_back(self, step: int) -> None:
        """Training went back to `step`."""
        _write_tally(self._files, Tally())
        self._log.go_back(step)
        self._steps = {one for one in self._steps if one <= step}
        _write_tally(self._files, self._log.tally)

    def add(self, step: int, found: Mapping[str, float], exported: Path) -> dict[str, float]:
        """Record what was found; `exported` is kept as best/ or removed. Returns the line."""
        line = {metrics.STEP: step, **found}
        best = best_of(self._files)
        line[metrics.EVAL_IS_BEST] = int(best is None or goodness(line) > goodness(best))
        if line[metrics.EVAL_IS_BEST]:
            with writing(exported):
                (exported / EVALUATION_FILE).write_text(json.dumps(line, indent=1) + "\n")
                write_manifest(exported)
            swapped_in(exported, self._files.best)
        else:
            shutil.rmtree(exported, ignore_errors=True)
        if step not in self._steps:
            self._log.append(line)
            self._steps.add(step)
            _write_tally(self._files, self._log.tally)
        return line

    def close(self) -> None:
        self._log.close()


def best_of(files: RunFiles) -> dict[str, float] | None:
    """What the evaluation of best/ came to; None where there is none."""
    try:
        best: dict[str, float] = parse_json((files.best / EVALUATION_FILE).read_bytes())
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


def _write_tally(files: RunFiles, tally: Tally) -> None:
    """Raises OSError with the cause and the fix."""
    with writing(files.evaluated):
        if files.evaluations.exists():
            with files.evaluations.open("rb") as file:
                os.fsync(file.fileno())  # a crash of the machine must not leave less than it says
        write_whole(files.evaluated, json.dumps(tally.to_dict()) + "\n")


def damages_of(files: RunFiles) -> list[str]:
    """What was changed of evaluations.jsonl and best/, which is all read; what is gone of them is
    no damage."""
    damages, stood = [], Tally()
    if files.evaluated.exists():
        try:
            stood = Tally.from_dict(parse_json(ordinary(files.evaluated).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            damages.append(f"{files.evaluated} cannot be read: {error}")
    if files.evaluations.exists() and (fault := _fault(files.evaluations, stood)):
        damages.append(f"{files.evaluations} {fault}")
    if files.best.exists():
        damages += [f"{files.best} is damaged: {fault}" for fault in faults_of(files.best)]
    return damages


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


def _fault(evaluations: Path, stood: Tally) -> str | None:
    if fault := stood.fault(evaluations):
        return fault
    try:
        for number, line in enumerate(read_lines(evaluations), start=1):
            measured = metrics.EVAL_LOSS in line or any(map(metrics.is_mean_at, line))
            numbers = all(type(value) in (int, float) for value in line.values())
            if not (measured and numbers and metrics.EVAL_IS_BEST in line):
                return f"has no evaluation in line {number}: it was edited"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    return None
