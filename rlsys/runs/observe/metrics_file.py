"""metrics.jsonl: one line of metrics per optimizer step; their names are in rlsys/metrics.py.

In: a mapping from names to numbers, after each step. Out: a file in which every step stands once,
over crashes and resumes too, and whose numbers are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from rlsys.common.append_only_file import Tally
from rlsys.metrics import STEP
from rlsys.runs.observe.step_log import StepLog, read_lines


class MetricsWriter:
    """Writes metrics.jsonl. A resumed run passes its checkpoint's step as `after_step`: the lines
    that the crashed run wrote beyond it are removed, as those steps are trained again, which leaves
    `kept`.
    """

    def __init__(self, path: Path, *, after_step: int = 0, kept: Tally | None = None) -> None:
        self._log = StepLog(path, after_step=after_step, kept=kept)
        self._last_step = after_step

    @property
    def tally(self) -> Tally:
        return self._log.tally

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one step's metrics; on disk, as far as a crash of this process goes, on return.

        Values are numbers of any kind (numpy scalars and tensors of one element too). Raises
        ValueError, and writes nothing, for a number that is not finite or a step out of order.
        """
        numbers = {name: _number(name, value, line) for name, value in line.items()}
        step = line.get(STEP)
        if not isinstance(step, Integral) or int(step) <= self._last_step:
            raise ValueError(
                f"step={step} after step={self._last_step}: every optimizer step stands once in "
                "metrics.jsonl, in order; give each line the number of its step."
            )
        self._log.append(numbers)
        self._last_step = int(step)

    def go_back(self, step: int) -> None:
        """Training went back to `step`: lines of later steps are removed, and written again."""
        self._log.go_back(step)
        self._last_step = min(self._last_step, step)

    def close(self) -> None:
        self._log.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl, a step each. Raises ValueError for one that is damaged."""
    return list(read_lines(path))


def _number(name: str, value: Any, line: Mapping[str, Any]) -> float:
    number = int(value) if isinstance(value, Integral) else float(value)
    if not math.isfinite(number):
        raise ValueError(
            f"metric {name}={number} of step {line.get(STEP)} is not finite; leave a metric out "
            "where there is nothing to average, and look at the loss and the rewards otherwise."
        )
    return number
