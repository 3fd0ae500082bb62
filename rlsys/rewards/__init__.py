"""Reward functions: how to write one, the built-in ones, and what runs them."""

from rlsys.rewards.answer_match import exact_match, format_reward, numeric_answer
from rlsys.rewards.code_tests import code_tests
from rlsys.rewards.example_rollout import example_rollout
from rlsys.rewards.math_answer import math_answer
from rlsys.rewards.outcome import RewardFailure, RewardResult
from rlsys.rewards.overlong import length_penalty, overlong_penalty
from rlsys.rewards.process.reward_pickle import PackedRewards, pack_rewards
from rlsys.rewards.process.reward_runner import RewardRunner
from rlsys.rewards.reward import Reward, as_rewards, check_columns, reward

__all__ = [
    "PackedRewards",
    "Reward",
    "RewardFailure",
    "RewardResult",
    "RewardRunner",
    "as_rewards",
    "check_columns",
    "code_tests",
    "exact_match",
    "example_rollout",
    "format_reward",
    "length_penalty",
    "math_answer",
    "numeric_answer",
    "overlong_penalty",
    "pack_rewards",
    "reward",
]


def __dir__() -> list[str]:
    """Return the names of the API alone."""
    return sorted(__all__)
