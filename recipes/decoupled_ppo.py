"""Decoupled PPO, AReaL's loss for stale data (Fu et al., 2505.24298; Hilton et al., 2110.00641).

PPO's ratio corrects for the policy mu that sampled, and also bounds the step away from the current
policy. When sampling runs ahead, these are different policies, and a clip around mu pulls the
weights back to an outdated policy. Decoupled PPO clips around a proximal policy instead, the policy
at the start of the step; mu only enters as a weight:

    u = pi / pi_prox,   w = pi_prox / mu,      loss = -w min(u A, clip(u, 1 - low, 1 + high) A)

pi_prox is computed by a forward pass before the step's updates, or interpolated between mu and pi
without one (A-3PO, 2512.06547). max_staleness counts updates of the weights. With two updates per
step, 1 is on-policy at the start of a step, and 2n + 1 lets sampling run n steps ahead.

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
from rlsys import AsyncConfig, Dataflow, Prompts, RewardFn, TrainerConfig
from rlsys.algorithms import (
    decoupled_clipped_surrogate,
    grpo_advantage,
    interpolate_proximal,
    token_mean,
)
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True)
class DecoupledPPOConfig(ClippedConfig):
    """Settings of Decoupled PPO, in addition to the clips."""

    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """Policy at the center of the clip: recomputed at the start of each step, or interpolated by
    each token's staleness, without a forward pass."""
    max_weight: float = 5.0
    """Upper bound of a token's weight w."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_weight >= 1,
            "max_weight",
            self.max_weight,
            rule="a bound below 1 scales on-policy gradients down",
            fix="Use at least 1.",
        )


def decoupled_ppo(
    cfg: DecoupledPPOConfig,
    rewards: Sequence[RewardFn],
    *,
    rows: Sequence[dict[str, Any]] | None = None,
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
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
    """Settings for the arithmetic task: two updates per step, sampling up to three steps ahead."""

    name: str = "decoupled_ppo"
    """Name of the run's directory below runs_dir."""
    trainer: TrainerConfig = field(
        default_factory=lambda: arithmetic.small_trainer(num_minibatches=2)
    )
    asynchrony: AsyncConfig = field(default_factory=lambda: AsyncConfig(max_staleness=7))


@rlsys.main
def main() -> None:
    """Run the recipe."""
    arithmetic.train(Config, decoupled_ppo)


if __name__ == "__main__":
    main()
