import numpy as np

from rlsys.environments.tokens.token_tree import Trajectory
from rlsys.environments.turn_columns import seats_of, turns_of


def made(versions: list[int], branches: list[int], reply_ends: list[int]) -> Trajectory:
    count = len(versions)
    return Trajectory(
        prompt_token_ids=np.ones(2, np.int32),
        token_ids=np.ones(count, np.int32),
        sampler_logprobs=np.zeros(count, np.float32),
        policy_versions=np.array(versions, np.int32),
        turn_rewards=np.zeros(count, np.float32),
        branches=np.array(branches, np.int32),
        reply_ends=np.array(reply_ends, np.int32),
    )


def test_replies_with_words_of_others_between_them() -> None:
    one = made([7, 7, -1, -1, 7, -1, 8, 8], [8, -1, 2, 0], [1, 4, 7])
    assert turns_of(one).tolist() == [0, 0, -1, -1, 1, -1, 2, 2]
    assert seats_of(one).tolist() == [0] * 8


def test_replies_that_touch() -> None:
    assert turns_of(made([7, 7, 7, 7], [4, -1, 2, 0], [0, 3])).tolist() == [0, 1, 1, 1]
    two = made([7, 7, 7, 7], [3, -1, 2, 0, 1, 0, 3, 0], [2, 3])
    assert turns_of(two).tolist() == [0, 0, 0, 1]


def test_a_later_branch_may_have_replied_earlier() -> None:
    """Branch 0 continues after a reply of the second seat."""
    one = made([7, -1, 7, -1, 7], [3, -1, 2, 0, 2, -1, 0, 1], [0, 4, 2])
    assert turns_of(one).tolist() == [0, -1, 2, -1, 1]
    assert seats_of(one).tolist() == [0, 0, 0, 1, 1]


def test_a_phrase_within_a_reply_is_part_of_it() -> None:
    one = made([-1, 7, -1, -1, 7, -1], [6, -1, 2, 0], [4])
    assert turns_of(one).tolist() == [-1, 0, 0, 0, 0, -1]


def test_a_reply_without_tokens_has_none() -> None:
    assert turns_of(made([7, 7], [2, -1, 2, 0], [0, -1, 1])).tolist() == [0, 2]
    assert turns_of(made([], [], [])).tolist() == []
