"""Advantages of whole rollouts: how much better one was than expected.

Shape legend: G rollouts of one group, B rollouts of a batch.

The functions of one group, `(rewards [G], ...) -> [G]`, run as soon as that group is complete;
`min_group_size` says how large it must be (group_functions.py). Those of a batch, `(rewards [B],
..., group_index) -> [B]`, wait for all rollouts of a step; `group_index` [B] int64 numbers their
groups from 0.

Standard deviations are those of a sample (Bessel's correction) unless a paper says otherwise. Where
all rewards are equal every advantage is exactly 0, whatever the rounding of their mean.
"""

from __future__ import annotations

import math

import torch

from rlsys.algorithms.group_functions import needs_group
from rlsys.algorithms.parameters import parameters
from rlsys.algorithms.ratios import log_ratio


@needs_group(2)
def grpo_advantage(rewards: torch.Tensor, *, epsilon: float = 1e-4) -> torch.Tensor:
    """(r − mean) / (std + ε): GRPO, 2402.03300. [G] -> [G].

    Raises ValueError for a group of one.
    """
    return _standardised(rewards, _centred(rewards, "GRPO"), epsilon)


@needs_group(2)
def dr_grpo_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """R − mean: Dr. GRPO, 2503.20783. [G] -> [G].

    Raises ValueError for a group of one.
    """
    return _centred(rewards, "Dr. GRPO")


@needs_group(2)
def rloo_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """R − mean of the other G − 1 rewards: RLOO, 2402.14740. [G] -> [G].

    Raises ValueError for a group of one.
    """
    centred = _centred(rewards, "RLOO")
    group_size = rewards.numel()
    return centred * (group_size / (group_size - 1))  # = r − (Σr − r)/(G − 1)


