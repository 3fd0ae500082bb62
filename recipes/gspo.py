"""Group sequence policy optimisation (Zheng et al., 2507.18071).

The reward belongs to the whole completion, and so do the importance ratio and the clip. The ratio
is the geometric mean of the tokens' ratios, and all tokens are kept or clipped together:

    s_i = (pi(y_i) / mu(y_i)) ** (1 / |y_i|),      loss = -min(s A, clip(s, 1 - low, 1 + high) A)

Advantages are GRPO's, and each batch gets several updates of the weights. The width of the clip
depends on how far an update moves the model. The paper uses 3e-4 and 4e-4 for 30 billion parameters
and small learning rates; the small model of this task moves a hundred times as far.

    python recipes/gspo.py --name gspo
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes import arithmetic
from recipes.clips import check_clips
from rlsys import AsyncConfig, Dataflow, Prompts, RewardFn, RunConfig, TrainerConfig
from rlsys.algorithms import grpo_advantage, sequence_mean
from rlsys.algorithms import gspo as gspo_loss


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(RunConfig):
    """Settings of GSPO."""

    clip_low: float = 3e-4
    """Completions with a negative advantage stop being trained below a ratio of 1 - clip_low."""
    clip_high: float = 4e-4
    """Completions with a positive advantage stop being trained above a ratio of 1 + clip_high."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip_low, self.clip_high)


def gspo(
    cfg: GSPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
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
    """Settings for the arithmetic task."""

    name: str = "gspo"
    """Name of the run's directory below runs_dir."""
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
    """Run the recipe."""
    arithmetic.train(Config, gspo)


if __name__ == "__main__":
    main()
