import itertools
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
from rlsys.algorithms.groups import min_group_size

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
    with pytest.raises(ValueError, match=r"k=4 .* group of 4 .*group_size >= 5"):
        pass_at_k_advantage(4)(torch.zeros(4))
    with pytest.raises(ValueError, match="k=0"):
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


@pytest.mark.parametrize(("is_greedy", "count"), [([0.0, 0.0], 0), ([1.0, 1.0], 2)])
def test_remax_compares_with_one_alone(is_greedy: list[float], count: int) -> None:
    with pytest.raises(ValueError, match=f"tells of {count} greedy rollouts in a group"):
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
    with pytest.raises(ValueError, match="use group_size >= 2"):
        advantage(torch.tensor([1.0]))


def test_distillation_rewards_what_the_teacher_finds_likelier() -> None:
    student = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = distillation_advantage(student, torch.tensor([-0.5, -3.0]))
    assert advantage.tolist() == [0.5, -1.0]
    assert not advantage.requires_grad
