"""REINFORCE leave-one-out (Ahmadian et al., 2402.14740).

A completion is one action with one reward, and its baseline is the mean reward of the others in its
group:

    A_i = r_i - mean of the other r,      loss = -w A sum_t log pi(y_t)

There is no clip, no critic, and no division by lengths or standard deviations. The paper samples
with the policy that it trains, so that w = 1. Here the policy may be one step older, and the
importance weight w of the whole completion corrects for it, up to a bound. The paper's KL penalty
is left out, because the reward of this task is exact.

    python recipes/rloo.py --name rloo
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rlsys
from recipes import arithmetic
from rlsys import Dataflow, Prompts, RewardFn, RunConfig
from rlsys.algorithms import corrected, reinforce, rloo_advantage, sequence_sum, sequence_tis
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class RLOOConfig(RunConfig):
    """Settings of RLOO."""

    max_weight: float = 2.0
    """Upper bound of a completion's importance weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_weight >= 1,
            "max_weight",
            self.max_weight,
            rule="a bound below 1 scales on-policy gradients down",
            fix="Use at least 1.",
        )


def rloo(
    cfg: RLOOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
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
    """Settings for the arithmetic task."""

    name: str = "rloo"
    """Name of the run's directory below runs_dir."""


@rlsys.main
def main() -> None:
    """Run the recipe."""
    arithmetic.train(Config, rloo)


if __name__ == "__main__":
    main()
