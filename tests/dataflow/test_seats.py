"""Seats of an environment that other models play, in a graph."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from rlsys.algorithms import cispo, clipped_surrogate, token_mean, turn_advantage, value_loss
from rlsys.config import (
    DataConfig,
    JudgeConfig,
    ModelConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.dataflow.graph.stages import Episodes, Model, PlayStage, Prompts, TrainStage
from rlsys.environments.environment import agent, environment
from tests.errors import invalid

TASKS = Prompts(config=DataConfig())


@environment(seats=("first", "second", "third"))
async def game(chat: Any, task: Any) -> float:
    return float(await chat("1"))


@agent
async def alone(endpoint: Any, task: Any) -> float:
    return 1.0


def played(flow: Dataflow, **seats: Model) -> Episodes:
    policy = flow.models.get("policy") or flow.model("policy")
    return flow.play(policy, game, TASKS, group_size=2, seats=seats)


def trained(flow: Dataflow, episodes: Episodes, *names: str, loss: Any = None) -> None:
    (advantages,) = flow.per_batch(
        turn_advantage, episodes.turn_rewards, episodes.turns, episodes.seats, per="token"
    )
    for name in names:
        flow.train(
            flow.models[name],
            episodes.rollouts,
            advantages,
            loss=loss or clipped_surrogate(),
            aggregation=token_mean,
        )


def test_each_policy_reads_whose_tokens_they_are() -> None:
    flow = Dataflow()
    rival = flow.model("rival", TrainedRoleConfig())
    frozen = flow.model("frozen", JudgeConfig())
    trained(flow, played(flow, second=rival, third=frozen), "policy", "rival")
    flow.check()
    assert {one.model.name: one.seats for one in flow.all(TrainStage)} == {
        "policy": (0,),
        "rival": (1,),
    }
    for stage in flow.all(TrainStage):
        assert "seats" in {column.name for column in stage.trains_on}
    assert flow.other_policies == ["rival"]
    assert [model.name for model in flow.stage(PlayStage).partners] == ["rival", "frozen"]
    drawn = flow.to_mermaid()
    assert drawn.count("-. weights, version v+1 .-> s0") == 2


ADAPTED = RunConfig(
    group_size=2,
    model=ModelConfig(path="models/base", lora="r8"),
    rollout=RolloutConfig(engine="vllm", vllm={"enable_lora": True}),
)


def sharers(config: RunConfig, rival: ModelConfig, *, warm_starts: bool = False) -> tuple[str, ...]:
    flow = Dataflow()
    second = flow.model("rival", TrainedRoleConfig(model=rival))
    third = flow.model("frozen", RoleConfig())
    trained(flow, played(flow, second=second, third=third), "policy", "rival")
    return complete_graph(flow, config, warm_starts=warm_starts).engine_sharers


@pytest.mark.parametrize("path", ["", "models/base", os.path.abspath("models/base")])
def test_policies_with_adapters_of_one_base_model_share_engines(path: str) -> None:
    assert sharers(ADAPTED, ModelConfig(path=path, lora="r4a9:q_proj")) == ("rival",)


def test_policies_with_other_weights_have_engines_of_their_own() -> None:
    adapters = ModelConfig(lora="r4")
    assert sharers(ADAPTED, ModelConfig()) == ()
    assert sharers(ADAPTED, replace(adapters, path="models/other")) == ()
    assert sharers(ADAPTED, replace(adapters, dtype="bfloat16")) == ()
    # The rival would begin with the result of the warm start, the engine has the base model.
    assert sharers(ADAPTED, adapters, warm_starts=True) == ()
    assert sharers(ADAPTED, replace(adapters, path="models/base"), warm_starts=True) == ("rival",)
    merged = replace(ADAPTED, rollout=RolloutConfig(engine="vllm"))
    assert sharers(merged, adapters) == ()


def test_a_policy_has_all_seats_that_it_does_not_share() -> None:
    flow = Dataflow()
    rival = flow.model("rival", TrainedRoleConfig())
    trained(flow, played(flow, first=rival), "policy", "rival")
    assert [one.seats for one in flow.all(TrainStage)] == [(1, 2), (0,)]

    flow = Dataflow()
    frozen = flow.model("frozen", RoleConfig())
    trained(flow, played(flow, first=frozen, third=frozen), "policy")
    flow.check()
    assert [one.seats for one in flow.all(TrainStage)] == [None]
    assert [model.name for model in flow.stage(PlayStage).partners] == ["frozen"]
    assert flow.other_policies == []


def test_a_critic_learns_from_all_that_was_sampled() -> None:
    flow = Dataflow()
    rival = flow.model("rival", TrainedRoleConfig())
    critic = flow.model("critic", TrainedRoleConfig(), head="value")
    episodes = played(flow, second=rival)
    trained(flow, episodes, "policy", "rival")
    (returns,) = flow.per_batch(
        lambda rewards, row_offsets: rewards,
        episodes.turn_rewards,
        writes=("returns",),
        per="token",
    )
    flow.train(critic, episodes.rollouts, returns, loss=value_loss(), aggregation=token_mean)
    flow.check()
    assert [one.seats for one in flow.all(TrainStage)] == [(0, 2), (1,), None]


SEATS, SECOND = "flow.play: seats", "flow.play(seats={'second': ...})"


@pytest.mark.parametrize(
    ("seats", "field", "value", "name"),
    [
        ("second", SEATS, "second", ""),
        ({"fourth": "frozen"}, SEATS, "fourth", "['first', 'second', 'third']"),
        ({"second": "policy"}, f"{SECOND}: model", "policy", ""),
        ({"second": 3}, f"{SECOND}: model", 3, ""),
        ({"second": "scores"}, f"{SECOND}: head", "score", ""),
        ({"second": "critic"}, f"{SECOND}: model", "critic", ""),
        ({"second": "shared"}, f"{SECOND}: num_gpus", 0.5, ""),
        ({"second": "many"}, f"{SECOND}: num_workers of 'many'", 2, ""),
        (
            {"first": "frozen", "second": "frozen", "third": "frozen"},
            SEATS,
            ["first", "second", "third"],
            "'game'",
        ),
    ],
)
def test_a_model_that_cannot_play_a_seat_is_refused(
    seats: Any, field: str, value: Any, name: str
) -> None:
    flow = Dataflow()
    flow.model("policy")
    flow.model("frozen", RoleConfig())
    flow.model("scores", RoleConfig(), head="score")
    flow.model("critic", TrainedRoleConfig(), head="value")
    flow.model("shared", RoleConfig(num_gpus=0.5))
    flow.model("many", RoleConfig(num_workers=2))
    if isinstance(seats, dict):
        seats = {seat: flow.models.get(name, name) for seat, name in seats.items()}
    with invalid(field, value) as found:
        flow.play(flow.models["policy"], game, TASKS, group_size=2, seats=seats)
    assert name in found.value.rule


def test_an_agent_has_no_seats_for_others() -> None:
    flow = Dataflow()
    frozen = flow.model("frozen", RoleConfig())
    with invalid("flow.play: seats", ["policy"]):
        flow.play(flow.model("policy"), alone, TASKS, group_size=2, seats={"policy": frozen})


def test_a_model_of_another_graph_plays_no_seat() -> None:
    flow, other = Dataflow(), Dataflow()
    flow.model("frozen", RoleConfig())
    with invalid("flow.play: model", "frozen"):
        played(flow, second=other.model("frozen", RoleConfig()))


def test_a_frozen_model_that_plays_has_no_other_stage() -> None:
    flow = Dataflow()
    frozen = flow.model("frozen", RoleConfig())
    episodes = played(flow, second=frozen)
    logprobs = flow.infer(frozen, episodes.rollouts, writes="frozen_logprobs")
    (advantages,) = flow.per_batch(
        turn_advantage, episodes.turn_rewards, episodes.turns, per="token"
    )
    flow.train(
        flow.models["policy"],
        episodes.rollouts,
        advantages,
        loss=cispo(),
        aggregation=token_mean,
        watch=[logprobs],
    )
    with invalid("stage 'infer frozen_logprobs': model", "frozen"):
        flow.check()

    flow = Dataflow()
    rival = flow.model("rival", TrainedRoleConfig())
    trained(flow, played(flow, second=rival), "policy")
    with invalid("flow.model('rival'): config"):
        flow.check()


def test_several_updates_of_another_policy_want_a_loss_that_needs_no_other_column() -> None:
    def of_two_updates(loss: Any) -> Dataflow:
        flow = Dataflow()
        role = TrainedRoleConfig(trainer=TrainerConfig(num_minibatches=2))
        rival = flow.model("rival", role)
        trained(flow, played(flow, second=rival), "policy", "rival", loss=loss)
        return flow

    with invalid("updates per step of 'rival'", 2):
        of_two_updates(clipped_surrogate()).check()
