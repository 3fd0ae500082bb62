"""Points of a curve, reward against compute, from a run's metrics.

Compute is one of
    step     optimizer steps
    tokens   completion tokens trained since the beginning of the run
    hours    wall-clock hours of optimizer steps, without the pauses of a resumed run
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal, get_args

import numpy as np

from rlsys import metrics
from rlsys.errors import InvalidValue
from rlsys.evaluation.scaling.laws import Array

Against = Literal["step", "tokens", "hours"]
AGAINST: tuple[Against, ...] = get_args(Against)
UNITS: Mapping[Against, str] = {
    "step": "optimizer steps",
    "tokens": "completion tokens",
    "hours": "wall-clock hours",
}

# Maximum number of points; longer runs are reduced to means over neighbouring steps.
MAX_POINTS = 600

Line = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one run."""

    name: str
    metric: str
    against: Against
    compute: Array = field(repr=False)  # [N], rising
    reward: Array = field(repr=False)  # [N]

    def part(self, start: int, stop: int) -> Series:
        """Return the points start to stop - 1."""
        return Series(
            name=self.name,
            metric=self.metric,
            against=self.against,
            compute=self.compute[start:stop],
            reward=self.reward[start:stop],
        )


def read_series(
    lines: Sequence[Line], *, name: str, metric: str, against: Against, smooth: bool = True
) -> Series:
    """Return the points of the lines of metrics.jsonl that have the metric.

    Points of long runs are means over neighbouring lines, unless `smooth` is off.

    Raises:
        InvalidValue: The metric is unknown, or a number is not finite.
    """
    if not lines:
        raise InvalidValue(name, rule="has no step yet", fix="Wait for the run.")
    if not any(metric in line for line in lines):
        known = sorted({key for line in lines for key in line})
        similar = get_close_matches(metric, known, n=3)
        raise InvalidValue(
            "--metric",
            metric,
            rule=f"is in no line of {name}",
            fix=f"Use one such as {', '.join(similar or known[:8])}.",
        )
    per_step, needed = _PER_STEP[against]
    having = [line for line in lines if all(key in line for key in needed)]
    if len(having) < len(lines):
        raise InvalidValue(
            "--against",
            against,
            rule=f"{len(lines) - len(having)} of {len(lines)} lines of {name} lack "
            f"{' or '.join(needed)}",
            fix="Use --against step.",
        )
    compute = np.cumsum([per_step(line) for line in lines])
    if against == "step":  # a file may begin later
        compute = np.array([line[metrics.STEP] for line in lines], float)
    has_metric = np.array([metric in line for line in lines])
    compute = compute[has_metric]
    reward = np.array([_number(line, metric, name) for line in lines if metric in line])
    if smooth and len(reward) > MAX_POINTS:
        compute, reward = _means(compute), _means(reward)
    return Series(name=name, metric=metric, against=against, compute=compute, reward=reward)


def _number(line: Line, metric: str, name: str) -> float:
    value = line[metric]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValue(
            metric,
            value,
            rule=f"is not a finite number, in step {line[metrics.STEP]} of {name}",
            fix="Remove the line, or check the rewards of that step.",
        )
    return float(value)


def _trained_tokens(line: Line) -> float:
    return line[metrics.THROUGHPUT_TRAINED_TOKENS] * line[metrics.TIME_STEP_S]


_PER_STEP: dict[Against, tuple[Callable[[Line], float], tuple[str, ...]]] = {
    "step": (lambda line: 1.0, (metrics.STEP,)),
    "tokens": (_trained_tokens, (metrics.THROUGHPUT_TRAINED_TOKENS, metrics.TIME_STEP_S)),
    "hours": (lambda line: line[metrics.TIME_STEP_S] / 3600, (metrics.TIME_STEP_S,)),
}


def _means(values: Array) -> Array:
    return np.array([part.mean() for part in np.array_split(values, MAX_POINTS)])
