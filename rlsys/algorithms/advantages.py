"""Advantages: how much better a rollout was than expected.

In: rewards. Out: one advantage for each of them.

Shape legend: G rollouts of one group, B rollouts of a batch, T tokens of one rollout.

The functions of one group, `(rewards [G]) -> [G]`, can run as soon as that group is complete. Those
of a batch also take `group_index` [B] int64, which numbers the groups from 0, and must wait for all
of it. Standard deviations are those of a sample (Bessel's correction). Where all rewards are equal
every advantage is exactly 0, whatever the rounding of their mean.
"""

from __future__ import annotations

import torch

from rlsys.algorithms.ratios import log_ratio


def grpo_advantage(rewards: torch.Tensor, *, epsilon: float = 1e-4) -> torch.Tensor:
    """(r − mean) / (std + ε): GRPO, 2402.03300. [G] -> [G].

    Raises ValueError for a group of one.
    """
    return _standardised(rewards, _centred(rewards, "GRPO"), epsilon)


def dr_grpo_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """r − mean: Dr. GRPO, 2503.20783. [G] -> [G].

    Raises ValueError for a group of one.
    """
    return _centred(rewards, "Dr. GRPO")


def rloo_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """r − mean of the other G − 1 rewards: RLOO, 2402.14740. [G] -> [G].

    Raises ValueError for a group of one.
    """
    centred = _centred(rewards, "RLOO")
    group_size = rewards.numel()
    return centred * (group_size / (group_size - 1))  # = r − (Σr − r)/(G − 1)


def reinforce_plus_plus_advantage(
    rewards: torch.Tensor, *, group_index: torch.Tensor | None = None, epsilon: float = 1e-8
) -> torch.Tensor:
    """Rewards normalised over the global batch: REINFORCE++, 2501.03262. [B] -> [B].

    With `group_index` the mean of each group is subtracted first (the paper's variant with a
    baseline).
    """
    if group_index is not None:
        rewards = _centred_by_group(rewards, group_index)
    return _standardised(rewards, _centred(rewards, "REINFORCE++"), epsilon)


def scale_rl_advantage(
    rewards: torch.Tensor, group_index: torch.Tensor, *, epsilon: float = 1e-8
) -> torch.Tensor:
    """(r − mean of the group) / standard deviation of these differences over the batch. [B] -> [B].

    ScaleRL, 2510.13786: Â_i / Â_std, "the standard deviation of all advantages in a
    batch".
    """
    advantages = _centred_by_group(rewards, group_index)
    return _standardised(advantages, advantages, epsilon)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    *,
    discount: float,
    trace_decay: float,
    bootstrap_value: float = 0.0,
) -> torch.Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ V_{t+1} − V_t: GAE, 1506.02438, equation 16.

    `rewards` and `values` are [T]; the result too. `bootstrap_value` is V after the last token: 0
    where the episode ended, the critic's value where it was cut off. The critic's targets are
    the advantages plus `values`.
    """
    advantages = torch.empty_like(rewards)
    next_value, advantage = rewards.new_tensor(bootstrap_value), rewards.new_zeros(())
    for t in range(rewards.numel() - 1, -1, -1):
        delta = rewards[t] + discount * next_value - values[t]
        advantage = delta + discount * trace_decay * advantage
        advantages[t] = advantage
        next_value = values[t]
    return advantages


def distillation_advantage(
    student_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor
) -> torch.Tensor:
    """−(log π_θ − log π_teacher) per token, detached: on-policy distillation. [T], [T] -> [T].

    Its mean over the student's own rollouts is minus the reverse KL divergence.
    """
    return log_ratio(teacher_logprobs, student_logprobs).detach()


def _centred(rewards: torch.Tensor, algorithm: str) -> torch.Tensor:
    if rewards.numel() == 1:
        raise ValueError(
            f"one reward alone makes its {algorithm} advantage zero; use group_size >= 2."
        )
    return torch.where(_all_equal(rewards), 0.0, rewards - rewards.mean())


def _standardised(values: torch.Tensor, centred: torch.Tensor, epsilon: float) -> torch.Tensor:
    if values.numel() < 2:
        return centred
    return torch.where(_all_equal(values), 0.0, centred / (values.std() + epsilon))


def _centred_by_group(rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
    """r − mean of its group; exactly 0 where a group's rewards are equal. [B], [B] -> [B]."""
    num_groups = int(group_index.max()) + 1 if group_index.numel() else 0
    sums = rewards.new_zeros(num_groups).index_add(0, group_index, rewards)
    counts = torch.bincount(group_index, minlength=num_groups)
    low = rewards.new_full((num_groups,), torch.inf)
    low = low.scatter_reduce(0, group_index, rewards, "amin")
    high = rewards.new_full((num_groups,), -torch.inf)
    high = high.scatter_reduce(0, group_index, rewards, "amax")
    centred = rewards - (sums / counts)[group_index]
    return torch.where((low == high)[group_index], 0.0, centred)


def _all_equal(values: torch.Tensor) -> torch.Tensor:
    return (values == values[:1]).all()
