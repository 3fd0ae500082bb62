"""Reward functions on their way to other processes.

In: rewards, as a recipe gives them. Out: one pickle of all, which only the process that runs them
opens, and what its supervisor has to know beside.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle

from rlsys.rewards.reward import Reward, RewardFunction, as_rewards


@dataclass(frozen=True, kw_only=True)
class PackedReward:
    name: str
    weight: float
    timeout_s: float | None


@dataclass(frozen=True, kw_only=True)
class PackedRewards:
    pickled: bytes  # tuple[Reward, ...]
    rewards: tuple[PackedReward, ...]
    environment: frozenset[str]  # variables that they need although they look like secrets


def pack_rewards(functions: Sequence[Reward | RewardFunction]) -> PackedRewards:
    """Raises ValueError for a function that cannot travel, with what it is that cannot."""
    rewards = as_rewards(functions)
    for one in rewards:
        if error := _error_of(one):
            raise ValueError(
                f"reward {one.name!r} runs in a process of its own and cannot travel there: "
                f"{_culprit(one.function)} cannot be pickled ({error}). Create it inside the "
                "function, when it is first called, or at the top of a module that it imports."
            )
    return PackedRewards(
        pickled=cloudpickle.dumps(rewards),
        rewards=tuple(
            PackedReward(name=one.name, weight=one.weight, timeout_s=one.timeout_s)
            for one in rewards
        ),
        environment=frozenset(name for one in rewards for name in one.environment),
    )


def _error_of(value: object) -> str:
    """Why it cannot be pickled, on one line; empty if it can."""
    try:
        cloudpickle.dumps(value)
    # An object's own __reduce__ raises what it likes.
    except Exception as error:  # noqa: BLE001
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _culprit(function: Any) -> str:
    """The innermost named part of the function that cannot be pickled."""
    for what, part in _parts(function):
        if _error_of(part):
            inner = _culprit(part)
            return f"{what}" if inner == _plain(part) else f"{inner} of {what}"
    return _plain(function)


def _plain(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def _parts(function: Any) -> Iterator[tuple[str, Any]]:
    """What the function carries with it, each with words for it."""
    if isinstance(function, partial):
        yield "the function", function.func
        yield from ((f"argument {i}", value) for i, value in enumerate(function.args))
        yield from ((f"argument {name!r}", value) for name, value in function.keywords.items())
    elif inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        for name, value in {**names.globals, **names.nonlocals}.items():
            yield f"variable {name!r} ({type(value).__name__})", value
        for index, value in enumerate(function.__defaults__ or ()):
            yield f"default {index} ({type(value).__name__})", value
    elif inspect.ismethod(function):
        yield f"its object ({type(function.__self__).__name__})", function.__self__
    else:
        for name, value in getattr(function, "__dict__", {}).items():
            yield f"attribute {name!r} ({type(value).__name__})", value
