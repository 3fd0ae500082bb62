"""Proximal policy optimisation (Schulman et al., 1707.06347) for RLHF, with four models.

The policy samples; a reward model scores each completion; a frozen reference keeps the policy near
its start; a critic estimates the value V of each token. Per token,

    r_t = -beta (log pi - log pi_ref), plus the score at the last token
    A_t = sum_k lambda^k (r_{t+k} + V_{t+k+1} - V_{t+k}),    R_t = A_t + V_t

The policy has the clipped loss of A, whitened over the step, and the critic (V - R)^2 / 2. The
critic starts as the reward model (2203.02155), which recipes/reward_model.py trains from pairs
first.

    python recipes/ppo.py --name ppo
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

import rlsys
from recipes import arithmetic, reward_model
from recipes.clips import check_clip_and_kl
from rlsys import Dataflow, Prompts, RewardFn, RolloutConfig, RunConfig
from rlsys import algorithms as alg
from rlsys.config import RoleConfig, TrainedRoleConfig, TrainerConfig
from rlsys.errors import require

SHARE = 0.4  # five processes share two cores
TRAINER = arithmetic.small_trainer(num_cpus=SHARE)
CRITIC = TrainedRoleConfig(trainer=replace(TRAINER, learning_rate=6e-4))


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """Settings of PPO."""

    clip: float = 0.2
    """Tokens stop being trained at probability ratios outside of 1 - clip to 1 + clip."""
    kl_coefficient: float = 0.05
    """Coefficient beta of the KL penalty in the reward."""
    trace_decay: float = 0.95
    """Lambda of GAE: 0 uses the critic alone, 1 the rewards alone."""
    critic: TrainedRoleConfig = field(default_factory=TrainedRoleConfig)
    """The critic: a model with a value head, trained together with the policy."""
    reference: RoleConfig = field(default_factory=partial(RoleConfig, num_cpus=SHARE))
    """The reference; by default the initial policy."""
    reward_model: RoleConfig = field(default_factory=partial(RoleConfig, num_cpus=SHARE))
    """The reward model: any model for sequence classification with one label."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip_and_kl(self.clip, self.kl_coefficient)
        decay, rule = self.trace_decay, "must be between 0 and 1"
        require(0 <= decay <= 1, "trace_decay", decay, rule=rule, fix="Use 0.9 to 1.")


def ppo(
    cfg: PPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """Return the graph of PPO. `rewards` are only logged: the reward model trains the policy."""
    flow = Dataflow()
    policy = flow.model("policy")
    judge = flow.model("reward_model", cfg.reward_model, head="score")
    critic = flow.model("critic", cfg.critic, head="value")
    reference = flow.model("reference", cfg.reference)
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    logged = flow.score(rollouts, rewards)
    score = flow.infer(judge, rollouts, writes="score")
    reference_logprobs = flow.infer(reference, rollouts, writes="reference_logprobs")
    values = flow.infer(critic, rollouts, writes="values")
    columns = (score, rollouts.sampler_logprobs, reference_logprobs, values)

    def credit(*columns: Tensor, row_offsets: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute r_t, then A_t and R_t; whiten A_t over the step."""
        score, logprobs, ref, values = columns
        at, beta, decay = row_offsets, cfg.kl_coefficient, cfg.trace_decay
        rewards = alg.kl_rewards(score, logprobs, ref, at, coefficient=beta, loss_mask=loss_mask)
        found, returns = alg.gae(rewards, values, at, trace_decay=decay, loss_mask=loss_mask)
        return alg.whitened(found, loss_mask=loss_mask), returns

    writes = ("advantages", "returns")
    advantages, returns = flow.per_batch(credit, *columns, writes=writes, per="token")
    loss, mean = alg.clipped_surrogate(cfg.clip, cfg.clip), alg.token_mean
    flow.train(policy, rollouts, advantages, loss=loss, aggregation=mean, watch=(logged, score))
    flow.train(critic, rollouts, returns, loss=alg.value_loss(), aggregation=mean)
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, PPOConfig):
    """Settings for the arithmetic task."""

    name: str = "ppo"
    """Name of the run's directory below runs_dir."""
    rollout: RolloutConfig = field(default_factory=partial(RolloutConfig, num_cpus=SHARE))
    trainer: TrainerConfig = field(default_factory=lambda: TRAINER)
    critic: TrainedRoleConfig = field(default_factory=lambda: CRITIC)


def with_reward_model(cfg: Config) -> Config:
    """Return the configuration with a reward model, trained once if no path names one.

    The critic starts with its weights.
    """
    cfg, path = reward_model.reward_model_for_run(cfg, cfg.reward_model.model.path)
    judge = replace(cfg.reward_model, model=replace(cfg.reward_model.model, path=path))
    initial = replace(cfg.critic.model, path=cfg.critic.model.path or path)
    return replace(cfg, reward_model=judge, critic=replace(cfg.critic, model=initial))


@rlsys.main
def main() -> None:
    """Run the recipe."""
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    arithmetic.graph(cfg, ppo)  # finds mistakes before a reward model is trained
    ready = cfg if parsed.dry_run and not cfg.reward_model.model.path else with_reward_model(cfg)
    arithmetic.run(ready, ppo, dry_run=parsed.dry_run)


if __name__ == "__main__":
    main()
