"""Early stop: the metrics of a run against the conditions of stop_when.

A pure state machine. In: lines of metrics.jsonl and evaluations.jsonl, those before a resume
included. Out: the reason to stop, once a condition is met.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from rlsys import metrics
from rlsys.config.stop_condition import COMPARISONS, StopCondition

Line = Mapping[str, float]


class EarlyStop:
    """The values of the metrics that the conditions of a run name."""

    def __init__(self, conditions: Sequence[StopCondition]) -> None:
        self._conditions = conditions
        self._values: dict[str, dict[int, float]] = {one.metric: {} for one in conditions}
        self._has_checked = {False: False, True: False}  # the names, by is_about_evaluations

    def observe(self, line: Line) -> str | None:
        """Take a line of a step or an evaluation; return the reason to stop, if there is one.

        A line replaces those of its step and of later ones, which were trained again.
        """
        step = int(line[metrics.STEP])
        for name in self._values.keys() & line.keys():
            kept = {one: value for one, value in self._values[name].items() if one < step}
            self._values[name] = {**kept, step: line[name]}
        for condition in self._conditions:
            values = self._values[condition.metric]
            if condition.metric in line and condition.is_met([*values.values()]):
                return _reason(condition, values)
        return None

    def unknown(self, line: Line) -> list[str]:
        """Return a warning for each condition whose metric the first line of its kind lacks."""
        of_evaluation = any(name.startswith("eval/") for name in line)
        if self._has_checked[of_evaluation]:
            return []
        self._has_checked[of_evaluation] = True
        return [
            f"stop_when: {one.metric!r} is not among the metrics of step {line[metrics.STEP]}, so "
            f"{one.text!r} is not met until it appears{_similar(one.metric, line)}"
            for one in self._conditions
            if one.is_about_evaluations == of_evaluation and one.metric not in line
        ]


def _reason(condition: StopCondition, values: Mapping[int, float]) -> str:
    step, newest = [*values.items()][-1]
    reason = f"stop_when {condition.text!r}: {condition.metric} is {newest:.4g} at step {step}"
    if condition.word in COMPARISONS:
        return reason
    best = max if condition.word == "rising" else min
    best_step = best(values, key=lambda one: values[one])
    return f"{reason}, and the best value was {values[best_step]:.4g} at step {best_step}"


def _similar(name: str, line: Line) -> str:
    found = difflib.get_close_matches(name, line, n=3)
    return f". Similar: {', '.join(found)}" if found else ""
