"""The graph of a run: a recipe's graph, checked and completed for one configuration and model.

    Dataflow, configuration, facts about the model ─► complete_graph ─► RunGraph

Nothing changes a RunGraph. Another configuration needs another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rlsys.config import RunConfig, TrainedRoleConfig
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import (
    BRANCHES_COLUMN,
    EXPERTS_COLUMN,
    PROXIMAL_COLUMN,
    ROLLOUT_COLUMNS,
    Column,
    InferStage,
    Model,
    SourceStage,
    Stage,
    TrainStage,
)
from rlsys.dataflow.graph.validation import check_groups, check_records_experts, check_whole
from rlsys.errors import ErrorCollector


@dataclass(frozen=True, kw_only=True)
class RunGraph(StageGraph):
    """A graph that is complete for one run and satisfies all rules about graphs.

    Raises:
        InvalidValue: The graph breaks a rule.
    """

    stages: tuple[Stage, ...]
    models: Mapping[str, Model]
    max_context: int | None = None
    engine_sharers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))
        check_whole(self)


def complete_graph(
    flow: StageGraph,
    config: RunConfig,
    *,
    max_context: int | None = None,
    experts: tuple[int, int] | None = None,
    warm_starts: bool = False,
) -> RunGraph:
    """Return the graph of a run. The recipe's graph `flow` does not change.

    The result has the stage that computes π_prox if a step makes several updates that need it, and
    the column of experts if routing is replayed.

    Args:
        flow: The graph that the recipe states.
        config: The configuration.
        max_context: Maximum tokens of a row of the main model.
        experts: If routing is replayed: how many numbers each token has, and the bytes of each
            (rlsys.engines.models.routing).
        warm_starts: Whether supervised steps change the main model before the run.

    Raises:
        InvalidValue: The graph breaks a rule or does not fit the configuration.
    """
    mistakes = ErrorCollector()
    with mistakes.collect():
        check_groups(flow, config.group_size)
    with mistakes.collect():
        check_whole(flow)
    if config.rollout.replay_routing:
        with mistakes.collect():
            check_records_experts(flow)
    mistakes.raise_found()
    stages = _with_proximal(flow, config.trainer.updates_per_step)
    if experts is not None:
        stages = _with_experts(stages, *experts)
    return RunGraph(
        stages=stages,
        models=flow.models,
        max_context=max_context,
        engine_sharers=_engine_sharers(flow, config, warm_starts=warm_starts),
    )


def _engine_sharers(flow: StageGraph, config: RunConfig, *, warm_starts: bool) -> tuple[str, ...]:
    """Return the other policies that an engine with the main model's base weights can serve too.

    vLLM gets their adapters unmerged, and they have the same base model in the same precision.
    A policy without a path begins with the main model's weights, which a warm start changes.
    """
    own = config.model

    def has_own_base(path: str) -> bool:
        return os.path.abspath(path) == os.path.abspath(own.path) if path else not warm_starts

    return tuple(
        name
        for name in flow.other_policies
        if isinstance(role := flow.models[name].config, TrainedRoleConfig)
        and config.rollout.sends_adapters
        and own.lora
        and role.model.lora
        and role.model.dtype == own.dtype
        and has_own_base(role.model.path)
    )


def _with_proximal(flow: StageGraph, updates_per_step: int) -> tuple[Stage, ...]:
    """Return the stages, and the one that computes π_prox if several updates of a step need it.

    π_prox is the policy at the beginning of the step. The stage is not needed if the graph has the
    column "proximal_logprobs" or the loss interpolates it.
    """
    stages = tuple(flow.stages)
    stage = flow.trained(flow.main.name)
    if (
        updates_per_step == 1
        or flow.main.head != "logits"
        or any(column.name == PROXIMAL_COLUMN for one in stages for column in one.writes)
        or getattr(stage.loss, "interpolates_proximal", False)
    ):
        return stages
    place = stages.index(stage)
    rollouts = (*ROLLOUT_COLUMNS, BRANCHES_COLUMN)
    column = Column(PROXIMAL_COLUMN, "token")
    infer = InferStage(
        name=f"infer {PROXIMAL_COLUMN}",
        reads=tuple(one for one in stage.reads if one.name in rollouts),
        writes=(column,),
        model=stage.model,
    )
    train = replace(stage, reads=(*stage.reads, column))
    return (*stages[:place], infer, train, *stages[place + 1 :])


def _with_experts(stages: Sequence[Stage], width: int, value_bytes: int) -> tuple[Stage, ...]:
    """Return the stages with the column of experts, which all stages of the main model read."""
    column = Column(EXPERTS_COLUMN, "token", width, value_bytes)

    def extended(stage: Stage) -> Stage:
        if isinstance(stage, SourceStage):
            return replace(stage, writes=(*stage.writes, column))
        if isinstance(stage, InferStage | TrainStage) and stage.model.is_main:
            return replace(stage, reads=(*stage.reads, column))
        return stage

    return tuple(map(extended, stages))
