"""Checks of a graph: each stage against the earlier ones, and the complete graph.

In: a graph. Raises InvalidValue. Rules about the arguments of a single stage are in
argument_checks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlsys.config import TrainedRoleConfig
from rlsys.config.fields import checked
from rlsys.dataflow.graph.argument_checks import check_type
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    BRANCHES,
    EXPERTS_COLUMN,
    IMPLICIT_COLUMNS,
    IS_GREEDY,
    PREFERENCE,
    PROXIMAL_COLUMN,
    SAMPLER_COLUMN,
    Column,
    ControlStage,
    DatasetStage,
    GenerateStage,
    Head,
    InferStage,
    Model,
    PerBatchStage,
    PlayStage,
    Role,
    SourceStage,
    Stage,
    TrainStage,
    names_of,
)
from rlsys.errors import require
from rlsys.metrics import REWARD_MEAN, SCORE_MEAN, VALUE_MEAN, column_mean, is_own, is_own_family


def check_new_model(flow: StageGraph, name: Any, config: Any, head: Any) -> None:
    """Raise InvalidValue for the arguments of a model that the graph cannot have."""
    require(
        isinstance(name, str) and bool(name),
        "flow.model: name",
        name,
        rule="is not a name",
        fix="Give a text, such as 'reference'.",
    )
    role = "a RoleConfig (with the path in its model), or a TrainedRoleConfig if a stage trains it"
    check_type(f"model({name!r})", "config", config, Role | None, role)
    checked(head, Head, f"flow.model({name!r}): head")
    require(
        name not in flow.models,
        "flow.model: name",
        name,
        rule="the dataflow has a model of this name",
        fix="Give the second one another name.",
    )
    mains = [model.name for model in flow.models.values() if model.is_main]
    require(
        config is not None or not mains,
        f"flow.model({name!r}): config",
        config,
        rule=f"model {mains} uses the run's own configuration already",
        fix=f"Give {role}.",
    )


def check_is_own(flow: StageGraph, stage: str, model: Any) -> None:
    """Raise InvalidValue unless `model` is one of the graph's models."""
    check_type(stage, "model", model, Model, "what flow.model returns")
    require(
        flow.models.get(model.name) is model,
        f"flow.{stage}: model",
        model.name,
        rule="belongs to another dataflow",
        fix="Give a model that this dataflow's flow.model has made.",
    )


def check_new_stage(stage: Stage, earlier: Sequence[Stage]) -> None:
    """Raise InvalidValue for a stage that does not fit behind the earlier ones.

    Its name must be new, its columns must be written before it reads them, and no other stage may
    write the columns that it writes.
    """
    field = f"stage {stage.name!r}"
    sources = [one.name for one in earlier if isinstance(one, SourceStage)]
    require(
        not isinstance(stage, SourceStage) or not sources,
        f"flow.{stage.name}",
        rule=f"a dataflow has one source of rows, and this one has {sources}",
        fix="Leave one of them out.",
    )
    require(
        stage.name not in [one.name for one in earlier],
        field,
        rule="the dataflow has a stage of this name",
        fix="Give the second one another name.",
    )
    has_pairs = any(isinstance(one, DatasetStage) for one in earlier)
    writers = {column.name: one.name for one in earlier for column in one.writes}
    _check_new_reads(stage, earlier, writers, has_pairs=has_pairs)
    written = names_of(stage.writes)
    for column in stage.writes:
        require(
            isinstance(column.name, str) and bool(column.name),
            field,
            column.name,
            rule="is not the name of a column",
            fix="Give a name, such as 'values'.",
        )
        require(
            column.name not in names_of(IMPLICIT_COLUMNS)
            or (column.name == PREFERENCE.name and not has_pairs),
            field,
            column.name,
            rule="every row has this column without a stage",
            fix="Write a column of another name.",
        )
        other = stage.name if written.count(column.name) > 1 else writers.get(column.name)
        require(
            other is None,
            field,
            column.name,
            rule=f"stage {other!r} writes this column already",
            fix="Rename one of the two with writes= (of flow.per_group: name=).",
        )


