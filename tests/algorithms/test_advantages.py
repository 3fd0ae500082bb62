import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.advantages import (
    distillation_advantage,
    dr_grpo_advantage,
    grpo_advantage,
    opo_advantage,
    pass_at_k_advantage,
    reinforce_plus_plus_advantage,
    reinforce_plus_plus_baseline_advantage,
    remax_advantage,
    rloo_advantage,
    scale_rl_advantage,
)
from rlsys.algorithms.aggregation import (
    Aggregation,
    constant_length,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_sum,
)
from rlsys.algorithms.group_functions import min_group_size
from rlsys.algorithms.losses import cispo
from tests.algorithms.loss_inputs import policy_inputs
from tests.errors import invalid

BatchAdvantage = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GroupAdvantage = Callable[[torch.Tensor], torch.Tensor]
GROUP_ADVANTAGES: list[GroupAdvantage] = [grpo_advantage, dr_grpo_advantage, rloo_advantage]

rewards_of_a_group = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=12).map(
    torch.tensor
)


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])  # mean 1/4, sample variance (9+1+1+1)/16/3 = 1/4
    torch.testing.assert_close(
        grpo_advantage(rewards, epsilon=0.5), torch.tensor([0.75, -0.25, -0.25, -0.25])
    )
    torch.testing.assert_close(
        dr_grpo_advantage(rewards), torch.tensor([0.75, -0.25, -0.25, -0.25])
    )
    torch.testing.assert_close(rloo_advantage(rewards), torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


def test_batch_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 4.0, 2.0])
    groups = torch.tensor([0, 0, 1, 1])
    # Centred by group: 1/2, -1/2, 1, -1; their sample variance is (1/4 + 1/4 + 1 + 1) / 3 = 5/6.
    expected = torch.tensor([0.5, -0.5, 1.0, -1.0]) / (5 / 6) ** 0.5
    torch.testing.assert_close(scale_rl_advantage(rewards, groups, epsilon=0.0), expected)
    torch.testing.assert_close(
        reinforce_plus_plus_baseline_advantage(rewards, groups, epsilon=0.0), expected
    )
    # Without groups: mean 7/4, sample variance (9 + 49 + 81 + 1) / 16 / 3 = 35/12.
    torch.testing.assert_close(
        reinforce_plus_plus_advantage(rewards, groups, epsilon=0.0),
        torch.tensor([-0.75, -1.75, 2.25, 0.25]) / (35 / 12) ** 0.5,
    )


# Two mixed groups of two rollouts among two whose rewards are equal, and the rollouts' lengths.
REWARDS = [0.1, 0.1, 1.0, 0.0, 1.0, 1.0, 4.0, 2.0]
LENGTHS = [9, 1, 3, 2, 5, 6, 1, 4]
MIXED_ROWS = [2, 3, 6, 7]


def test_scale_rl_is_that_of_the_mixed_groups_alone() -> None:
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    found = scale_rl_advantage(torch.tensor(REWARDS), groups, epsilon=0.0)
    # Centred by group: 1/2, -1/2, 1, -1, of variance 5/6; times the four groups of which two are
    # mixed.
    scale = 4 / 2 / (5 / 6) ** 0.5
    expected = torch.tensor([0.0, 0.0, 0.5, -0.5, 0.0, 0.0, 1.0, -1.0]) * scale
    torch.testing.assert_close(found, expected)
    assert (found == 0).tolist() == [row not in MIXED_ROWS for row in range(8)]
    # ε stands beside the standard deviation, and no group of equal rewards changes that.
    torch.testing.assert_close(
        scale_rl_advantage(torch.tensor(REWARDS), groups, epsilon=1.0),
        expected * (5 / 6) ** 0.5 / ((5 / 6) ** 0.5 + 1),
    )


def test_scale_rl_of_one_mixed_group() -> None:
    # 1/2 and -1/2 have the variance 1/2; one group of three is mixed.
    rewards, groups = torch.tensor([5.0, 5.0, 1.0, 0.0, 0.1, 0.1]), torch.tensor([0, 0, 1, 1, 2, 2])
    found = scale_rl_advantage(rewards, groups, epsilon=0.0)
    expected = torch.tensor([0.0, 0.0, 0.5, -0.5, 0.0, 0.0]) * 3 * 2**0.5
    torch.testing.assert_close(found, expected)


