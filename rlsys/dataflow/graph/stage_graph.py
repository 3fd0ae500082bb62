"""The stages and models of a dataflow, and the columns that connect them.

    Dataflow (graph.py)       a recipe adds its stages
    RunGraph (run_graph.py)   frozen: checked, and completed for one configuration and model

Both are a `StageGraph`. Checks, estimates and drawings read it. The controller takes a RunGraph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from rlsys.errors import InvalidValue
from rlsys.metrics import column_mean

S = TypeVar("S", bound=Stage)


class StageGraph:
    """Stages in their order, and the models that they run."""

    stages: Sequence[Stage]
    """The stages, each after those whose columns it reads."""
    models: Mapping[str, Model]
    """The models by their names."""
    max_context: int | None = None
    """Maximum tokens of a row of the main model. None if the model is not known."""
    engine_sharers: Sequence[str] = ()
    """Names of the other policies that the engines of the main model serve too."""

    def stage(self, kind: type[S]) -> S:
        """Return the first stage of a kind.

        Raises:
            InvalidValue: There is no such stage.
        """
        for stage in self.stages:
            if isinstance(stage, kind):
                return stage
        raise InvalidValue(
            "dataflow",
            [stage.name for stage in self.stages],
            rule=f"has no {kind.__name__} among its stages",
            fix="Add flow.generate, flow.play or flow.dataset, and flow.train.",
        )

    def all(self, kind: type[S]) -> list[S]:
        """Return all stages of a kind."""
        return [stage for stage in self.stages if isinstance(stage, kind)]

    def reads(self, column: Column) -> bool:
        """Return whether a stage reads `column`."""
        return any(column in stage.reads for stage in self.stages)

    @property
    def source(self) -> SourceStage:
        """The stage that makes the rows; raises InvalidValue if there is none."""
        return self.stage(SourceStage)

    @property
    def main(self) -> Model:
        """The model without a configuration of its own; raises InvalidValue if there is none."""
        for model in self.models.values():
            if model.is_main:
                return model
        raise InvalidValue(
            "dataflow",
            [*self.models],
            rule="none of its models uses the run's own configuration",
            fix='Begin with flow.model("policy").',
        )

    def trained(self, model: str) -> TrainStage:
        """Return the stage that trains a model.

        Raises:
            InvalidValue: No stage trains it.
        """
        for stage in self.all(TrainStage):
            if stage.model.name == model:
                return stage
        raise InvalidValue(
            "dataflow", model, rule="no stage trains this model", fix="End with flow.train."
        )

    @property
    def other_policies(self) -> list[str]:
        """Names of trained models that play seats, besides the main one."""
        return [model.name for model in self.partners if model.may_train]

    @property
    def partners(self) -> list[Model]:
        """Models that play seats besides the main one, frozen or trained."""
        return [model for stage in self.all(PlayStage) for model in stage.partners]

    @property
    def partners_with_engines(self) -> list[Model]:
        """Partners that have engines of their own."""
        return [model for model in self.partners if model.name not in self.engine_sharers]

    @property
    def step_stages(self) -> list[StepStage]:
        """Stages that run once a step's rows are chosen, in their order."""
        trained = {stage.model.name for stage in self.all(TrainStage)}
        return [
            stage
            for stage in self.stages
            if isinstance(stage, PerBatchStage | ControlStage)
            or (isinstance(stage, InferStage) and stage.model.name in trained)
        ]

    @property
    def step_columns(self) -> set[str]:
        """Columns that the step stages write, which are never in the store."""
        return {column.name for stage in self.step_stages for column in stage.writes}

    @property
    def row_stages(self) -> list[RowStage]:
        """Stages of frozen models, which take rows as soon as they are ready."""
        step_stages = self.step_stages
        return [
            stage
            for stage in self.stages
            if isinstance(stage, InferStage | JudgeStage) and stage not in step_stages
        ]

    @property
    def step_reads(self) -> tuple[Column, ...]:
        """Columns that the train stages and step stages read from the store."""
        late = self.step_columns
        stages = [*self.step_stages, *self.all(TrainStage)]
        reads = (c for stage in stages for c in stage.reads)
        return distinct(c for c in reads if c.name not in late and c not in IMPLICIT_COLUMNS)

    @property
    def means(self) -> frozenset[str]:
        """Names of the metrics that are means of columns with a value per row."""
        columns = (column for stage in self.stages for column in stage.writes)
        return frozenset(column_mean(column.name) for column in columns if column.per == "row")


def distinct(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Return the columns without repetitions, in their order."""
    return tuple(dict.fromkeys(columns))