def _check_new_reads(
    stage: Stage, earlier: Sequence[Stage], writers: dict[str, str], *, has_pairs: bool
) -> None:
    field = f"stage {stage.name!r}"
    has_greedy = any(isinstance(one, GenerateStage) and one.greedy_baseline for one in earlier)
    for column in stage.reads:
        require(
            column.name in writers or column in IMPLICIT_COLUMNS,
            field,
            column.name,
            rule=f"no earlier stage writes this column (written so far: {sorted(writers)})",
            fix="Add the stage that writes it before this one.",
        )
        require(
            column != PREFERENCE or has_pairs,
            field,
            column.name,
            rule="only the rows of a dataset are ordered pairs",
            fix="Let a stage write the preference: flow.per_group(function, reward, "
            "name='preference').",
        )
        require(
            column != IS_GREEDY or has_greedy,
            field,
            column.name,
            rule="no rollout of this graph is greedy",
            fix="Use flow.generate(..., greedy_baseline=True).",
        )


def check_whole(flow: StageGraph) -> None:
    """Raise InvalidValue for mistakes that only the complete graph shows.

    These are: no source or no training; a column that no stage reads; a stage that reads a column
    too early; a model that no stage runs or trains; a column whose mean has the name of another
    metric.
    """
    flow.stage(SourceStage)
    flow.trained(flow.main.name)
    _check_columns_are_read(flow)
    for stage in flow.stages:
        for column in stage.reads:
            _check_read(flow, stage, column)
    _check_models_used(flow)
    _check_updates(flow)
    _check_means(flow)


def check_groups(flow: StageGraph, group_size: int) -> None:
    """Raise InvalidValue unless groups have the size of the configuration."""
    source = flow.source
    require(
        source.group_size == group_size,
        f"flow.{source.name}: group_size",
        source.group_size,
        rule=f"the configuration has group_size={group_size}",
        fix="Use the same number in both.",
    )


def check_records_experts(flow: StageGraph) -> None:
    """Raise InvalidValue unless this run samples all of its rows, whose experts it can record."""
    source = flow.source
    require(
        not isinstance(source, PlayStage),
        "rollout.replay_routing",
        True,
        rule="episodes of flow.play do not record the experts of their tokens",
        fix="Use flow.generate, or rollout.replay_routing=False.",
    )
    require(
        isinstance(source, GenerateStage) and not source.prompts.may_be_external,
        "rollout.replay_routing",
        True,
        rule=f"this run does not sample all rows of flow.{source.name}",
        fix="Leave the option out.",
    )


def _check_columns_are_read(flow: StageGraph) -> None:
    readers = {column.name for stage in flow.stages for column in stage.reads}
    has_greedy = any(stage.greedy_baseline for stage in flow.all(GenerateStage))
    require(
        not has_greedy or IS_GREEDY.name in readers,
        "flow.generate: greedy_baseline",
        True,
        rule="no stage compares with the greedy rollouts",
        fix="Give IS_GREEDY to flow.per_group (remax_advantage), or leave greedy_baseline out.",
    )
    for stage in flow.stages:
        unread = [column.name for column in stage.writes if column.name not in readers]
        require(
            not unread or isinstance(stage, SourceStage),
            f"stage {stage.name!r}",
            unread,
            rule="no stage reads these columns",
            fix="Leave them out, or give them to flow.train(watch=[...]).",
        )


