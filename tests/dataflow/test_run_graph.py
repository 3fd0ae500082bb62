"""The graph of a run: made from a recipe's graph, checked, and never changed."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from recipes.grpo import GRPOConfig, grpo
from rlsys.config import AsyncConfig, RoleConfig, TrainerConfig
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import RunGraph, complete_graph
from rlsys.dataflow.graph.stages import Model
from rlsys.errors import InvalidValue, InvalidValues
from tests.errors import invalid

ONE_UPDATE = GRPOConfig(group_size=2)
TWO_UPDATES = GRPOConfig(
    group_size=2,
    trainer=TrainerConfig(num_minibatches=2),
    asynchrony=AsyncConfig(max_staleness=3),
)


def stated() -> Dataflow:
    return grpo(ONE_UPDATE, [lambda rollout: 1.0])


def names(graph: Any) -> list[str]:
    return [stage.name for stage in graph.stages]


def test_each_configuration_gets_its_own_graph_from_one_recipe() -> None:
    flow = stated()
    before = [*flow.stages], dict(flow.models)
    one = complete_graph(flow, ONE_UPDATE, max_context=64)
    two = complete_graph(flow, TWO_UPDATES, experts=(6, 2))
    again = complete_graph(flow, ONE_UPDATE, max_context=64)
    assert names(one) == ["generate", "score", "advantages", "train"]
    assert names(two) == ["generate", "score", "advantages", "infer proximal_logprobs", "train"]
    assert (one.max_context, two.max_context) == (64, None)
    assert one == again
    assert ([*flow.stages], dict(flow.models)) == before


def test_nothing_changes_the_graph_of_a_run() -> None:
    flow = stated()
    graph: Any = complete_graph(flow, ONE_UPDATE)
    for name in ("stages", "models", "max_context"):
        with pytest.raises(FrozenInstanceError):
            setattr(graph, name, None)
    with pytest.raises(TypeError):
        graph.models["other"] = Model(name="other")
    with pytest.raises(TypeError):
        graph.stages[0] = graph.stages[1]
    with pytest.raises(FrozenInstanceError):
        graph.stages[0].group_size = 4
    kept = names(graph), [*graph.models]
    judge = flow.model("judge", RoleConfig())
    flow.infer(judge, flow.source.writes, writes="late")
    assert (names(graph), [*graph.models]) == kept


def test_a_graph_that_breaks_a_rule_cannot_exist() -> None:
    graph = complete_graph(stated(), ONE_UPDATE)
    with invalid("dataflow"):
        RunGraph(stages=graph.stages[:-1], models=graph.models)
    with invalid("dataflow"):
        replace(graph, stages=graph.stages[1:])


def test_groups_have_the_size_of_the_configuration() -> None:
    with invalid("flow.generate: group_size", 2):
        complete_graph(stated(), GRPOConfig(group_size=4))


def test_all_mistakes_of_a_graph_are_reported_together() -> None:
    flow = Dataflow()
    flow.generate(flow.model("policy"), stated().source.prompts, group_size=2)
    with pytest.raises(InvalidValues) as found:
        complete_graph(flow, GRPOConfig(group_size=4))
    fields = [error.field for error in found.value.errors if isinstance(error, InvalidValue)]
    assert fields == ["flow.generate: group_size", "dataflow"]
