"""REINFORCE++ (Hu et al., 2501.03262): PPO without its critic.

There is one completion per prompt and no baseline of a group; a normalisation over the whole batch
replaces PPO's critic. A frozen reference keeps the policy near its start by a penalty in the reward
of every token, so that a token's advantage is the sum of the later rewards:

    A_t = r(y) - beta sum_{i >= t} (log pi - log pi_ref)_i,      A = (A - mean A) / std A

with mean and standard deviation over all tokens of the step. PPO's clipped loss follows for every
token.

    python recipes/reinforce_pp.py --name reinforce_pp
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes import arithmetic
from recipes.clips import check_clip_and_kl
from rlsys import (
    Dataflow,
    Prompts,
    RewardFn,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rlsys.algorithms import clipped_surrogate, reinforce_plus_plus_token_advantage, token_mean


@dataclass(frozen=True, kw_only=True)
class ReinforcePPConfig(RunConfig):
    """Settings of REINFORCE++."""

    group_size: int = 1
    """Rollouts per prompt. Advantages do not compare them."""
    clip: float = 0.2
    """Tokens stop being trained at probability ratios outside of 1 - clip to 1 + clip."""
    kl_coefficient: float = 0.01
    """Coefficient beta of the KL penalty in the reward."""
    reference: RoleConfig = field(default_factory=RoleConfig)
    """The reference; by default the initial policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip_and_kl(self.clip, self.kl_coefficient)


def reinforce_pp(
    cfg: ReinforcePPConfig,
    rewards: Sequence[RewardFn],
    *,
    rows: Sequence[dict[str, Any]] | None = None,
) -> Dataflow:
    """Return the graph of the algorithm. `rows` replaces the dataset of cfg.data."""
    flow = Dataflow()
    policy = flow.model("policy")
    reference = flow.model("reference", cfg.reference)
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    reference_logprobs = flow.infer(reference, rollouts, writes="reference_logprobs")
    advantages = flow.per_batch(
        functools.partial(reinforce_plus_plus_token_advantage, coefficient=cfg.kl_coefficient),
        reward,
        rollouts.sampler_logprobs,
        reference_logprobs,
        per="token",
    )
    flow.train(
        policy,
        rollouts,
        *advantages,
        loss=clipped_surrogate(cfg.clip, cfg.clip),
        aggregation=token_mean,
        watch=[reward],
    )
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, ReinforcePPConfig):
    """Settings for the arithmetic task, with three processes on two cores."""

    name: str = "reinforce_pp"
    """Name of the run's directory below runs_dir."""
    prompts_per_step: int = 512
    """Groups in one optimizer step."""
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(max_running=512, num_cpus=0.8)
    )
    trainer: TrainerConfig = field(default_factory=lambda: arithmetic.small_trainer(num_cpus=0.8))
    reference: RoleConfig = field(default_factory=lambda: RoleConfig(num_cpus=0.4))


@rlsys.main
def main() -> None:
    """Run the recipe."""
    arithmetic.train(Config, reinforce_pp)


if __name__ == "__main__":
    main()
