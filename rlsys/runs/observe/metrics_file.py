"""metrics.jsonl: one line of metrics per optimizer step. Their names are in rlsys/metrics.py.

Input: a mapping from names to numbers, after each step. Output: a file that has every step once,
also after crashes and resumes, with exact numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import Tally
from rlsys.common.safe_json import dump_json
from rlsys.errors import InvalidValue
from rlsys.metrics import STEP
from rlsys.runs.observe.step_log import StepLog, damage_of_line, read_lines


class MetricsWriter:
    """Writer of metrics.jsonl.

    Args:
        path: The file.
        after_step: Step of the checkpoint from which a resumed run continues. Later lines are
            removed, because those steps are trained again.
        kept: Tally of the lines up to that step, if it is known.
    """

    def __init__(self, path: Path, *, after_step: int = 0, kept: Tally | None = None) -> None:
        self._log = StepLog(path, after_step=after_step, kept=kept)
        self._last_step = after_step

    @property
    def tally(self) -> Tally:
        """Tally of the whole file."""
        return self._log.tally

    def write(self, line: Mapping[str, Any]) -> None:
        """Append the metrics of one step.

        On return, a crash of this process cannot lose the line. Values are numbers of any kind,
        also numpy scalars and tensors of one element.

        Raises:
            InvalidValue: A number is not finite, or the step is out of order. Nothing is written.
        """
        numbers = {name: _number(name, value, line) for name, value in line.items()}
        step = line.get(STEP)
        if not isinstance(step, Integral) or int(step) <= self._last_step:
            raise InvalidValue(
                STEP,
                step,
                rule=f"must be more than the last step, {self._last_step}",
                fix="Give each line the number of its step, in order.",
            )
        self._log.append(numbers)
        self._last_step = int(step)

    def go_back(self, step: int) -> None:
        """Remove the lines of steps after `step`, to which training went back."""
        self._log.go_back(step)
        self._last_step = min(self._last_step, step)

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics.jsonl, one per step.

    Raises:
        InvalidValue: A line is damaged.
    """
    return list(read_lines(path))


def read_every_step(path: Path) -> list[dict[str, float]]:
    """Return the lines of a metrics.jsonl, after a check that each step is there once, in order.

    Raises:
        InvalidValue: A line is damaged, or is not that of the next step.
    """
    lines: list[dict[str, float]] = []
    for number, line in enumerate(read_lines(path), start=1):
        if fault := metrics_fault(line):
            raise damage_of_line(path, number, f"it {fault}")
        if line[STEP] != number:
            raise InvalidValue(
                f"{path}, line {number}",
                line[STEP],
                rule=f"must be the line of step {number}, so lines were added, removed or moved",
                fix="Restore the file from a copy. rlsys audit checks the whole directory.",
            )
        lines.append(line)
    return lines


def metrics_fault(line: Mapping[str, Any]) -> str | None:
    """Return why a line has no metrics: the first value that is not a finite number."""
    for name, value in line.items():
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            return f"has {dump_json(value)[:40]} for {name}, which is not a finite number"
    return None


def _number(name: str, value: Any, line: Mapping[str, Any]) -> float:
    number = int(value) if isinstance(value, Integral) else float(value)
    if not math.isfinite(number):
        raise InvalidValue(
            f"metric {name}",
            number,
            rule=f"must be finite (step {line.get(STEP)})",
            fix="Leave out a metric if there is nothing to average. Otherwise, check the loss and "
            "the rewards.",
        )
    return number
