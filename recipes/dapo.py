"""DAPO (Yu et al., 2503.14476): four changes to GRPO that keep long reasoning learning.

    clip-higher            clip(rho, 1 - 0.2, 1 + 0.28): unlikely tokens may become likely
    dynamic sampling       a group that is all right or all wrong teaches nothing; another is issued
    token mean             every token of a step weighs the same, in short rollouts and in long ones
    overlong penalty       from max_tokens - overlong_tokens on, down to -1 at max_tokens

A group is refused by the reward alone, as in the paper; the penalty enters its advantages only.
Trained groups are therefore the mixed ones: `reward/mean` is theirs and stays below 1, and
`reward/sampled_mean` is that of all groups, refused ones included.

    python recipes/dapo.py --name dapo
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import rlsys
from recipes import arithmetic
from recipes.clips import ClippedConfig
from rlsys import NUM_TOKENS, Dataflow, Prompts, RewardFn, require
from rlsys.algorithms import clipped_surrogate, dynamic_sampling, grpo_advantage, token_mean
from rlsys.rewards import length_penalty


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(ClippedConfig):
    """DAPO's own settings, beside the clips."""

    overlong_tokens: int = 4096
    """Tokens before sampling.max_tokens in which the penalty for length grows from 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.overlong_tokens <= self.sampling.max_tokens,
            f"overlong_tokens={self.overlong_tokens} leaves no range for the penalty within "
            f"sampling.max_tokens={self.sampling.max_tokens}; use about a fifth of it.",
        )


def penalised_advantage(
    rewards: torch.Tensor, num_tokens: torch.Tensor, *, max_tokens: int, overlong_tokens: int
) -> torch.Tensor:
    """GRPO's, of rewards and the penalty for length (equation 13). [G], [G] -> [G]."""
    penalties = [
        length_penalty(count, max_tokens=max_tokens, cache_tokens=overlong_tokens)
        for count in num_tokens.tolist()
    ]
    return grpo_advantage(rewards + rewards.new_tensor(penalties))


def dapo(
    cfg: DAPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    advantage = functools.partial(
        penalised_advantage,
        max_tokens=cfg.sampling.max_tokens,
        overlong_tokens=cfg.overlong_tokens,
    )
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    refusing = dynamic_sampling(advantage, by_last_column=True)
    advantages = flow.per_group(refusing, reward, NUM_TOKENS, reward)
    flow.train(
        policy,
        rollouts,
        advantages,
        loss=clipped_surrogate(cfg.clip_low, cfg.clip_high),
        aggregation=token_mean,
    )
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, DAPOConfig):
    """Of the arithmetic task."""

    name: str = "dapo"
    """Name of the run's directory below runs_dir; two runs never share one."""
    overlong_tokens: int = 3
    """Tokens before sampling.max_tokens in which the penalty for length grows from 0 to 1."""


@rlsys.main
def main() -> None:
    arithmetic.train(Config, dapo)


if __name__ == "__main__":
    main()
