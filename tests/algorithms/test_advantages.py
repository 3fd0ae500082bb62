from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.advantages import (
    distillation_advantage,
    dr_grpo_advantage,
    gae,
    grpo_advantage,
    reinforce_plus_plus_advantage,
    rloo_advantage,
    scale_rl_advantage,
)

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
        reinforce_plus_plus_advantage(rewards, group_index=groups, epsilon=0.0), expected
    )
    # Without groups: mean 7/4, sample variance (9 + 49 + 81 + 1) / 16 / 3 = 35/12.
    torch.testing.assert_close(
        reinforce_plus_plus_advantage(rewards, epsilon=0.0),
        torch.tensor([-0.75, -1.75, 2.25, 0.25]) / (35 / 12) ** 0.5,
    )


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


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.75])
    # δ = 0 + ½·¼ − ½, 0 + ½·¾ − ¼, 1 + ½·0 − ¾ = −0.375, 0.125, 0.25; γλ = ¼.
    found = gae(rewards, values, discount=0.5, trace_decay=0.5)
    torch.testing.assert_close(found, torch.tensor([-0.375 + 0.1875 / 4, 0.125 + 0.0625, 0.25]))
    cut_off = gae(rewards, values, discount=0.5, trace_decay=0.5, bootstrap_value=2.0)
    assert float(cut_off[2]) == pytest.approx(1 + 0.5 * 2 - 0.75)


@given(rewards=rewards_of_a_group)
def test_gae_without_decay_is_the_return_less_the_value(rewards: torch.Tensor) -> None:
    values = torch.linspace(-1, 1, len(rewards))
    returns = rewards.flip(0).cumsum(0).flip(0)
    found = gae(rewards, values, discount=1.0, trace_decay=1.0)
    torch.testing.assert_close(found, returns - values)


def test_distillation_rewards_what_the_teacher_finds_likelier() -> None:
    student = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = distillation_advantage(student, torch.tensor([-0.5, -3.0]))
    assert advantage.tolist() == [0.5, -1.0]
    assert not advantage.requires_grad