@needs_group(2)
def opo_advantage(rewards: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """R − Σ length·r / Σ length: OPO, 2505.23585. [G], [G] -> [G].

    The baseline of least variance where the squared gradient grows with the length. `num_tokens` is
    the length of each completion; where all are empty the plain mean is taken.
    """
    centred = _centred(rewards, "OPO")  # exact zeros, and smaller numbers to weigh
    lengths = num_tokens.to(rewards.dtype)
    lengths = torch.where(lengths.sum() > 0, lengths, torch.ones_like(lengths))
    return centred - (lengths * centred).sum() / lengths.sum()


@needs_group(2)
def remax_advantage(rewards: torch.Tensor, is_greedy: torch.Tensor) -> torch.Tensor:
    """R − r of the greedy completion of the same prompt: ReMax, 2310.10505. [G], [G] -> [G].

    `is_greedy` is 1 for that one, whose own advantage is 0, and 0 for the others: the column
    rlsys.IS_GREEDY of a graph with flow.generate(..., greedy_baseline=True).

    That rollout is not trained on, so that it has no tokens for an aggregation. It adds nothing to
    the denominator of `token_mean`, and as much to those of `sequence_mean`, `sequence_sum` and
    `constant_length` as any rollout does, so that their losses are (G − 1)/G of the means over the
    sampled ones, in each step alike. `prompt_mean` counts the prompt once with it or without, and
    `token_sum(rollouts_per_step)`, whose number counts it, stays the sum.

    Raises ValueError for a group that has not one greedy rollout.
    """
    greedy = is_greedy > 0
    if int(greedy.sum()) != 1:
        raise ValueError(
            f"is_greedy={is_greedy.tolist()} tells of {int(greedy.sum())} greedy rollouts in a "
            "group; ReMax compares with one."
        )
    return rewards - rewards[greedy]


@parameters
class pass_at_k_advantage:
    """The mean advantage of a rollout over all sets of k that it is in, where a set is worth 1 if
    any rollout of it is right: pass@k training, 2508.10751. [G] -> [G].

    A rollout is right where its reward is more than `right_above`. With F wrong ones of G, the mean
    of a set is m = 1 − C(F, k)/C(G, k), its standard deviation (of the population) √(m(1 − m)):

        right   (1 − m)/std          wrong   (1 − m − C(F−1, k−1)/C(G−1, k−1))/std

    Raises ValueError for a group of k or fewer, whose advantages would all be 0.
    """

    k: int
    right_above: float = 0.5

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k={self.k} draws no rollout; use k >= 1, such as 4.")

    @property
    def min_group_size(self) -> int:
        return self.k + 1

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        group_size = rewards.numel()
        if group_size < self.min_group_size:
            raise ValueError(
                f"k={self.k} makes every pass@k advantage of a group of {group_size} zero; use "
                f"group_size >= {self.min_group_size}."
            )
        right = rewards > self.right_above
        num_wrong = group_size - int(right.sum())
        mean = 1 - math.comb(num_wrong, self.k) / math.comb(group_size, self.k)
        if mean in (0.0, 1.0):
            return torch.zeros_like(rewards)
        std = math.sqrt(mean * (1 - mean))
        others_fail = math.comb(num_wrong - 1, self.k - 1) / math.comb(group_size - 1, self.k - 1)
        of_wrong = (1 - mean - others_fail) / std
        return torch.where(right, (1 - mean) / std, of_wrong).to(rewards.dtype)


def reinforce_plus_plus_advantage(
    rewards: torch.Tensor, group_index: torch.Tensor, *, epsilon: float = 1e-4
) -> torch.Tensor:
    """Rewards normalised over the rollouts of a batch: REINFORCE++, 2501.03262, where nothing but
    the rollout's reward is known. [B], [B] -> [B].

    The paper has a KL penalty in the reward and normalises over the tokens of the batch:
    `reinforce_plus_plus_token_advantage` does that. Here each rollout counts once, whatever its
    length.
    """
    return _standardised(rewards, _centred(rewards, "REINFORCE++"), epsilon)


@needs_group(2)
def reinforce_plus_plus_baseline_advantage(
    rewards: torch.Tensor, group_index: torch.Tensor, *, epsilon: float = 1e-4
) -> torch.Tensor:
    """R − mean of the group, normalised over the batch: REINFORCE++ with baseline, 2501.03262.
    [B], [B] -> [B].

    Advantages of a rollout are one number, so each rollout counts once; some implementations
    count it once a token.
    """
    advantages, _ = _centred_by_group(rewards, group_index)
    return _standardised(advantages, _centred(advantages, "REINFORCE++"), epsilon)


@needs_group(2)
def scale_rl_advantage(
    rewards: torch.Tensor, group_index: torch.Tensor, *, epsilon: float = 1e-4
) -> torch.Tensor:
    """(r − mean of the group) / standard deviation of these differences, over the groups of a batch
    whose rewards differ, as if no others had been sampled: ScaleRL, 2510.13786. [B], [B] -> [B].

    Â_i / Â_std, "the standard deviation of all advantages in a batch"; not of the raw rewards, as
    some implementations have it. The paper drops prompts whose rollouts all have the same reward
    from the loss, and samples no others for them, so that the effective batch has the other prompts
    alone. Here they stay, with exact zeros; the standard deviation leaves them out, and all
    advantages are multiplied by (groups of the batch)/(groups whose rewards differ), because the
    aggregation divides by all of them. Where all groups have the same size, and a step is one
    update, that is exact for losses that are proportional to the advantage, with `prompt_mean` and
    the means over rollouts: `sequence_mean`, `sequence_sum`, `token_sum`, `constant_length`.
    `token_mean` divides by tokens: with it that is exact only where the groups that are left out
    are as long as the others. Terms without an advantage, such as `with_kl`'s, stay a mean over
    all groups.
    """
    centred, mixed = _centred_by_group(rewards, group_index)
    if not mixed.any():
        return centred
    std = centred[mixed[group_index]].std()
    return centred / (std + epsilon) * (len(mixed) / mixed.sum())


def distillation_advantage(
    student_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor
) -> torch.Tensor:
    """−(log π_θ − log π_teacher) per token, detached: on-policy distillation, Lu (2025).
    [N], [N] -> [N].

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


def _centred_by_group(
    rewards: torch.Tensor, group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """R − mean of its group [B], exactly 0 where a group's rewards are equal; and of which of the P
    groups they are not, [P] bool.
    """
    num_groups = int(group_index.max()) + 1 if group_index.numel() else 0
    sums = rewards.new_zeros(num_groups).index_add(0, group_index, rewards)
    counts = torch.bincount(group_index, minlength=num_groups)
    low = rewards.new_full((num_groups,), torch.inf)
    low = low.scatter_reduce(0, group_index, rewards, "amin")
    high = rewards.new_full((num_groups,), -torch.inf)
    high = high.scatter_reduce(0, group_index, rewards, "amax")
    mixed = low != high  # of NaN too, which is to be seen
    centred = rewards - (sums / counts)[group_index]
    return torch.where(mixed[group_index], centred, 0.0), mixed


def _all_equal(values: torch.Tensor) -> torch.Tensor:
    return (values == values[:1]).all()
