"""Outcomes of reward functions: named numbers, or a failure with its kind.

A failure never becomes a number.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rlsys.common.user_functions import Escaped, number_of, printable, raised
from rlsys.rewards.process.reward_pickle import PackedReward
from rlsys.rewards.reward import Reward

# "nan" includes infinities, "type" is a value that is not a number, "crash" the end of the process.
# Judges: "question" if it cannot be rendered, "reply" if it has no number.
FailureKind = Literal["exception", "timeout", "nan", "type", "memory", "crash", "question", "reply"]
KINDS: tuple[FailureKind, ...] = get_args(FailureKind)

RETURN_NUMBER = (
    "Return a number (of Python, numpy, or a tensor without dimensions), or a dict of numbers by "
    "name."
)


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """The reward of a rollout.

    Attributes:
        total: Sum of weight · value over the reward functions.
        components: Unweighted value of each function by name, and the values of a returned dict by
            "name/key".
    """

    total: float
    components: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """The reason why a rollout has no reward.

    Attributes:
        kind: The type of the failure.
        reward: Name of the function, or of a judge's column.
        message: The reason in words.
        what: "reward" or "environment".
    """

    kind: FailureKind
    reward: str
    message: str
    what: str = "reward"


MAX_FLOAT32 = float(np.finfo(np.float32).max)

# The values of a function by name ("name" and, of a dict, "name/key"), or the failure.
Outcome = dict[str, float] | RewardFailure


def is_usable(number: float) -> bool:
    """Return whether a number is finite in float32, in which advantages are computed."""
    return abs(number) <= MAX_FLOAT32


def components_of(reward: Reward, returned: object) -> Outcome:
    """Return the values that a function returned, by name. Its own value has the reward's name."""
    values: dict[str, object] = {reward.name: returned}
    if is_dict := isinstance(returned, Mapping):
        values = {f"{reward.name}/{key}": value for key, value in returned.items()}
        if any(not str(key).strip() for key in returned):
            return _failure(
                reward, "type", f"{reprlib.repr(returned)}. Name each number of a dict."
            )
    numbers: dict[str, float] = {}
    for name, value in values.items():
        number = number_of(value)
        if number is None:
            return _type_failure(reward, returned)
        if not is_usable(number):
            return _failure(reward, "nan", f"{reprlib.repr(returned)}. Return finite numbers.")
        numbers[name] = number
    if not is_dict:
        return numbers
    if not numbers:
        return _type_failure(reward, returned)
    total = sum(numbers.values())
    return {reward.name: numbers.get(f"{reward.name}/reward", total), **numbers}


def _type_failure(reward: Reward, returned: object) -> RewardFailure:
    shown = f"{reprlib.repr(returned)} ({type(returned).__name__})"
    return _failure(reward, "type", f"{shown}. {RETURN_NUMBER}")


def _failure(reward: Reward, kind: FailureKind, returned: str) -> RewardFailure:
    message = printable(f"{reward.name} returned {returned}")
    return RewardFailure(kind=kind, reward=reward.name, message=message)


def failure_from(reward: str, error: BaseException, what: str = "") -> RewardFailure:
    """Return the failure of a function that raised, with the last frames of its traceback.

    `what` names the function in the message if it differs from the reward's name.
    """
    if isinstance(error, Escaped) and error.__cause__ is not None:
        error = error.__cause__
    kind: FailureKind = "exception"
    if isinstance(error, TimeoutError):  # a verifier's own time limit raises it
        kind = "timeout"
    elif isinstance(error, MemoryError):
        kind = "memory"
    return RewardFailure(kind=kind, reward=reward, message=raised(what or reward, error))


def timeout_failure(reward: PackedReward, limit_s: float) -> RewardFailure:
    """Return the failure of a call past its limit."""
    return RewardFailure(
        kind="timeout",
        reward=reward.name,
        message=f"{reward.name} took longer than {limit_s:g} s. Find out why, or raise its "
        "timeout_s (reward.timeout_s for all).",
    )


def combine(
    rewards: Sequence[Reward | PackedReward], outcomes: Sequence[Outcome]
) -> RewardResult | RewardFailure:
    """Combine the outcomes of all rewards on one rollout. The first failure wins."""
    total = 0.0
    components: dict[str, float] = {}
    for one, outcome in zip(rewards, outcomes, strict=True):
        if isinstance(outcome, RewardFailure):
            return outcome
        total += one.weight * outcome[one.name]
        components |= outcome
    if not is_usable(total):
        message = f"the weighted total of {components} is {total}. Scale the rewards down."
        return RewardFailure(kind="nan", reward=rewards[-1].name, message=message)
    return RewardResult(total=total, components=components)
