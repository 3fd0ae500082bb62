"""Dr. GRPO, "GRPO done right" (Liu et al., 2503.20783).

GRPO divides a rollout's loss by its length, so that long wrong answers are punished less than short
ones. It also divides advantages by the standard deviation of their group, so that questions that
are almost always or almost never answered weigh more. Dr. GRPO does neither:

    A_i = r_i - mean(r),      loss = sum_t -min(rho A, clip(rho, 1 - low, 1 + high) A) / max_tokens

    python recipes/dr_grpo.py --name dr_grpo
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rlsys
from recipes import arithmetic
from recipes.clips import ClippedConfig
from rlsys import Dataflow, Prompts, RewardFn
from rlsys.algorithms import clipped_surrogate, constant_length, dr_grpo_advantage


@dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(ClippedConfig):
    """Settings of Dr. GRPO: only the clips. The constant is sampling.max_tokens."""


def dr_grpo(
    cfg: DrGRPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    advantages = flow.per_group(dr_grpo_advantage, reward)
    flow.train(
        policy,
        rollouts,
        advantages,
        loss=clipped_surrogate(cfg.clip_low, cfg.clip_high),
        aggregation=constant_length(cfg.sampling.max_tokens),
    )
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, DrGRPOConfig):
    """Settings for the arithmetic task."""

    name: str = "dr_grpo"
    """Name of the run's directory below runs_dir."""


@rlsys.main
def main() -> None:
    """Run the recipe."""
    arithmetic.train(Config, dr_grpo)


if __name__ == "__main__":
    main()
