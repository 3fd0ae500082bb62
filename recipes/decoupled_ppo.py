"""Decoupled PPO, as AReaL trains on stale data (Fu et al., 2505.24298; Hilton et al., 2110.00641).

PPO's ratio does two things: it corrects for the policy mu that sampled, and bounds the step from
the policy where it began. When sampling runs ahead the two are not the same policy, and a clip
around mu pulls the weights back to what is long gone. Here a proximal policy, that of the step's
beginning, is what the clip is around; mu only weighs:

    u = pi / pi_prox,   w = pi_prox / mu,      loss = -w min(u A, clip(u, 1 - low, 1 + high) A)

pi_prox is computed by a forward pass before the step's updates, or interpolated between mu and pi
without one (A-3PO, 2512.06547). max_staleness counts updates of the weights: at two a step, 1 is
on-policy at the step's beginning, and 2n + 1 lets sampling run n steps ahead.

    python recipes/decoupled_ppo.py --name eta3 --asynchrony.max-staleness 7
    python recipes/decoupled_ppo.py --name eta8 --asynchrony.max-staleness 17
    python recipes/decoupled_ppo.py --name interpolated --proximal interpolated
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import rlsys
from recipes import arithmetic
from recipes.clips import ClippedConfig
from rlsys import AsyncConfig, Dataflow, Prompts, RewardFn, TrainerConfig, require
from rlsys.algorithms import (
    decoupled_clipped_surrogate,
    grpo_advantage,
    interpolate_proximal,
    token_mean,
)


@dataclass(frozen=True, kw_only=True)
class DecoupledPPOConfig(ClippedConfig):
    """Decoupled PPO's own settings, beside the clips."""

    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """The policy that the clip is around: recomputed at the beginning of each step, or interpolated
    by each token's staleness, which costs nothing."""
    max_weight: float = 5.0
    """Bound of a token's weight w: its probability at the step's beginning over that when it was
    sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_weight >= 1,
            f"max_weight={self.max_weight} would scale on-policy gradients down; use at least 1.",
        )


def decoupled_ppo(
    cfg: DecoupledPPOConfig,
    rewards: Sequence[RewardFn],
    *,
    rows: Sequence[dict[str, Any]] | None = None,
) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    loss = decoupled_clipped_surrogate(cfg.clip_low, cfg.clip_high, cfg.max_weight)
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    columns = [flow.per_group(grpo_advantage, reward)]
    if cfg.proximal == "recomputed":
        columns.append(flow.infer(policy, rollouts, writes="proximal_logprobs"))
    flow.train(
        policy,
        rollouts,
        *columns,
        loss=loss if cfg.proximal == "recomputed" else interpolate_proximal(loss),
        aggregation=token_mean,
    )
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, DecoupledPPOConfig):
    """Of the arithmetic task: two updates a step, sampling up to three steps ahead."""

    name: str = "decoupled_ppo"
    """Name of the run's directory below runs_dir; two runs never share one."""
    trainer: TrainerConfig = field(
        default_factory=lambda: arithmetic.small_trainer(num_minibatches=2)
    )
    asynchrony: AsyncConfig = field(default_factory=lambda: AsyncConfig(max_staleness=7))


@rlsys.main
def main() -> None:
    arithmetic.train(Config, decoupled_ppo)


if __name__ == "__main__":
    main()
