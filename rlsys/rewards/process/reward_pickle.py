"""Pickling of reward functions for other processes.

In: the rewards of a recipe. Out: one pickle of all, which only the process that runs them opens,
and the names and limits that its runner needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlsys.common import pickling
from rlsys.errors import InvalidValue
from rlsys.rewards.reward import Reward, RewardFunction, as_rewards


@dataclass(frozen=True, kw_only=True)
class PackedReward:
    """Name, weight and limit of one reward."""

    name: str
    weight: float
    timeout_s: float | None


@dataclass(frozen=True, kw_only=True)
class PackedRewards:
    """All rewards of a stage, pickled.

    Attributes:
        pickled: The tuple of `Reward`s.
        rewards: Name, weight and limit of each.
        environment: Environment variables that they need although they look like secrets.
    """

    pickled: bytes
    rewards: tuple[PackedReward, ...]
    environment: frozenset[str]


def pack_rewards(functions: Sequence[Reward | RewardFunction]) -> PackedRewards:
    """Pickle rewards for another process.

    Args:
        functions: Functions of one rollout, or rewards.

    Raises:
        InvalidValue: A function cannot be pickled. The message names the object at fault.
    """
    rewards = as_rewards(functions)
    for one in rewards:
        check_picklable(f"reward {one.name!r}", one.function)
    return PackedRewards(
        pickled=pickling.dumps(rewards),
        rewards=tuple(
            PackedReward(name=one.name, weight=one.weight, timeout_s=one.timeout_s)
            for one in rewards
        ),
        environment=frozenset(name for one in rewards for name in one.environment),
    )


def check_picklable(field: str, function: Any) -> None:
    """Raise InvalidValue about `field` for a function that cannot be sent to another process."""
    if error := _error_of(function):
        raise InvalidValue(
            field,
            rule=f"runs in another process, and {_unpicklable(function)} cannot be pickled "
            f"({error})",
            fix="Create it inside the function, when it is first called, or at the top of a module "
            "that the function imports.",
        )


def _error_of(value: object) -> str:
    """Return the error of pickling a value on one line, or "" if it can be pickled."""
    try:
        pickling.dumps(value)
    except Exception as error:  # noqa: BLE001 - an object's __reduce__ may raise anything
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _unpicklable(function: Any) -> str:
    """Return the innermost named part of the function that cannot be pickled."""
    for what, part in _parts(function):
        if _error_of(part):
            inner = _unpicklable(part)
            return what if inner == _plain(part) else f"{inner} of {what}"
    return _plain(function)


def _plain(value: object) -> str:
    return f"an object of type {type(value).__name__}"


def _parts(function: Any) -> list[tuple[str, Any]]:
    """Return the objects that are pickled with the function, each with a description."""
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
