"""What comes out of a reward function: named numbers, or a failure with its kind.

Nothing that goes wrong ever becomes a number.
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

# "nan" stands for infinities too, "type" for what is no number, "crash" for the end of the process.
# Of judges: "question" for one that it cannot read, "reply" for one without a number.
FailureKind = Literal["exception", "timeout", "nan", "type", "memory", "crash", "question", "reply"]
KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """A rollout's reward: `total` = Σ weight · value over the reward functions.

    `components` holds each function's value before its weight, by name; those of a function that
    returned a dict follow as "name/key".
    """

    total: float
    components: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """Why a rollout has no reward."""

    kind: FailureKind
    reward: str  # name of the function; of a judge, of its column
    message: str
    what: str = "reward"  # it is; or an environment


MAX_FLOAT32 = float(np.finfo(np.float32).max)

# A function's value at its own name, and those of its dict at "name/key"; or why there is none.
Outcome = dict[str, float] | RewardFailure


def is_usable(number: float) -> bool:
    """It stays finite in the float32 that advantages are computed in."""
    return abs(number) <= MAX_FLOAT32


def components_of(reward: Reward, returned: object) -> Outcome:
    """What a function returned as named floats; the function's value is that at its own name."""
    values: dict[str, object] = {reward.name: returned}
    if is_dict := isinstance(returned, Mapping):
        values = {f"{reward.name}/{key}": value for key, value in returned.items()}
    numbers: dict[str, float] = {}
    for name, value in values.items():
        number = number_of(value)
        if number is None:
            return _type_failure(reward, returned)
        if not is_usable(number):
            message = f"{reward.name} returned {reprlib.repr(returned)}; return finite numbers."
            return RewardFailure(kind="nan", reward=reward.name, message=printable(message))
        numbers[name] = number
    if not is_dict:
        return numbers
    if not numbers:
        return _type_failure(reward, returned)
    total = sum(numbers.values())
    return {reward.name: numbers.get(f"{reward.name}/reward", total), **numbers}


def _type_failure(reward: Reward, returned: object) -> RewardFailure:
    message = (
        f"{reward.name} returned {reprlib.repr(returned)} ({type(returned).__name__}); return a "
        "number (of Python, numpy, or a tensor without dimensions), or a dict of numbers by name."
    )
    return RewardFailure(kind="type", reward=reward.name, message=printable(message))


def failure_from(reward: str, error: BaseException, what: str = "") -> RewardFailure:
    """The failure of a function that raised, with the last frames of its traceback. `what` names
    it, where it is not called as the reward is.
    """
    if isinstance(error, Escaped) and error.__cause__ is not None:
        error = error.__cause__
    kind: FailureKind = "exception"
    if isinstance(error, TimeoutError):  # a verifier that keeps a limit of its own says so with it
        kind = "timeout"
    elif isinstance(error, MemoryError):
        kind = "memory"
    return RewardFailure(kind=kind, reward=reward, message=raised(what or reward, error))


def timeout_failure(reward: PackedReward, limit_s: float) -> RewardFailure:
    return RewardFailure(
        kind="timeout",
        reward=reward.name,
        message=f"{reward.name} took longer than {limit_s:g} s; find out why, or raise its "
        "timeout_s (reward.timeout_s for all).",
    )


def combine(
    rewards: Sequence[Reward | PackedReward], outcomes: Sequence[Outcome]
) -> RewardResult | RewardFailure:
    """The outcomes of all rewards on one rollout as one; the first failure wins."""
    total = 0.0
    components: dict[str, float] = {}
    for one, outcome in zip(rewards, outcomes, strict=True):
        if isinstance(outcome, RewardFailure):
            return outcome
        total += one.weight * outcome[one.name]
        components |= outcome
    if not is_usable(total):
        message = f"the weighted total of {components} is {total}; scale the rewards down."
        return RewardFailure(kind="nan", reward=rewards[-1].name, message=message)
    return RewardResult(total=total, components=components)
