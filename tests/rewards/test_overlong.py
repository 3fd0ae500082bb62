import pickle

import pytest

from rlsys.rewards import overlong_penalty
from rlsys.rewards.example_rollout import example_rollout
from tests.errors import invalid


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (12, 0.0), (13, -0.25), (15, -0.75), (16, -1), (99, -1)]
)
def test_the_penalty_grows_over_the_last_tokens(num_tokens: int, expected: float) -> None:
    penalty = overlong_penalty(16, 4)
    assert penalty(example_rollout("", token_ids=[7] * num_tokens)) == expected


def test_it_has_a_name_and_a_weight_and_can_be_pickled() -> None:
    penalty = pickle.loads(pickle.dumps(overlong_penalty(16, 4, weight=0.5)))
    assert (penalty.name, penalty.weight) == ("overlong_penalty", 0.5)
    assert penalty(example_rollout("", token_ids=[7] * 16)) == -1


def test_a_penalty_without_a_range_is_refused() -> None:
    with invalid("overlong_penalty: cache_tokens", 0):
        overlong_penalty(16, 0)
    with invalid("overlong_penalty: cache_tokens", 17):
        overlong_penalty(16, 17)
