import functools
import pickle

import pytest
import torch

from rlsys.algorithms.advantages import (
    grpo_advantage,
    pass_at_k_advantage,
    remax_advantage,
    scale_rl_advantage,
)
from rlsys.algorithms.groups import check_group_size, dynamic_sampling, min_group_size

EQUAL, MIXED = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])


def test_an_advantage_says_how_large_a_group_it_needs() -> None:
    assert min_group_size(grpo_advantage) == 2
    assert min_group_size(functools.partial(grpo_advantage, epsilon=1.0)) == 2
    assert min_group_size(scale_rl_advantage) == 2
    assert min_group_size(remax_advantage) == 1
    assert min_group_size(lambda rewards: rewards) == 1
    assert min_group_size(dynamic_sampling(remax_advantage)) == 2
    assert min_group_size(dynamic_sampling(pass_at_k_advantage(4))) == 5


def test_a_group_that_is_too_small_is_refused_in_one_sentence() -> None:
    check_group_size(grpo_advantage, 2)
    with pytest.raises(
        ValueError,
        match=r"^group_size=1 makes every advantage of grpo_advantage zero; use group_size >= 2\.$",
    ):
        check_group_size(functools.partial(grpo_advantage, epsilon=1.0), 1)
    with pytest.raises(ValueError, match=r"pass_at_k_advantage\(k=4.*use group_size >= 5"):
        check_group_size(pass_at_k_advantage(4), 4)


def test_dynamic_sampling_refuses_groups_of_equal_rewards() -> None:
    sampled = dynamic_sampling(grpo_advantage)
    assert sampled(EQUAL) is None
    found = sampled(MIXED)
    assert found is not None
    assert found.tolist() == grpo_advantage(MIXED).tolist()
    assert pickle.loads(pickle.dumps(sampled)) == sampled


def test_dynamic_sampling_may_judge_by_the_accuracy() -> None:
    """Two right answers of which one is too long: rewards differ, and yet there is nothing to
    learn but the length."""
    sampled = dynamic_sampling(grpo_advantage, by_last_column=True)
    assert sampled(MIXED, EQUAL) is None
    assert sampled(EQUAL, MIXED) is not None
