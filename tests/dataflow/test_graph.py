"""The graph refuses what could never run, with the names in the message."""

from pathlib import Path

import pytest
import torch

from recipes.grpo import GRPOConfig, grpo
from rlsys.config import DataConfig
from rlsys.dataflow.graph import Column, Dataflow, GenerateStage, Prompts, TrainStage


def center(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.mean()


def generated(flow: Dataflow) -> tuple[Column, ...]:
    return flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)


def test_columns_connect_the_stages() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    reward = flow.score(rollouts, [lambda rollout: 1.0])
    advantage = flow.per_group(center, reward)
    assert reward == Column("reward")
    assert advantage == Column("advantages")
    assert flow.stage(GenerateStage).group_size == 2
    assert "score" in flow.describe()
    with pytest.raises(ValueError, match="no TrainStage"):
        flow.stage(TrainStage)


def test_a_column_that_nobody_writes_is_refused() -> None:
    flow = Dataflow()
    generated(flow)
    with pytest.raises(ValueError, match="'advantages' reads column 'values'"):
        flow.per_group(center, Column("values"))


def test_two_writers_of_one_column_are_refused() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    flow.score(rollouts, [lambda rollout: 1.0])
    with pytest.raises(ValueError, match=r"'score' stands twice"):
        flow.score(rollouts, [lambda rollout: 1.0])
    with pytest.raises(ValueError, match=r"writes column 'reward', as stage 'score' does"):
        flow.per_group(center, Column("reward"), name="reward")


def test_no_reward_is_refused() -> None:
    flow = Dataflow()
    with pytest.raises(ValueError, match="at least one reward function"):
        flow.score(generated(flow), [])


def test_the_documentation_shows_the_graph_that_runs() -> None:
    drawn = grpo(GRPOConfig(), [lambda rollout: 1.0]).to_mermaid()
    page = (Path(__file__).parents[2] / "docs" / "dataflow.md").read_text()
    assert f"```mermaid\n{drawn}\n```" in page
