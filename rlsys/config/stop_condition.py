"""Conditions of an early stop, as text in `stop_when`.

    reward/mean > 0.9               the metric's newest value is above 0.9
    reward/mean > 0.9 for 5         the newest 5 values are
    eval/loss not falling for 3     none of the newest 3 values is below all earlier ones
    reward/mean not rising for 50   none of the newest 50 values is above all earlier ones

A value is that of one step, or of one evaluation.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlsys.common.number_text import number
from rlsys.errors import InvalidValue

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
TRENDS: dict[str, Callable[[float, float], bool]] = {"rising": operator.gt, "falling": operator.lt}

CONDITION = re.compile(
    r"(?P<metric>[^\s<>=!]+)\s*(?:(?P<sign>[<>]=?)\s*(?P<bound>\S+)|\s+not\s+(?P<trend>rising|falling))"
    r"(?:\s+for\s+(?P<count>[0-9]+))?"
)


@dataclass(frozen=True, kw_only=True)
class StopCondition:
    """A condition on the values of one metric, in the order of steps.

    Attributes:
        text: The condition as written.
        metric: A name of metrics.jsonl or evaluations.jsonl.
        word: A key of COMPARISONS or of TRENDS.
        bound: The number to compare with; not used by trends.
        count: Number of newest values that must satisfy the condition.
    """

    text: str
    metric: str
    word: str
    bound: float
    count: int

    @classmethod
    def parse(cls, text: str, field: str = "stop_when") -> StopCondition:
        """Return the condition that a text states.

        Raises:
            InvalidValue: It does not have one of the forms above.
        """
        match = CONDITION.fullmatch(text.strip())
        bound = _bound(match["bound"]) if match and match["bound"] else 0.0
        count = int(match["count"] or 1) if match else 0
        if match is None or bound is None or count < 1 or (match["trend"] and not match["count"]):
            raise InvalidValue(
                field,
                text,
                rule="is not a condition on a metric",
                fix="Use METRIC > NUMBER (or <, >=, <=), optionally with 'for N' values, or "
                "METRIC not rising for N (or not falling).",
            )
        return cls(
            text=text.strip(),
            metric=match["metric"],
            word=match["sign"] or match["trend"],
            bound=bound,
            count=count,
        )

    @property
    def is_about_evaluations(self) -> bool:
        """Return whether evaluations on held-out prompts give the metric."""
        return self.metric.startswith("eval/")

    def is_met(self, values: Sequence[float]) -> bool:
        """Return whether the metric's values so far satisfy the condition."""
        newest = values[-self.count :]
        if self.word in COMPARISONS:
            compare = COMPARISONS[self.word]
            return len(newest) == self.count and all(compare(x, self.bound) for x in newest)
        earlier = values[: -self.count]
        best = max if self.word == "rising" else min
        return bool(earlier) and not TRENDS[self.word](best(newest), best(earlier))


def _bound(text: str) -> float | None:
    try:
        bound = number(text)
    except ValueError:
        return None
    return bound if math.isfinite(bound) else None
