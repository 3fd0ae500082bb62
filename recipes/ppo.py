"""Proximal policy optimisation (Schulman et al., 1707.06347) as RLHF has it: four models.

The policy samples; a reward model scores each completion; a frozen reference keeps the policy near
where it began; a critic says what each token promised. Per token,

    r_t = -beta (log pi - log pi_ref), and the score on the last one
    A_t = sum_k lambda^k (r_{t+k} + V_{t+k+1} - V_{t+k}),    R_t = A_t + V_t

and then the clipped policy loss on A, whitened over the step, and (V - R)^2 / 2 for the critic,
which begins as the reward model (2203.02155) that recipes/reward_model.py makes from pairs first.

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
from rlsys import Dataflow, Prompts, RewardFn, RolloutConfig, RunConfig, require
from rlsys import algorithms as alg
from rlsys.config import RoleConfig, TrainedRoleConfig, TrainerConfig

SHARE = 0.4  # of the two cores that five processes have
TRAINER = arithmetic.small_trainer(num_cpus=SHARE)
CRITIC = TrainedRoleConfig(trainer=replace(TRAINER, learning_rate=6e-4))


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """PPO's own settings."""

    clip: float = 0.2
    """A token stops being trained beyond a probability ratio of 1 - clip and 1 + clip."""
    kl_coefficient: float = 0.05
    """Price of a nat between policy and reference, in rewards."""
    trace_decay: float = 0.95
    """GAE's lambda: 0 trusts the critic, 1 the rewards."""
    critic: TrainedRoleConfig = field(default_factory=TrainedRoleConfig)
    """The critic: a value head on a model, trained beside the policy."""
    reference: RoleConfig = field(default_factory=partial(RoleConfig, num_cpus=SHARE))
    """The reference: by default the policy as it was at the beginning."""
    reward_model: RoleConfig = field(default_factory=partial(RoleConfig, num_cpus=SHARE))
    """The reward model: any model for sequence classification with one label."""

    def __post_init__(self) -> None:
        super().__post_init__()
        clip, beta, decay = self.clip, self.kl_coefficient, self.trace_decay
        require(0 < clip < 1, f"clip={clip} leaves no range around 1; use 0 < clip < 1.")
        require(beta >= 0, f"kl_coefficient={beta} pays for leaving the reference; use >= 0.")
        require(0 <= decay <= 1, f"trace_decay={decay} lies outside [0, 1].")


def ppo(
    cfg: PPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """The algorithm. `rewards` are only watched: the policy learns from the reward model."""
    flow = Dataflow()
    policy = flow.model("policy")
    judge = flow.model("reward_model", cfg.reward_model, head="score")
    critic = flow.model("critic", cfg.critic, head="value")
    reference = flow.model("reference", cfg.reference)
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    watched = flow.score(rollouts, rewards)
    score = flow.infer(judge, rollouts, writes="score")
    reference_logprobs = flow.infer(reference, rollouts, writes="reference_logprobs")
    values = flow.infer(critic, rollouts, writes="values")
    columns = (score, rollouts[2], reference_logprobs, values)

    def credit(*columns: Tensor, row_offsets: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        score, logprobs, ref, values = columns
        at, beta, decay = row_offsets, cfg.kl_coefficient, cfg.trace_decay
        rewards = alg.kl_rewards(score, logprobs, ref, at, coefficient=beta, loss_mask=loss_mask)
        found, returns = alg.gae(rewards, values, at, trace_decay=decay, loss_mask=loss_mask)
        return alg.whitened(found, loss_mask=loss_mask), returns

    writes = ("advantages", "returns")
    advantages, returns = flow.per_batch(credit, *columns, writes=writes, per="token")
    loss, mean = alg.clipped_surrogate(cfg.clip, cfg.clip), alg.token_mean
    flow.train(policy, rollouts, advantages, loss=loss, aggregation=mean, watch=(watched, score))
    flow.train(critic, rollouts, returns, loss=alg.value_loss(), aggregation=mean)
    return flow


@dataclass(frozen=True, kw_only=True)
class Config(arithmetic.ArithmeticConfig, PPOConfig):
    """Of the arithmetic task."""

    name: str = "ppo"
    """Name of the run's directory below runs_dir; two runs never share one."""
    rollout: RolloutConfig = field(default_factory=partial(RolloutConfig, num_cpus=SHARE))
    trainer: TrainerConfig = field(default_factory=lambda: TRAINER)
    critic: TrainedRoleConfig = field(default_factory=lambda: CRITIC)


def judged(cfg: Config) -> Config:
    """With a reward model, trained once where no path names one; the critic begins as it."""
    cfg, path = reward_model.for_run(cfg, cfg.reward_model.model.path)
    judge = replace(cfg.reward_model, model=replace(cfg.reward_model.model, path=path))
    beginning = replace(cfg.critic.model, path=cfg.critic.model.path or path)
    return replace(cfg, reward_model=judge, critic=replace(cfg.critic, model=beginning))


@rlsys.main
def main() -> None:
    parsed = rlsys.parse(Config)
    cfg = parsed.config
    arithmetic.graph(cfg, ppo)  # its mistakes are told before a reward model is trained
    ready = cfg if parsed.dry_run and not cfg.reward_model.model.path else judged(cfg)
    arithmetic.run(ready, ppo, dry_run=parsed.dry_run)


if __name__ == "__main__":
    main()