def _check_read(flow: StageGraph, stage: Stage, column: Column) -> None:
    field = f"stage {stage.name!r}"
    require(
        column != BRANCHES or not isinstance(stage, PerBatchStage),
        field,
        column.name,
        rule="this column has values for the branches of a rollout, not for its tokens",
        fix="Read 'turns' and 'seats'.",
    )
    require(
        column.width == 1
        or column.name in (EXPERTS_COLUMN, BRANCHES.name)
        or isinstance(stage, TrainStage),
        field,
        column.name,
        rule=f"this column has {column.width} values per token, which only flow.train reads",
        fix="Leave top_k out of flow.infer, or leave the stage out.",
    )
    require(
        column.name not in flow.step_columns
        or isinstance(stage, TrainStage | PerBatchStage | ControlStage),
        field,
        column.name,
        rule="this column exists only when a step is complete, and the stage runs before",
        fix="Use flow.per_batch.",
    )
    require(
        not flow.source.prompts.may_be_external
        or column.name != SAMPLER_COLUMN
        or not isinstance(stage, PerBatchStage),
        field,
        column.name,
        rule="groups that other runs share do not have this column",
        fix=f"Let flow.infer write {PROXIMAL_COLUMN!r} and read that.",
    )


def _check_models_used(flow: StageGraph) -> None:
    trained = {stage.model.name for stage in flow.all(TrainStage)}
    stage_of_frozen = {one.name: "play" for one in flow.partners if not one.may_train}
    for stage in flow.row_stages:
        name = stage.model.name
        require(
            name not in stage_of_frozen,
            f"stage {stage.name!r}: model",
            name,
            rule=f"stage {stage_of_frozen.get(name)!r} runs this frozen model too, whose workers "
            "have one stage",
            fix="Give one of the stages a flow.model of its own, with the same path.",
        )
        stage_of_frozen[name] = stage.name
    run = {*trained, *stage_of_frozen, *(stage.model.name for stage in flow.all(InferStage))}
    run.update(one.name for one in flow.partners)
    for name, model in flow.models.items():
        require(
            model.is_main or name in run,
            "flow.model: name",
            name,
            rule="no stage runs this model",
            fix="Leave it out, or give it to flow.infer, flow.judge or a seat of flow.play.",
        )
        require(
            not isinstance(model.config, TrainedRoleConfig) or name in trained,
            f"flow.model({name!r}): config",
            rule="is a TrainedRoleConfig, and no stage trains the model",
            fix="Add a flow.train, or give flow.model a RoleConfig.",
        )
        require(
            model.is_main or name not in trained or not is_own_family(name),
            "flow.model: name",
            name,
            rule=f"other metrics are called {name + '/...'!r}, as those of this model would be",
            fix="Use another name, such as 'critic'.",
        )


def _check_updates(flow: StageGraph) -> None:
    """Raise InvalidValue for several updates of another policy than the main model.

    Several updates per step need π_prox, which the graph computes of its main model only.
    """
    for stage in flow.all(TrainStage):
        role = stage.model.config
        if stage.seats is None or not isinstance(role, TrainedRoleConfig):
            continue
        num_updates = role.trainer.updates_per_step
        require(
            num_updates == 1 or getattr(stage.loss, "interpolates_proximal", False),
            f"updates per step of {stage.model.name!r}",
            num_updates,
            rule="several updates (trainer.num_minibatches times num_epochs) need "
            f"{PROXIMAL_COLUMN!r}, which a graph has of its main model only",
            fix="Use one update, or a loss that interpolates this column.",
        )


def _check_means(flow: StageGraph) -> None:
    """Raise InvalidValue for a column whose mean has the name of one of rlsys's metrics."""
    own_means = {"value": VALUE_MEAN, "score": SCORE_MEAN}  # written for such a main model only
    free = {REWARD_MEAN, *own_means.values()} - {own_means.get(flow.main.head)}
    for stage in flow.stages:
        for column in stage.writes:
            mean = column_mean(column.name)
            require(
                column.per == "token" or mean in free or not is_own(mean),
                f"stage {stage.name!r}",
                column.name,
                rule=f"another metric is called {mean!r}, as the mean of this column would be",
                fix="Write a column of another name.",
            )
