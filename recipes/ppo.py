"""Proximal policy optimisation (Schulman et al., 1707.06347) as RLHF has it: four models.

The policy samples; a reward model scores each completion; a frozen reference keeps the policy near
where it began; a critic says what each token promised. Per token,

    r_t = -beta (log pi - log pi_ref), and the score on the last one
    A_t = sum_k (gamma lambda)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}),    R_t = A_t + V_t

and then a clipped policy loss on A, whitened over the step, and a clipped value loss on R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlsys.config import RoleConfig, RunConfig, TrainedRoleConfig, require
from rlsys.dataflow.graph import Dataflow, Prompts, RewardFn

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """PPO's own settings."""

    clip: float = 0.2
    """A token stops being trained beyond a probability ratio of 1 - clip and 1 + clip."""
    value_clip: float = 0.2
    """The critic's values stop being trained so far from those that the step began with."""
    kl_coefficient: float = 0.05
    """Price of a nat between policy and reference, in rewards."""
    discount: float = 1.0
    """Of a reward, for each token that it lies ahead."""
    trace_decay: float = 0.95
    """GAE's lambda: 0 trusts the critic, 1 the rewards."""
    critic: TrainedRoleConfig = field(default_factory=TrainedRoleConfig)
    """The critic: a value head on a model, trained beside the policy."""
    reference: RoleConfig = field(default_factory=RoleConfig)
    """The reference: by default the policy as it was at the beginning."""
    reward_model: RoleConfig = field(default_factory=RoleConfig)
    """The reward model: any model for sequence classification with one label."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.clip < 1, f"clip={self.clip} leaves no range around 1; use 0 < clip < 1.")
        require(
            self.kl_coefficient >= 0,
            f"kl_coefficient={self.kl_coefficient} pays for leaving the reference; use >= 0.",
        )
        for name in ("discount", "trace_decay"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"{name}={value} lies outside [0, 1].")


@dataclass(frozen=True)
class Credit:
    """Advantages and returns of all tokens of a step."""

    kl_coefficient: float
    discount: float
    trace_decay: float

    def __call__(
        self,
        score: torch.Tensor,
        logprobs: torch.Tensor,
        reference_logprobs: torch.Tensor,
        values: torch.Tensor,
        row_offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from rlsys.algorithms import gae, kl_rewards, whitened

        rewards = kl_rewards(
            score, logprobs, reference_logprobs, row_offsets, coefficient=self.kl_coefficient
        )
        advantages, returns = gae(
            rewards, values, row_offsets, discount=self.discount, trace_decay=self.trace_decay
        )
        return whitened(advantages), returns


def ppo(
    cfg: PPOConfig, rewards: Sequence[RewardFn], *, rows: Sequence[dict[str, Any]] | None = None
) -> Dataflow:
    """The algorithm. `rewards` are only watched: the policy learns from the reward model."""
    from rlsys.algorithms import clipped_surrogate, clipped_value_loss, token_mean

    flow = Dataflow()
    policy = flow.model("policy")
    critic = flow.model("critic", cfg.critic, head="value")
    reference = flow.model("reference", cfg.reference)
    reward_model = flow.model("reward_model", cfg.reward_model, head="score")
    rollouts = flow.generate(policy, Prompts(config=cfg.data, rows=rows), group_size=cfg.group_size)
    watched = flow.score(rollouts, rewards)
    score = flow.infer(reward_model, rollouts, writes="score")
    reference_logprobs = flow.infer(reference, rollouts, writes="reference_logprobs")
    values = flow.infer(critic, rollouts, writes="values")
    logprobs = rollouts[2]
    advantages, returns = flow.per_batch(
        Credit(cfg.kl_coefficient, cfg.discount, cfg.trace_decay),
        score,
        logprobs,
        reference_logprobs,
        values,
        writes=("advantages", "returns"),
        per="token",
    )
    flow.train(
        policy,
        rollouts,
        advantages,
        loss=clipped_surrogate(cfg.clip, cfg.clip),
        aggregation=token_mean,
        watch=[watched, score],
    )
    flow.train(
        critic,
        rollouts,
        values,
        returns,
        loss=clipped_value_loss(cfg.value_clip),
        aggregation=token_mean,
    )
    return flow
