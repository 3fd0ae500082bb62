"""Reward functions on their way to other processes.

In: rewards, as a recipe gives them. Out: one pickle of all, which only the process that runs them
opens, and what its supervisor has to know beside.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlsys.common import pickling
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
        check_travels(f"reward {one.name!r}", one.function)
    return PackedRewards(
        pickled=pickling.dumps(rewards),
        rewards=tuple(
            PackedReward(name=one.name, weight=one.weight, timeout_s=one.timeout_s)
            for one in rewards
        ),
        environment=frozenset(name for one in rewards for name in one.environment),
    )


def check_travels(what: str, function: Any) -> None:
    """Raise ValueError for a function, called `what`, that cannot be sent to another process."""
    if error := _error_of(function):
        raise ValueError(
            f"{what} runs in a process of its own and cannot travel there: "
            f"{_culprit(function)} cannot be pickled ({error}). Create it inside the "
            "function, when it is first called, or at the top of a module that it imports."
        )


def _error_of(value: object) -> str:
    """Why it cannot be pickled, on one line; empty if it can."""
    try:
        pickling.dumps(value)
    # An object's own __reduce__ raises what it likes.
    except Exception as error:  # noqa: BLE001
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _culprit(function: Any) -> str:
    """The innermost named part of the function that cannot be pickled."""
    for what, part in _parts(function):
        if _error_of(part):
            inner = _culprit(part)
            return what if inner == _plain(part) else f"{inner} of {what}"
    return _plain(function)


def _plain(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def _parts(function: Any) -> list[tuple[str, Any]]:
    """What the function carries with it, each with words for it."""
    parts: list[tuple[str, Any]] = []
    if isinstance(function, partial):
        parts.append(("the function", function.func))
        parts += ((f"argument {i}", value) for i, value in enumerate(function.args))
        parts += ((f"argument {name!r}", value) for name, value in function.keywords.items())
    elif inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        variables = {**names.globals, **names.nonlocals}
        parts += ((f"variable {name!r}", value) for name, value in variables.items())
        defaults = enumerate(function.__defaults__ or ())
        parts += ((f"default {index}", value) for index, value in defaults)
    elif inspect.ismethod(function):
        parts.append(("its object", function.__self__))
    else:
        attributes = getattr(function, "__dict__", {})
        parts += ((f"attribute {name!r}", value) for name, value in attributes.items())
    return [(f"{words} ({type(value).__name__})", value) for words, value in parts]
