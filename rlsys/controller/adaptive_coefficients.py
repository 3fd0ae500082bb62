"""Coefficients that each step sets for the next one, such as an adaptive KL penalty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from rlsys.common.user_functions import FunctionFailed, called, name_of
from rlsys.controller.worker_protocols import StepRowsRef, Written
from rlsys.dataflow.graph.stages import ControlStage


class Coefficients:
    """Values of all coefficients after each optimizer step, so that training can roll back.

    `initial_values` holds those of a resumed run's checkpoint, by stage.
    """

    def __init__(
        self, stages: Sequence[ControlStage], *, step: int, initial_values: Mapping[str, float]
    ) -> None:
        self._values = {
            stage.name: {step: initial_values.get(stage.name, stage.controller.initial)}
            for stage in stages
        }

    def run(self, stage: ControlStage, rows: StepRowsRef, *, step: int) -> Written:
        """Set the coefficient of the next step and return the column of the current one.

        `step` is the number of optimizer steps before the current one.
        """
        values = self._values[stage.name]
        (read,), (written,) = stage.reads, stage.writes
        mean = statistics.fmean(rows.scalars[read.name])
        call = f"stage {stage.name!r}: {name_of(stage.controller)}.next({values[step]}, {mean})"
        values[step + 1] = called(call, stage.controller.next, values[step], mean)
        if not math.isfinite(values[step + 1]):
            raise FunctionFailed(f"{call} returned {values[step + 1]}. Return a finite number.")
        return Written(scalars={written.name: [values[step]] * len(rows)})

    def after(self, step: int) -> dict[str, float]:
        """Return the coefficients after `step` optimizer steps, by stage, for a checkpoint."""
        return {name: values[step] for name, values in self._values.items()}
