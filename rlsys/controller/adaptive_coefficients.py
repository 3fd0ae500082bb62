"""Numbers that a step sets for the next one, such as the price of a KL penalty that is adapted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from rlsys.common.user_functions import FunctionFailed, called, name_of
from rlsys.controller.worker_protocols import StepRowsRef, Written
from rlsys.dataflow.graph.stages import ControlStage


class Coefficients:
    """After each number of optimizer steps, so that training can go back. `initial_values` is what a
    resumed run's checkpoint has, by stage.
    """

    def __init__(
        self, stages: Sequence[ControlStage], *, step: int, initial_values: Mapping[str, float]
    ) -> None:
        self._values = {
            stage.name: {step: initial_values.get(stage.name, stage.controller.initial)}
            for stage in stages
        }

    def run(self, stage: ControlStage, rows: StepRowsRef, *, step: int) -> Written:
        """What holds for all rows of the step that comes after `step` others."""
        values = self._values[stage.name]
        (read,), (written,) = stage.reads, stage.writes
        seen = statistics.fmean(rows.scalars[read.name])
        what = f"stage {stage.name!r}: {name_of(stage.controller)}.next({values[step]}, {seen})"
        values[step + 1] = called(what, stage.controller.next, values[step], seen)
        if not math.isfinite(values[step + 1]):
            raise FunctionFailed(f"{what} is {values[step + 1]}; let it return a finite number.")
        return Written(scalars={written.name: [values[step]] * len(rows)})

    def after(self, step: int) -> dict[str, float]:
        """By stage, for a checkpoint."""
        return {name: values[step] for name, values in self._values.items()}
