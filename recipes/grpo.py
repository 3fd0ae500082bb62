"""Group relative policy optimisation (Shao et al., 2402.03300), asynchronous.

Sample a group of completions per prompt, score each, take as advantage how much better a completion
is than its group, and raise the probability of what was better, within a clipped range:

    A_i = (r_i - mean(r)) / (std(r) + eps),      loss = -min(rho A, clip(rho, 1 - low, 1 + high) A)

rho compares the policy being trained with the one that sampled the token, so that rollouts of
slightly older weights are weighted by how likely they still are. The mean runs over all completion
tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlsys import Dataflow, Prompts, RewardFn
from rlsys.algorithms.advantages import grpo_advantage
from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import RunConfig, require


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(RunConfig):
    """GRPO's own settings."""

    clip_low: float = 0.2
    """Tokens with a negative advantage stop being trained below a ratio of 1 - clip_low."""
    clip_high: float = 0.28
    """Tokens with a positive advantage stop being trained above a ratio of 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.group_size >= 2,
            f"group_size={self.group_size} makes every GRPO advantage zero; use group_size >= 2.",
        )
        require(
            0 < self.clip_low < 1 and self.clip_high > 0,
            f"clip_low={self.clip_low}, clip_high={self.clip_high} leave no range around 1; use "
            "0 < clip_low < 1 and clip_high > 0.",
        )


def grpo(
    cfg: GRPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    advantages = flow.per_group(grpo_advantage, reward)
    flow.train(
        policy,
        rollouts,
        advantages,
        loss=clipped_surrogate(cfg.clip_low, cfg.clip_high),
        aggregation=token_mean,
    )
    return flow
