"""DAPO (Yu et al., 2503.14476): four changes to GRPO for long reasoning.

    clip-higher            clip(rho, 1 - 0.2, 1 + 0.28): unlikely tokens may become likely
    dynamic sampling       a group of equal rewards has no gradient, and is replaced by another one
    token mean             every token of a step has the same weight, in short and long rollouts
    overlong penalty       from max_tokens - overlong_tokens on, down to -1 at max_tokens

As in the paper, groups are dropped by their rewards alone; the penalty only changes advantages.
`reward/mean` is that of the trained groups, whose rewards differ, and stays below 1.
`reward/sampled_mean` includes the dropped groups.

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
from rlsys import NUM_TOKENS, Dataflow, Prompts, RewardFn
from rlsys.algorithms import clipped_surrogate, dynamic_sampling, grpo_advantage, token_mean
from rlsys.errors import require
from rlsys.rewards import length_penalty


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(ClippedConfig):
    """Settings of DAPO, in addition to the clips."""

    overlong_tokens: int = 4096
    """Tokens before sampling.max_tokens in which the length penalty grows from 0 to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.overlong_tokens <= self.sampling.max_tokens,
            "overlong_tokens",
            self.overlong_tokens,
            rule=f"must be between 1 and sampling.max_tokens={self.sampling.max_tokens}",
            fix="Use about a fifth of sampling.max_tokens.",
        )


def penalised_advantage(
    rewards: torch.Tensor, num_tokens: torch.Tensor, *, max_tokens: int, overlong_tokens: int
) -> torch.Tensor:
    """Return GRPO's advantages of rewards plus length penalties (equation 13). [G], [G] -> [G]."""
    penalties = [
        length_penalty(count, max_tokens=max_tokens, cache_tokens=overlong_tokens)
        for count in num_tokens.tolist()
    ]
    return grpo_advantage(rewards + rewards.new_tensor(penalties))


def dapo(
    cfg: DAPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    advantage = functools.partial(
        penalised_advantage,
        max_tokens=cfg.sampling.max_tokens,
        overlong_tokens=cfg.overlong_tokens,
    )
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    filtered = dynamic_sampling(advantage, by_last_column=True)  # drops groups by the last column
    advantages = flow.per_group(filtered, reward, NUM_TOKENS, reward)
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
    """Settings for the arithmetic task."""

    name: str = "dapo"
    """Name of the run's directory below runs_dir."""
    overlong_tokens: int = 3
    """Tokens before sampling.max_tokens in which the length penalty grows from 0 to 1."""


@rlsys.main
def main() -> None:
    """Run the recipe."""
    arithmetic.train(Config, dapo)


if __name__ == "__main__":
    main()