def scale_rl_step(
    rows: list[int], lengths: list[int], aggregation: Aggregation
) -> tuple[float, list[list[float]]]:
    """Loss of a step of these rollouts, and its gradient in each token's log-probability."""
    rewards = torch.tensor([REWARDS[row] for row in rows])
    groups = torch.tensor([row // 2 for row in rows]).unique(return_inverse=True)[1]
    advantages = scale_rl_advantage(rewards, groups)
    row_index = torch.cat([torch.full((lengths[row],), i) for i, row in enumerate(rows)])
    # Each token's policies depend on its rollout and its place in it alone.
    place = torch.cat([torch.arange(lengths[row]) + row for row in rows])
    inputs = policy_inputs(
        trainer=-1 - torch.sin(place),
        proximal=-1 - torch.sin(place),
        sampler=-1 - torch.cos(place),
        advantages=advantages[row_index],
        rows=row_index.tolist(),
    )
    weights, denominator = torch.zeros(len(rows)), 0.0
    for i, row in enumerate(rows):
        of_group = lengths[row // 2 * 2] + lengths[row // 2 * 2 + 1]
        weight, part = aggregation(2, of_group, lengths[row])
        weights[i] = weight
        denominator += part
    loss = (weights[row_index] * cispo()(inputs)[0]).sum() / denominator
    (gradient,) = torch.autograd.grad(loss, inputs.trainer_logprobs)
    return loss.item(), [part.tolist() for part in gradient.split([lengths[row] for row in rows])]


@pytest.mark.parametrize(
    "aggregation",
    [prompt_mean, sequence_mean, sequence_sum, constant_length(9), token_sum(8)],
)
def test_groups_of_equal_rewards_change_nothing_of_a_scale_rl_step(
    aggregation: Aggregation,
) -> None:
    """As if they had not been sampled, whatever their lengths."""
    expected, gradients = scale_rl_step(MIXED_ROWS, LENGTHS, aggregation)
    assert expected != 0
    for rows in ([2, 3, 4, 5, 6, 7], list(range(8))):
        loss, found = scale_rl_step(rows, LENGTHS, aggregation)
        assert loss == pytest.approx(expected, rel=1e-5)
        for row, gradient in zip(rows, found, strict=True):
            if row in MIXED_ROWS:
                assert gradient == pytest.approx(gradients[MIXED_ROWS.index(row)], rel=1e-5)
            else:
                assert not any(gradient)


def test_a_token_mean_of_scale_rl_counts_the_lengths_of_equal_groups() -> None:
    """It divides by the tokens of all groups: right where those have as many as the mixed ones."""
    alone, _ = scale_rl_step(MIXED_ROWS, LENGTHS, token_mean)  # 3 + 2 + 1 + 4 = 10 tokens
    # Rollouts 0 and 1 have 10 tokens too, in one group and not in two.
    with_long, _ = scale_rl_step([0, 1, *MIXED_ROWS], LENGTHS, token_mean)
    assert with_long == pytest.approx(alone * 3 / 2 * 10 / 20, rel=1e-5)
    as_long, _ = scale_rl_step([0, 1, *MIXED_ROWS], [4, 1, *LENGTHS[2:]], token_mean)
    assert as_long == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    "advantage",
    [
        reinforce_plus_plus_advantage,
        reinforce_plus_plus_baseline_advantage,
        scale_rl_advantage,
    ],
)
@given(reward=st.floats(-10, 10, width=32), groups=st.integers(1, 4), size=st.integers(2, 5))
def test_equal_rewards_of_a_batch_give_exact_zeros(
    advantage: BatchAdvantage, reward: float, groups: int, size: int
) -> None:
    index = torch.arange(groups).repeat_interleave(size)
    found = advantage(torch.full((groups * size,), reward), index)
    assert found.tolist() == [0.0] * groups * size


@pytest.mark.parametrize("advantage", [reinforce_plus_plus_baseline_advantage, scale_rl_advantage])
@given(rewards=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=5))
def test_groups_of_equal_rewards_each_give_exact_zeros(
    advantage: BatchAdvantage, rewards: list[float]
) -> None:
    """Whatever the rewards of one group are to another's."""
    index = torch.arange(len(rewards)).repeat_interleave(3)
    found = advantage(torch.tensor(rewards).repeat_interleave(3), index)
    assert found.tolist() == [0.0] * len(index)


def test_a_reward_that_is_no_number_is_not_taken_for_an_equal_one() -> None:
    rewards, groups = torch.tensor([math.nan, math.nan, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert not scale_rl_advantage(rewards, groups).isfinite().any()


def test_pass_at_k_by_hand() -> None:
    # 3 of 4 wrong, sets of 2: 3 of 6 fail, so m = 1/2 and std = 1/2. The right one is in sets that
    # all pass; of the 3 sets of a wrong one 2 fail, so its mean is 1/3 − 1/2.
    found = pass_at_k_advantage(2)(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(found, torch.tensor([-1 / 3, 1.0, -1 / 3, -1 / 3]))


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_mean_over_all_sets(num_right: int, k: int) -> None:
    rewards = torch.tensor([1.0] * num_right + [0.0] * (6 - num_right))
    sets = list(itertools.combinations(range(6), k))
    worth = torch.tensor([float(rewards[list(members)].max()) for members in sets])
    std = worth.std(correction=0)
    expected = torch.stack(
        [worth[[i in members for members in sets]].mean() - worth.mean() for i in range(6)]
    ) / (std if std > 0 else 1.0)
    torch.testing.assert_close(pass_at_k_advantage(k)(rewards), expected)


def test_pass_at_k_needs_more_than_k_rollouts() -> None:
    assert min_group_size(pass_at_k_advantage(4)) == 5
    with invalid("group_size", 4):
        pass_at_k_advantage(4)(torch.zeros(4))
    with invalid("pass_at_k_advantage: k", 0):
        pass_at_k_advantage(0)


def test_opo_weighs_its_baseline_by_length() -> None:
    rewards, lengths = torch.tensor([1.0, 0.0]), torch.tensor([3, 1])
    torch.testing.assert_close(opo_advantage(rewards, lengths), torch.tensor([0.25, -0.75]))
    none = torch.zeros(2, dtype=torch.int64)
    torch.testing.assert_close(opo_advantage(rewards, none), torch.tensor([0.5, -0.5]))
    assert opo_advantage(torch.full((3,), 0.1), torch.tensor([5, 7, 0])).tolist() == [0.0] * 3


def test_remax_compares_with_the_greedy_completion() -> None:
    found = remax_advantage(torch.tensor([1.0, 0.25, 0.5]), torch.tensor([0.0, 0.0, 1.0]))
    assert found.tolist() == [0.5, -0.25, 0.0]


@pytest.mark.parametrize("is_greedy", [[0.0, 0.0], [1.0, 1.0]])
def test_remax_needs_exactly_one_greedy_rollout(is_greedy: list[float]) -> None:
    with invalid("is_greedy", is_greedy):
        remax_advantage(torch.tensor([1.0, 0.0]), torch.tensor(is_greedy))


@pytest.mark.parametrize(
    ("aggregation", "factor"),
    [
        (token_mean, 1.0),
        (prompt_mean, 1.0),
        (token_sum(3), 1.0),
        (sequence_mean, 2 / 3),
        (sequence_sum, 2 / 3),
        (constant_length(8), 2 / 3),
    ],
)
def test_what_a_greedy_baseline_is_to_each_aggregation(
    aggregation: Aggregation, factor: float
) -> None:
    """A group of three: tokens of losses 1, 3 and 2, and a greedy rollout without any that is
    trained on. Without that one, a sum over the step counts two rollouts."""

    def loss(group: list[list[float]], aggregation: Aggregation) -> float:
        num_tokens = sum(map(len, group))
        parts = [aggregation(len(group), num_tokens, len(row)) for row in group]
        total = sum(weight * sum(row) for row, (weight, _) in zip(group, parts, strict=True))
        return total / sum(share for _, share in parts)

    sampled = [[1.0, 3.0], [2.0]]
    alone = token_sum(2) if isinstance(aggregation, token_sum) else aggregation
    assert loss([*sampled, []], aggregation) == pytest.approx(factor * loss(sampled, alone))


def test_groups_of_a_batch_may_differ_in_size() -> None:
    advantages = scale_rl_advantage(torch.tensor([3.0, 0.0, 0.0, 5.0]), torch.tensor([0, 0, 0, 1]))
    assert advantages[3] == 0
    assert advantages[0] == pytest.approx(-2 * float(advantages[1]))


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
@given(rewards=rewards_of_a_group, shift=st.integers(-4, 4))
def test_a_constant_in_the_reward_changes_nothing(
    advantage: GroupAdvantage, rewards: torch.Tensor, shift: int
) -> None:
    torch.testing.assert_close(advantage(rewards + shift), advantage(rewards))


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
@given(rewards=rewards_of_a_group, seed=st.integers(0, 99))
def test_advantages_follow_their_rollouts_and_sum_to_zero(
    advantage: GroupAdvantage, rewards: torch.Tensor, seed: int
) -> None:
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(advantage(rewards[order]), advantage(rewards)[order])
    assert float(advantage(rewards).sum()) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
@given(reward=st.floats(-10, 10, width=32), size=st.integers(2, 9))
def test_equal_rewards_give_exact_zeros(
    advantage: GroupAdvantage, reward: float, size: int
) -> None:
    assert advantage(torch.full((size,), reward)).tolist() == [0.0] * size


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
def test_a_group_of_one_is_refused(advantage: GroupAdvantage) -> None:
    with invalid("group_size", 1):
        advantage(torch.tensor([1.0]))


def test_distillation_rewards_what_the_teacher_finds_likelier() -> None:
    student = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = distillation_advantage(student, torch.tensor([-0.5, -3.0]))
    assert advantage.tolist() == [0.5, -1.0]
    assert not advantage.requires_grad
