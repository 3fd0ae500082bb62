"""Comparison of a predicted step with the steps that a run measured.

    PredictedStep + StepMedians ─► compared ─► Comparison ─► lines of the closing summary

A step differs from its prediction because an assumption was wrong. Each assumption is charged with
the seconds that it adds to the work of generation, training, rewards, weights or the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rlsys.common.number_text import significant
from rlsys.planner.run_measurement import StepMedians
from rlsys.planner.run_record import PredictedStep

# An assumption that changes a step by less than this share is not worth a line.
SMALL: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """An assumption of a prediction, and what the run measured instead.

    Attributes:
        name: The assumption in words.
        predicted: Predicted value.
        measured: Measured value.
        unit: Unit of both.
        effect_s: Seconds of work that the difference adds to a step.
        condition: The condition under which `predicted` holds, if it is not that of the step's
            prediction: generation and training are predicted again for the measured lengths.
    """

    name: str
    predicted: float
    measured: float
    unit: str
    effect_s: float
    condition: str = ""

    @property
    def text(self) -> str:
        """The assumption with both values."""
        sign = "+" if self.effect_s > 0 else ""
        return (
            f"{self.name}: {significant(self.predicted)} {self.unit} predicted{self.condition}, "
            f"{significant(self.measured)} measured ({sign}{significant(self.effect_s)} s)"
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A step as predicted and as measured. Assumptions are sorted, most harmful first."""

    predicted: PredictedStep
    measured_s: float
    assumptions: Sequence[Assumption]

    @property
    def is_within(self) -> bool:
        """True if the step is inside the 80 % interval."""
        return self.predicted.low_s <= self.measured_s <= self.predicted.high_s

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Pairs of a label and a text for the closing summary."""
        step = self.predicted
        place = "inside" if self.is_within else "outside"
        ratio = self.measured_s / step.step_s
        rows = [
            (
                "predicted",
                f"step of {significant(step.step_s)} s (80 %: {significant(step.low_s)} to "
                f"{significant(step.high_s)} s); measured {significant(self.measured_s)} s, "
                f"{significant(ratio)} x, {place} the interval",
            )
        ]
        worst = self.assumptions[0]
        if abs(worst.effect_s) >= SMALL * self.measured_s:
            rows.append(("", f"most off: {worst.text}"))
        return rows


def compared(predicted: PredictedStep, measured: StepMedians) -> Comparison:
    """Return the comparison of a prediction with a run's medians."""
    tokens = predicted.completion_tokens or measured.completion_tokens
    longer = measured.completion_tokens / tokens
    # longer completions lengthen generation and training; the rest is their rates
    generation_s, train_s = predicted.generation_s * longer, predicted.train_s * longer
    condition = ""
    if abs(longer - 1) >= SMALL:
        condition = f" for completions of {significant(measured.completion_tokens)} tokens"
    found = [
        Assumption(
            name="completion length",
            predicted=tokens,
            measured=measured.completion_tokens,
            unit="tokens",
            effect_s=(predicted.generation_s + predicted.train_s) * (longer - 1),
        ),
        Assumption(
            name="training",
            predicted=train_s,
            measured=measured.train_s,
            unit="s",
            effect_s=measured.train_s - train_s,
            condition=condition,
        ),
        Assumption(
            name="rewards",
            predicted=predicted.reward_s,
            measured=measured.reward_s,
            unit="s",
            effect_s=measured.reward_s - predicted.reward_s,
        ),
        Assumption(
            name="loading weights",
            predicted=predicted.sync_s,
            measured=measured.sync_s,
            unit="s",
            effect_s=measured.sync_s - predicted.sync_s,
        ),
    ]
    if measured.controller_s > 0:  # files of earlier versions lack it
        found.append(
            Assumption(
                name="the controller's process",
                predicted=predicted.controller_s,
                measured=measured.controller_s,
                unit="s",
                effect_s=measured.controller_s - predicted.controller_s,
            )
        )
    if measured.generation_s > 0:  # actors report their work only with observe.trace
        found.append(
            Assumption(
                name="generation",
                predicted=generation_s,
                measured=measured.generation_s,
                unit="s per replica",
                effect_s=measured.generation_s - generation_s,
                condition=condition,
            )
        )
    found.sort(key=lambda one: -abs(one.effect_s))
    return Comparison(predicted=predicted, measured_s=measured.step_s, assumptions=found)
