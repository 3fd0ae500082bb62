"""Parts of graphs that several tests build."""

from dataclasses import dataclass
from typing import Any

import torch

from rlsys.algorithms import (
    cispo,
    token_mean,
)
from rlsys.config import (
    DataConfig,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import (
    Column,
    Model,
    Prompts,
)

PROMPTS = Prompts(config=DataConfig())


def center(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.mean()


def generated(flow: Dataflow) -> tuple[Column, ...]:
    return flow.generate(flow.model("policy"), PROMPTS, group_size=2)


def scored(flow: Dataflow, group_size: int = 2) -> tuple[Model, tuple[Column, ...], Column]:
    policy = flow.model("policy")
    rollouts = flow.generate(policy, PROMPTS, group_size=group_size)
    return policy, rollouts, flow.score(rollouts, [lambda rollout: 1.0])


@dataclass(frozen=True)
class mine:
    """A loss with attributes."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __call__(self, inputs: Any) -> Any:
        return inputs.trainer_logprobs, {}


def trained(flow: Dataflow, rollouts: Any, reward: Column, *columns: Column, **named: Any) -> None:
    options: dict[str, Any] = {"loss": cispo(), "aggregation": token_mean}
    flow.train(flow.main, rollouts, flow.per_group(center, reward), *columns, **options | named)
