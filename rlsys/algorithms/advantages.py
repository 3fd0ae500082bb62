"""Advantages of whole rollouts: how much better a rollout was than expected.

Shape legend: G rollouts of one group, B rollouts of a batch, N tokens.

Functions over a group, `(rewards [G], ...) -> [G]`, run as soon as the group is complete. Their
attribute `min_group_size` is the smallest group that they accept (group_functions.py). Functions
over a batch, `(rewards [B], ..., group_index) -> [B]`, run when all rollouts of a step are there.
`group_index` [B] int64 numbers the groups from 0.

Standard deviations have Bessel's correction unless a paper says otherwise. If all rewards are
equal, every advantage is exactly 0, whatever the rounding of their mean.
"""

from __future__ import annotations

import math

import torch

from rlsys.algorithms.group_functions import needs_group, require_group_size
from rlsys.algorithms.parameters import parameters, require_field
from rlsys.algorithms.ratios import log_ratio
from rlsys.errors import require


@needs_group(2)
def grpo_advantage(rewards: torch.Tensor, *, epsilon: float = 1e-4) -> torch.Tensor:
    """Return (r − mean) / (std + ε): GRPO, 2402.03300. [G] -> [G].

    Raises:
        InvalidValue: The group has one rollout.
    """
    return _standardised(rewards, _centred(rewards, "GRPO"), epsilon)


@needs_group(2)
def dr_grpo_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """Return r − mean: Dr. GRPO, 2503.20783. [G] -> [G].

    Raises:
        InvalidValue: The group has one rollout.
    """
    return _centred(rewards, "Dr. GRPO")


@needs_group(2)
def rloo_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """Return r − mean of the other G − 1 rewards: RLOO, 2402.14740. [G] -> [G].

    Raises:
        InvalidValue: The group has one rollout.
    """
    centred = _centred(rewards, "RLOO")
    group_size = rewards.numel()
    return centred * (group_size / (group_size - 1))  # = r − (Σr − r)/(G − 1)


