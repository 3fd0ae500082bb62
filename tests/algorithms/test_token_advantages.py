import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.token_advantages import (
    batch_normalised_weights,
    gae,
    kl_rewards,
    reinforce_plus_plus_token_advantage,
    whitened,
)
from tests.errors import invalid

INF = math.inf


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.75])
    # δ = 0 + ½·¼ − ½, 0 + ½·¾ − ¼, 1 + ½·0 − ¾ = −0.375, 0.125, 0.25; γλ = ¼.
    advantages, returns = gae(rewards, values, offsets_of([3]), discount=0.5, trace_decay=0.5)
    expected = torch.tensor([-0.375 + 0.1875 / 4, 0.125 + 0.0625, 0.25])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)
    cut_off, _ = gae(
        rewards,
        values,
        offsets_of([3]),
        discount=0.5,
        trace_decay=0.5,
        bootstrap_values=torch.tensor([2.0]),
    )
    assert float(cut_off[2]) == pytest.approx(1 + 0.5 * 2 - 0.75)


def gae_by_recursion(
    rewards: list[float], values: list[float], discount: float, decay: float, after: float
) -> list[float]:
    advantages, advantage = [], 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + discount * after - value + discount * decay * advantage
        advantages.append(advantage)
        after = value
    return advantages[::-1]


@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    decay=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 99),
)
def test_gae_of_packed_rollouts_is_that_of_each_alone(
    lengths: list[int], discount: float, decay: float, seed: int
) -> None:
    """And tokens outside the loss mask stand as if they were not there."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) < 0.7
    rewards = rewards * mask
    after = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    advantages, returns = gae(
        rewards,
        values,
        offsets_of(lengths),
        discount=discount,
        trace_decay=decay,
        loss_mask=mask,
        bootstrap_values=after,
    )
    parts = zip(
        *(x.split(lengths) for x in (rewards, values, mask, advantages)), after, strict=True
    )
    for reward, value, sampled, advantage, last in parts:
        expected = gae_by_recursion(
            reward[sampled].tolist(), value[sampled].tolist(), discount, decay, float(last)
        )
        assert advantage[sampled].tolist() == pytest.approx(expected)
        assert not advantage[~sampled].any()
    torch.testing.assert_close(returns, advantages + values)


def test_a_reward_outside_the_loss_mask_goes_to_the_last_token_that_was_sampled() -> None:
    mask = torch.tensor([False, True, False, True, True, False])
    rewards = torch.tensor([9.0, 0.0, 1.0, 0.0, 2.0, 4.0])  # nobody earned the 9
    advantages, _ = gae(
        rewards, torch.zeros(6), offsets_of([6, 0]), trace_decay=0.0, loss_mask=mask
    )
    assert advantages.tolist() == [0.0, 1.0, 0.0, 0.0, 6.0, 0.0]


def test_gae_without_decay_is_the_return_less_the_value() -> None:
    rewards, values = torch.randn(2, 50)
    advantages, returns = gae(rewards, values, offsets_of([50]))
    torch.testing.assert_close(returns, rewards.flip(0).cumsum(0).flip(0))
    torch.testing.assert_close(advantages, returns - values)


def test_the_score_lies_on_the_last_token_and_every_token_pays_its_divergence() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -INF, -1.0])
    reference = torch.tensor([-1.0, -2.5, -1.0, -INF, -INF])
    scores = torch.tensor([10.0, 20.0, 30.0])
    found = kl_rewards(scores, logprobs, reference, offsets_of([2, 0, 3]), coefficient=0.5)
    assert found.tolist() == pytest.approx([0.0, 10 - 0.25, 1.0, 0.0, 30 - 0.5 * 9999])
    masked = kl_rewards(
        scores,
        logprobs,
        reference,
        offsets_of([2, 0, 3]),
        coefficient=0.5,
        loss_mask=torch.tensor([True, True, False, True, False]),
    )
    assert masked.tolist() == pytest.approx([0.0, 9.75, 0.0, 0.0, 30.0])


def test_reinforce_plus_plus_normalises_returns_over_tokens() -> None:
    zeros = torch.zeros(4)
    scores = torch.tensor([1.0, 5.0])
    found = reinforce_plus_plus_token_advantage(
        scores, zeros, zeros, offsets_of([3, 1]), coefficient=0.1
    )
    # 1, 1, 1, 5: mean 2, population variance 3; over rollouts it would be −1, 1.
    torch.testing.assert_close(found, torch.tensor([-1.0, -1.0, -1.0, 3.0]) / 3**0.5)
    reference = torch.tensor([0.0, -2.0, 0.0, 0.0])  # 0.5 · 2 lost at the second token
    found = reinforce_plus_plus_token_advantage(
        scores, zeros, reference, offsets_of([3, 1]), coefficient=0.5
    )
    torch.testing.assert_close(found, whitened(torch.tensor([0.0, 0.0, 1.0, 5.0])))


@given(
    score=st.floats(-10, 10, width=32),
    lengths=st.lists(st.integers(0, 5), max_size=5),
    coefficient=st.sampled_from([0.0, 0.5]),
)
def test_equal_scores_at_the_reference_give_exact_zeros(
    score: float, lengths: list[int], coefficient: float
) -> None:
    logprobs = torch.linspace(-3, -1, sum(lengths))
    found = reinforce_plus_plus_token_advantage(
        torch.full((len(lengths),), score),
        logprobs,
        logprobs if coefficient else logprobs - 1,
        offsets_of(lengths),
        coefficient=coefficient,
    )
    assert found.tolist() == [0.0] * sum(lengths)


def test_whitening_by_hand() -> None:
    values, mask = torch.tensor([1.0, 100.0, 3.0]), torch.tensor([True, False, True])
    assert whitened(values, loss_mask=mask).tolist() == [-1.0, 0.0, 1.0]
    assert whitened(values, loss_mask=mask, shift_mean=False).tolist() == [1.0, 0.0, 3.0]
    assert whitened(torch.full((3,), 0.1)).tolist() == [0.0] * 3
    assert whitened(torch.tensor([7.0])).tolist() == [0.0]
    assert whitened(torch.zeros(0)).shape == (0,)
    assert not whitened(values, loss_mask=torch.zeros(3, dtype=torch.bool)).any()


def test_normalised_weights_have_mean_one() -> None:
    sampler = torch.zeros(4)
    proximal = torch.tensor([0.5, 1.0, 8.0, 3.0]).log()
    mask = torch.tensor([True, True, True, False])
    found = batch_normalised_weights(proximal, sampler, cap=2.5, loss_mask=mask)
    torch.testing.assert_close(found, torch.tensor([0.5, 1.0, 2.5, 0.0]) * 3 / 4)
    hopeless = batch_normalised_weights(torch.full((2,), -INF), torch.zeros(2))
    assert hopeless.tolist() == [0.0, 0.0]
    assert batch_normalised_weights(torch.zeros(0), torch.zeros(0)).shape == (0,)
    with invalid("batch_normalised_weights: cap", 0):
        batch_normalised_weights(sampler, sampler, cap=0)


def test_rounding_of_equal_values_gives_no_advantage() -> None:
    noise = 1e-7 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert whitened(1 + noise).abs().max() <= 5e-3
    assert whitened(1 + noise, shift_mean=False).sub(1).abs().max() <= 5e-3
