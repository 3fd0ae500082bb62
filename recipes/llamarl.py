"""LlamaRL's AIPO, asynchronous importance-weighted policy optimisation (Wu et al., 2505.24034).

Samplers and trainers run concurrently, and the loss does not assume equal weights. Each token's
gradient is multiplied by its importance weight, which is bounded from above only. There is no
proximal policy and no two-sided clip. The baseline is the group's mean:

    gradient = min(rho_t, c) (r - mean(r)) grad log pi(y_t),      rho = pi / mu,  c in 2 .. 10

    python recipes/llamarl.py --name llamarl
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes import arithmetic
from rlsys import AsyncConfig, Dataflow, Prompts, RewardFn, RunConfig
from rlsys.algorithms import aipo, dr_grpo_advantage, token_mean
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class LlamaRLConfig(RunConfig):
    """Settings of AIPO."""

    max_ratio: float = 4.0
    """Upper bound c of a token's importance weight."""
    asynchrony: AsyncConfig = field(default_factory=lambda: AsyncConfig(max_staleness=3))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_ratio >= 1,
            "max_ratio",
            self.max_ratio,
            rule="a bound below 1 scales on-policy gradients down",
            fix="Use 2 to 10.",
        )


def llamarl(
    cfg: LlamaRLConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    advantages = flow.per_group(dr_grpo_advantage, reward)
    flow.train(policy, rollouts, advantages, loss=aipo(cfg.max_ratio), aggregation=token_mean)
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, LlamaRLConfig):
    """Settings for the arithmetic task."""

    name: str = "llamarl"
    """Name of the run's directory below runs_dir."""


@rlsys.main
def main() -> None:
    """Run the recipe."""
    arithmetic.train(Config, llamarl)


if __name__ == "__main__":
    main()