@needs_group(2)
def opo_advantage(rewards: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Return r − Σ length·r / Σ length: OPO, 2505.23585. [G], [G] -> [G].

    This baseline has the least variance if the squared gradient grows with the length. If all
    completions are empty, the baseline is the plain mean.

    Args:
        rewards: Reward of each rollout.
        num_tokens: Length of each completion, in tokens.

    Raises:
        InvalidValue: The group has one rollout.
    """
    centred = _centred(rewards, "OPO")  # exact zeros, and smaller numbers in the weighted sum
    lengths = num_tokens.to(rewards.dtype)
    lengths = torch.where(lengths.sum() > 0, lengths, torch.ones_like(lengths))
    return centred - (lengths * centred).sum() / lengths.sum()


@needs_group(2)
def remax_advantage(rewards: torch.Tensor, is_greedy: torch.Tensor) -> torch.Tensor:
    """Return r − r of the prompt's greedy completion: ReMax, 2310.10505. [G], [G] -> [G].

    The greedy rollout is not trained on, so an aggregation counts none of its tokens. It adds
    nothing to the denominator of `token_mean`. It counts as a rollout in the denominators of
    `sequence_mean`, `sequence_sum` and `constant_length`, so these losses are (G − 1)/G of the
    means over the sampled rollouts, in every step. `prompt_mean` counts the prompt once in either
    case. `token_sum(rollouts_per_step)` includes it in its number and remains the sum.

    Args:
        rewards: Reward of each rollout.
        is_greedy: 1 for the greedy rollout, whose advantage is 0, and 0 for the others: the column
            rlsys.IS_GREEDY of a graph with flow.generate(..., greedy_baseline=True).

    Raises:
        InvalidValue: The group does not have exactly one greedy rollout.
    """
    greedy = is_greedy > 0
    require(
        int(greedy.sum()) == 1,
        "is_greedy",
        is_greedy.tolist(),
        rule=f"ReMax needs 1 greedy rollout in each group, not {int(greedy.sum())}",
        fix="Pass rlsys.IS_GREEDY of flow.generate(..., greedy_baseline=True).",
    )
    return rewards - rewards[greedy]


@parameters
class pass_at_k_advantage:
    """Mean advantage over all sets of k with the rollout: pass@k training, 2508.10751. [G] -> [G].

    A set has reward 1 if any of its rollouts is right, else 0. A rollout is right if its reward is
    above `right_above`. With F wrong rollouts among G, the mean reward of a set is
    m = 1 − C(F, k)/C(G, k), and its (population) standard deviation is √(m(1 − m)):

        right   (1 − m)/std          wrong   (1 − m − C(F−1, k−1)/C(G−1, k−1))/std

    A call raises InvalidValue for a group of k or fewer, whose advantages would all be 0.
    """

    k: int
    right_above: float = 0.5

    def __post_init__(self) -> None:
        require_field(self, "k", self.k >= 1, rule="must be at least 1", fix="Use such as k=4.")

    @property
    def min_group_size(self) -> int:
        """Return the size of the smallest group whose advantages are not all 0."""
        return self.k + 1

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        """Return the advantages [G]."""
        group_size = rewards.numel()
        require_group_size(group_size, self.min_group_size, f"pass_at_k_advantage(k={self.k})")
        right = rewards > self.right_above
        num_wrong = group_size - int(right.sum())
        mean = 1 - math.comb(num_wrong, self.k) / math.comb(group_size, self.k)
        if mean in (0.0, 1.0):
            return torch.zeros_like(rewards)
        std = math.sqrt(mean * (1 - mean))
        others_fail = math.comb(num_wrong - 1, self.k - 1) / math.comb(group_size - 1, self.k - 1)
        if_wrong = (1 - mean - others_fail) / std
        return torch.where(right, (1 - mean) / std, if_wrong).to(rewards.dtype)


def reinforce_plus_plus_advantage(
    rewards: torch.Tensor, group_index: torch.Tensor, *, epsilon: float = 1e-4
) -> torch.Tensor:
    """Return (r − mean) / (std + ε) over a batch: REINFORCE++, 2501.03262. [B], [B] -> [B].

    The paper has a KL penalty in the reward and normalises over the tokens of the batch, as
    `reinforce_plus_plus_token_advantage` does. Here each rollout counts once, whatever its length.
    """
    return _standardised(rewards, _centred(rewards, "REINFORCE++"), epsilon)


@needs_group(2)
def reinforce_plus_plus_baseline_advantage(
    rewards: torch.Tensor, group_index: torch.Tensor, *, epsilon: float = 1e-4
) -> torch.Tensor:
    """Return r − group mean, normalised over the batch: REINFORCE++ with baseline, 2501.03262.

    [B], [B] -> [B]. Each rollout counts once in the standard deviation; some implementations count
    each token.
    """
    advantages, _ = _centred_by_group(rewards, group_index)
    return _standardised(advantages, _centred(advantages, "REINFORCE++"), epsilon)


@needs_group(2)
def scale_rl_advantage(
    rewards: torch.Tensor, group_index: torch.Tensor, *, epsilon: float = 1e-4
) -> torch.Tensor:
    """Return (r − group mean) / std over the groups with mixed rewards: ScaleRL, 2510.13786.

    [B], [B] -> [B]. The divisor is Â_std, "the standard deviation of all advantages in a batch",
    not that of the raw rewards as in some implementations.

    The paper drops prompts whose rollouts all have the same reward, and does not replace them, so
    its effective batch consists of the other prompts. Here they stay, with advantages of exactly 0.
    The standard deviation leaves them out. Because the aggregation divides by all groups, all
    advantages are multiplied by (groups of the batch)/(groups with mixed rewards).

    If all groups have the same size and a step is one update, this equals the paper for losses
    proportional to the advantage with `prompt_mean`, `sequence_mean`, `sequence_sum`, `token_sum`
    and `constant_length`. `token_mean` divides by tokens, so there it is exact only if the groups
    with equal rewards are as long as the others. Terms without an advantage, such as the penalty of
    `with_kl`, remain a mean over all groups.
    """
    centred, mixed = _centred_by_group(rewards, group_index)
    if not mixed.any():
        return centred
    std = centred[mixed[group_index]].std()
    return centred / (std + epsilon) * (len(mixed) / mixed.sum())


def distillation_advantage(
    student_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor
) -> torch.Tensor:
    """Return log π_teacher − log π_θ, detached: on-policy distillation, Lu (2025). [N], [N] -> [N].

    Its mean over the student's own rollouts is minus the reverse KL divergence.
    """
    return log_ratio(teacher_logprobs, student_logprobs).detach()


def _centred(rewards: torch.Tensor, algorithm: str) -> torch.Tensor:
    if rewards.numel() == 1:
        require_group_size(1, 2, algorithm)
    return torch.where(_all_equal(rewards), 0.0, rewards - rewards.mean())


def _standardised(values: torch.Tensor, centred: torch.Tensor, epsilon: float) -> torch.Tensor:
    if values.numel() < 2:
        return centred
    return torch.where(_all_equal(values), 0.0, centred / (values.std() + epsilon))


def _centred_by_group(
    rewards: torch.Tensor, group_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return r − group mean [B] and which of the P groups have mixed rewards [P].

    The difference is exactly 0 in a group whose rewards are equal.
    """
    num_groups = int(group_index.max()) + 1 if group_index.numel() else 0
    sums = rewards.new_zeros(num_groups).index_add(0, group_index, rewards)
    counts = torch.bincount(group_index, minlength=num_groups)
    low = rewards.new_full((num_groups,), torch.inf)
    low = low.scatter_reduce(0, group_index, rewards, "amin")
    high = rewards.new_full((num_groups,), -torch.inf)
    high = high.scatter_reduce(0, group_index, rewards, "amax")
    mixed = low != high  # true for NaN, so that it reaches the result
    centred = rewards - (sums / counts)[group_index]
    return torch.where(mixed[group_index], centred, 0.0), mixed


def _all_equal(values: torch.Tensor) -> torch.Tensor:
    return (values == values[:1]).all()
