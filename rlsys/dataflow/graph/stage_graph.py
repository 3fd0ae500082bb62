"""The stages of a dataflow and what follows from them: models, columns, and who reads which.

`Dataflow` (graph.py) builds a `StageGraph`. Checks, drawing and the controller read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rlsys.dataflow.graph.stages import (
    IMPLICIT_COLUMNS,
    Column,
    ControlStage,
    InferStage,
    JudgeStage,
    Model,
    PerBatchStage,
    PlayStage,
    RowStage,
    SourceStage,
    Stage,
    StepStage,
    TrainStage,
)
from rlsys.metrics import (
    column_mean,
)

S = TypeVar("S", bound=Stage)


class StageGraph:
    """Stages in the order in which they were stated, and the models that they run."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.models: dict[str, Model] = {}

    def stage(self, kind: type[S]) -> S:
        """The one stage of a kind; ValueError if there is none."""
        for stage in self.stages:
            if isinstance(stage, kind):
                return stage
        raise ValueError(
            f"the dataflow has the stages {[s.name for s in self.stages]} but no "
            f"{kind.__name__}; a run needs generate (or dataset) and train."
        )

    def all(self, kind: type[S]) -> list[S]:
        return [stage for stage in self.stages if isinstance(stage, kind)]

    def reads(self, column: Column) -> bool:
        """Return whether a stage reads `column`."""
        return any(column in stage.reads for stage in self.stages)

    @property
    def source(self) -> SourceStage:
        """Where rows come from; ValueError if there is no such stage."""
        return self.stage(SourceStage)

    @property
    def main(self) -> Model:
        """The model without a configuration of its own; ValueError if there is none."""
        for model in self.models.values():
            if model.is_main:
                return model
        raise ValueError(
            f"the dataflow has the models {list(self.models)} but none that runs by the run's own "
            'configuration; begin with flow.model("policy").'
        )

    def trained(self, model: str) -> TrainStage:
        """The stage that trains a model; ValueError if none does."""
        for stage in self.all(TrainStage):
            if stage.model.name == model:
                return stage
        raise ValueError(f"no stage trains {model!r}; end the dataflow with flow.train.")

    @property
    def other_policies(self) -> list[str]:
        """Names of models that are trained and play seats, beside the main one."""
        played = [one for stage in self.all(PlayStage) for one in stage.partners]
        return [model.name for model in played if model.may_train]

    @property
    def step_stages(self) -> list[StepStage]:
        """Those that run when a step's rows are chosen, in their order."""
        trained = {stage.model.name for stage in self.all(TrainStage)}
        return [
            stage
            for stage in self.stages
            if isinstance(stage, PerBatchStage | ControlStage)
            or (isinstance(stage, InferStage) and stage.model.name in trained)
        ]

    @property
    def step_columns(self) -> set[str]:
        """What those write: columns that are never in the store."""
        return {column.name for stage in self.step_stages for column in stage.writes}

    @property
    def row_stages(self) -> list[RowStage]:
        """Frozen models, which take rows as they come."""
        step_stages = self.step_stages
        return [
            stage
            for stage in self.stages
            if isinstance(stage, InferStage | JudgeStage) and stage not in step_stages
        ]

    @property
    def step_reads(self) -> tuple[Column, ...]:
        """What a step takes from the store, for all its train stages and step stages together."""
        late = self.step_columns
        stages = [*self.step_stages, *self.all(TrainStage)]
        reads = (c for stage in stages for c in stage.reads)
        return distinct(c for c in reads if c.name not in late and c not in IMPLICIT_COLUMNS)

    @property
    def means(self) -> frozenset[str]:
        """Metrics that tell of columns with a value per row."""
        columns = (column for stage in self.stages for column in stage.writes)
        return frozenset(column_mean(column.name) for column in columns if column.per == "row")


def distinct(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Return the columns without repetitions, in their order."""
    return tuple(dict.fromkeys(columns))
