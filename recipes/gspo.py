"""Group sequence policy optimisation (Zheng et al., 2507.18071).

The reward is of the whole completion, so the importance ratio and the clip are too. Its ratio is
the geometric mean of its tokens' ratios, and all of its tokens are kept or clipped together:

    s_i = (pi(y_i) / mu(y_i)) ** (1 / |y_i|),      loss = -min(s A, clip(s, 1 - low, 1 + high) A)

with GRPO's advantages, and several updates of the weights for each batch. How wide the clip is
belongs to how far an update moves the model: the paper has 3e-4 and 4e-4 for 30 billion parameters
at small learning rates; the small model of this task moves a hundred times as far.

    python recipes/gspo.py --name gspo
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes import arithmetic
from rlsys import AsyncConfig, Dataflow, Prompts, RewardFn, RunConfig, TrainerConfig, require
from rlsys.algorithms import grpo_advantage, sequence_mean
from rlsys.algorithms import gspo as gspo_loss


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(RunConfig):
    """GSPO's own settings."""

    clip_low: float = 3e-4
    """Completions with a negative advantage stop being trained below a ratio of 1 - clip_low."""
    clip_high: float = 4e-4
    """Completions with a positive advantage stop being trained above a ratio of 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.clip_low < 1 and self.clip_high > 0,
            f"clip_low={self.clip_low}, clip_high={self.clip_high} leave no range around 1; use "
            "0 < clip_low < 1 and clip_high > 0.",
        )


def gspo(
    cfg: GSPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
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
        loss=gspo_loss(cfg.clip_low, cfg.clip_high),
        aggregation=sequence_mean,
    )
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, GSPOConfig):
    """Of the arithmetic task."""

    name: str = "gspo"
    """Name of the run's directory below runs_dir; two runs never share one."""
    clip_low: float = 0.03
    """Completions with a negative advantage stop being trained below a ratio of 1 - clip_low."""
    clip_high: float = 0.04
    """Completions with a positive advantage stop being trained above a ratio of 1 + clip_high."""
    trainer: TrainerConfig = field(
        default_factory=lambda: arithmetic.small_trainer(num_minibatches=2)
    )
    asynchrony: AsyncConfig = field(default_factory=lambda: AsyncConfig(max_staleness=3))


@rlsys.main
def main() -> None:
    arithmetic.train(Config, gspo)


if __name__ == "__main__":
    main()
