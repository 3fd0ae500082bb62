import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.algorithms.aggregation import (
    Aggregation,
    constant_length,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_sum,
)
from tests.errors import invalid

# Two groups of two rollouts; the token losses of each rollout.
GROUPS = [[[1.0, 2.0, 3.0], [6.0]], [[4.0], [0.0, 8.0]]]


def aggregate(aggregation: Aggregation, groups: list[list[list[float]]]) -> float:
    total = denominator = 0.0
    for group in groups:
        group_num_tokens = sum(len(losses) for losses in group)
        for losses in group:
            weight, share = aggregation(len(group), group_num_tokens, len(losses))
            total += weight * sum(losses)
            denominator += share
    return total / denominator


def test_aggregations_by_hand() -> None:
    assert aggregate(token_mean, GROUPS) == pytest.approx(24 / 7)
    assert aggregate(sequence_mean, GROUPS) == pytest.approx((2 + 6 + 4 + 4) / 4)
    assert aggregate(prompt_mean, GROUPS) == pytest.approx((12 / 4 + 12 / 3) / 2)
    assert aggregate(constant_length(5), GROUPS) == pytest.approx((6 + 6 + 4 + 8) / 5 / 4)
    assert aggregate(sequence_sum, GROUPS) == pytest.approx((6 + 6 + 4 + 8) / 4)
    assert aggregate(token_sum(4), GROUPS) == pytest.approx(24)


def test_a_rollout_without_trained_tokens_counts_as_a_rollout_of_loss_zero() -> None:
    groups = [[[2.0, 4.0], []]]
    assert aggregate(sequence_mean, groups) == pytest.approx(1.5)
    assert aggregate(constant_length(2), groups) == pytest.approx(1.5)
    assert aggregate(token_mean, groups) == pytest.approx(3.0)
    assert aggregate(prompt_mean, groups) == pytest.approx(3.0)


lengths = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)


@given(lengths=lengths)
def test_the_mean_of_a_constant_is_the_constant(lengths: list[list[int]]) -> None:
    groups = [[[2.5] * length for length in group] for group in lengths]
    for aggregation in (token_mean, sequence_mean, prompt_mean):
        assert aggregate(aggregation, groups) == pytest.approx(2.5)


def test_a_length_of_zero_is_refused() -> None:
    with invalid("constant_length: length", 0):
        constant_length(0)
    with invalid("token_sum: num_rollouts", 0):
        token_sum(0)
