"""REINFORCE++ (Hu et al., 2501.03262): PPO's tricks without its critic.

One completion a prompt and no baseline of a group: what PPO takes from its critic, a normalisation
over the whole batch replaces. A frozen reference holds the policy near where it began, with a
penalty in the reward of every token, so that a token's advantage is what comes after it:

    A_t = r(y) - beta sum_{i >= t} (log pi - log pi_ref)_i,      A = (A - mean A) / std A

with mean and deviation over all tokens of the step; then PPO's clipped loss on every token.

    python recipes/reinforce_pp.py --name reinforce_pp
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import rlsys
from recipes import arithmetic
from rlsys import (
    Dataflow,
    Prompts,
    RewardFn,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    require,
)
from rlsys.algorithms import clipped_surrogate, reinforce_plus_plus_token_advantage, token_mean


@dataclass(frozen=True, kw_only=True)
class ReinforcePPConfig(RunConfig):
    """REINFORCE++'s own settings."""

    group_size: int = 1
    """Rollouts per prompt; no advantage compares those of one prompt."""
    clip: float = 0.2
    """A token stops being trained beyond a probability ratio of 1 - clip and 1 + clip."""
    kl_coefficient: float = 0.01
    """Price of a nat between policy and reference, in rewards."""
    reference: RoleConfig = field(default_factory=RoleConfig)
    """The reference: by default the policy as it was at the beginning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.clip < 1, f"clip={self.clip} leaves no range around 1; use 0 < clip < 1.")
        require(
            self.kl_coefficient >= 0,
            f"kl_coefficient={self.kl_coefficient} pays for leaving the reference; use >= 0.",
        )


def reinforce_pp(
    cfg: ReinforcePPConfig,
    rewards: Sequence[RewardFn],
    *,
    rows: Sequence[dict[str, Any]] | None = None,
) -> Dataflow:
    """The algorithm. `rows` replaces the dataset of cfg.data where a recipe makes its own."""
    flow = Dataflow()
    policy = flow.model("policy")
    reference = flow.model("reference", cfg.reference)
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    reward = flow.score(rollouts, rewards)
    reference_logprobs = flow.infer(reference, rollouts, writes="reference_logprobs")
    logprobs = rollouts[2]
    advantages = flow.per_batch(
        functools.partial(reinforce_plus_plus_token_advantage, coefficient=cfg.kl_coefficient),
        reward,
        logprobs,
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
    """Of the arithmetic task. Three processes share two cores."""

    name: str = "reinforce_pp"
    """Name of the run's directory below runs_dir; two runs never share one."""
    prompts_per_step: int = 512
    """Groups in one optimizer step."""
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(max_running=512, num_cpus=0.8)
    )
    trainer: TrainerConfig = field(default_factory=lambda: arithmetic.small_trainer(num_cpus=0.8))
    reference: RoleConfig = field(default_factory=lambda: RoleConfig(num_cpus=0.4))


@rlsys.main
def main() -> None:
    arithmetic.train(Config, reinforce_pp)


if __name__ == "__main__":
    main()
