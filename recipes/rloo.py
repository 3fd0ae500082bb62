"""REINFORCE leave-one-out (Ahmadian et al., 2402.14740).

A completion is one action, its reward is of the whole, and the baseline of each is what its
siblings got:

    A_i = r_i - mean of the other r,      loss = -w A sum_t log pi(y_t)

No clip, no critic, no division by lengths or standard deviations. The paper samples with the policy
that it trains, so that w = 1. Here the policy may be a step older; w, of the whole completion as
the action is, corrects for it up to a bound. The paper's KL penalty is left out: the reward here is
the truth, and nothing holds the policy to where it began.

    python recipes/rloo.py --name rloo
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rlsys
from recipes import arithmetic
from rlsys import Dataflow, Prompts, RewardFn, RunConfig, require
from rlsys.algorithms import corrected, reinforce, rloo_advantage, sequence_sum, sequence_tis


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(RunConfig):
    """RLOO's own settings."""

    max_weight: float = 2.0
    """Bound of a completion's importance weight, its probability now over that when sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_weight >= 1,
            f"max_weight={self.max_weight} would scale on-policy gradients down; use at least 1.",
        )


def rloo(
    cfg: RLOOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    advantages = flow.per_group(rloo_advantage, reward)
    flow.train(
        policy,
        rollouts,
        advantages,
        loss=corrected(reinforce(), sequence_tis(cfg.max_weight)),
        aggregation=sequence_sum,
    )
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, RLOOConfig):
    """Of the arithmetic task."""

    name: str = "rloo"
    """Name of the run's directory below runs_dir; two runs never share one."""


@rlsys.main
def main() -> None:
    arithmetic.train(Config, rloo)


if __name__ == "__main__":
    main()
