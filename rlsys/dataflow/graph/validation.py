"""What only the whole graph shows of a recipe that cannot run as it stands.

In: a `Dataflow`, complete. Raises ValueError: the stage, what is wrong with it, the fix.
"""

from __future__ import annotations

from rlsys.config import TrainedRoleConfig, require
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    BRANCHES,
    BRANCHES_COLUMN,
    EXPERTS_COLUMN,
    IS_GREEDY,
    PROXIMAL_COLUMN,
    SAMPLER_COLUMN,
    Column,
    ControlStage,
    GenerateStage,
    InferStage,
    PerBatchStage,
    PlayStage,
    SourceStage,
    Stage,
    TrainStage,
)
from rlsys.metrics import REWARD_MEAN, SCORE_MEAN, VALUE_MEAN, column_mean, is_own, is_own_family


def check_whole(flow: StageGraph) -> None:
    """Raise ValueError for a column that nobody reads, a stage that cannot wait for the step, no
    rows, a model that nobody runs, or trains as it says, a column whose mean is called as another
    metric.
    """
    flow.stage(SourceStage)
    flow.trained(flow.main.name)
    _check_all_is_read(flow)
    for stage in flow.stages:
        for column in stage.reads:
            _check_read(flow, stage, column)
    _check_models_used(flow)
    _check_updates(flow)
    _check_means(flow)


def check_groups(flow: StageGraph, group_size: int) -> None:
    """Raise ValueError unless groups are as large as the configuration has them."""
    source = flow.source
    require(
        source.group_size == group_size,
        f"the dataflow has groups of group_size={source.group_size} (flow.{source.name}), the "
        f"configuration says group_size={group_size}; give both the same.",
    )


def _check_all_is_read(flow: StageGraph) -> None:
    readers = {column.name for stage in flow.stages for column in stage.reads}
    has_greedy = any(stage.greedy_baseline for stage in flow.all(GenerateStage))
    require(
        not has_greedy or IS_GREEDY.name in readers,
        "flow.generate(greedy_baseline=True) samples rollouts that no stage compares with; "
        "give IS_GREEDY to flow.per_group (remax_advantage), or leave greedy_baseline out.",
    )
    for stage in flow.stages:
        unread = [column.name for column in stage.writes if column.name not in readers]
        require(
            not unread or isinstance(stage, SourceStage),
            f"stage {stage.name!r} writes {unread}, which no stage reads; drop it, or let "
            "flow.train watch it.",
        )


def _check_read(flow: StageGraph, stage: Stage, column: Column) -> None:
    require(
        column != BRANCHES or not isinstance(stage, PerBatchStage),
        f"stage {stage.name!r} reads {BRANCHES_COLUMN!r}, which has values for each branch of a "
        "rollout and none for its tokens; let it read 'turns' and 'seats'.",
    )
    require(
        column.width == 1
        or column.name in (EXPERTS_COLUMN, BRANCHES_COLUMN)
        or isinstance(stage, TrainStage),
        f"stage {stage.name!r} reads {column.name!r}, which has {column.width} values a token; "
        "only the loss of flow.train reads such columns.",
    )
    require(
        column.name not in flow.step_columns
        or isinstance(stage, TrainStage | PerBatchStage | ControlStage),
        f"stage {stage.name!r} runs as soon as it can, and reads {column.name!r}, which is there "
        "only when a step is complete; use flow.per_batch.",
    )
    require(
        not flow.source.prompts.may_be_external
        or column.name != SAMPLER_COLUMN
        or not isinstance(stage, PerBatchStage),
        f"stage {stage.name!r} reads {SAMPLER_COLUMN!r}, which nobody knows of groups that other "
        f"runs share; let flow.infer write {PROXIMAL_COLUMN!r} and read that.",
    )


def _check_models_used(flow: StageGraph) -> None:
    trained = {stage.model.name for stage in flow.all(TrainStage)}
    partners = [one for stage in flow.all(PlayStage) for one in stage.partners]
    of_rows = {one.name: "play" for one in partners if not one.may_train}
    for stage in flow.row_stages:
        name = stage.model.name
        require(
            name not in of_rows,
            f"stages {of_rows.get(name)!r} and {stage.name!r} run the frozen model {name!r}, "
            "whose workers do one thing; give one of them a flow.model of its own, with the "
            "same path.",
        )
        of_rows[name] = stage.name
    run = {*trained, *of_rows, *(stage.model.name for stage in flow.all(InferStage))}
    run.update(one.name for one in partners)
    for name, model in flow.models.items():
        require(
            model.is_main or name in run,
            f"model {name!r} is run by no stage, and would be started for nothing; leave it "
            "out, or give it to flow.infer or flow.judge, or a seat of flow.play.",
        )
        require(
            not isinstance(model.config, TrainedRoleConfig) or name in trained,
            f"model {name!r} has a TrainedRoleConfig, and no stage trains it; add a "
            "flow.train, or give flow.model a RoleConfig.",
        )
        require(
            model.is_main or name not in trained or not is_own_family(name),
            f"model {name!r} is trained, and its metrics would stand in metrics.jsonl as "
            f"{name + '/...'!r}, among others of that name; give it another one, such as "
            "'critic'.",
        )


def _check_updates(flow: StageGraph) -> None:
    """Of π_prox, which several updates of a step need, a graph has that of its main model."""
    for stage in flow.all(TrainStage):
        role = stage.model.config
        if stage.seats is None or not isinstance(role, TrainedRoleConfig):
            continue
        num = role.trainer.updates_per_step
        require(
            num == 1 or getattr(stage.loss, "interpolates_proximal", False),
            f"stage {stage.name!r} makes {num} updates of {stage.model.name!r} a step "
            "(trainer.num_minibatches times num_epochs), for which its loss needs "
            f"{PROXIMAL_COLUMN!r}, and a graph has that of its main model alone; use one "
            "update, or a loss that interpolates it.",
        )


def _check_means(flow: StageGraph) -> None:
    """A column's mean and a metric of rlsys's own must not have the same name."""
    naming_option = {"value": VALUE_MEAN, "score": SCORE_MEAN}  # by such a main model, no other
    free = {REWARD_MEAN, *naming_option.values()} - {naming_option.get(flow.main.head)}
    for stage in flow.stages:
        for column in stage.writes:
            mean = column_mean(column.name)
            require(
                column.per == "token" or mean in free or not is_own(mean),
                f"stage {stage.name!r} writes column {column.name!r}, whose mean would stand "
                f"in metrics.jsonl as {mean!r}, as another number does; give it another name.",
            )
