"""Rewards that the functions of users return: a number, or numbers by name."""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Mapping

from rlsys.common.user_functions import number_of, printable

# Name of the reward that the environment's function returns.
FINAL = "final"


class EpisodeFailed(RuntimeError):
    """A mistake of the environment that a new attempt would repeat."""


def numbers_of(name: str, returned: object, *, or_none: bool) -> dict[str, float]:
    """Return the value that the function `name` returned as rewards by name.

    Args:
        name: Name of the environment.
        returned: A number, numbers by name, or None.
        or_none: Whether it may be None or empty, since turns have rewards.

    Raises:
        EpisodeFailed: The value is not a reward.
    """
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise EpisodeFailed(
            f"{name} is a synchronous function that returned {printable(repr(returned))} without "
            "awaiting it. Write `async def` and `return await ...`."
        )
    if isinstance(returned, Mapping):
        if not returned and not or_none:
            raise EpisodeFailed(f"{name} returned an empty dict. Return numbers by name.")
        source = f"{name} returned {reprlib.repr(dict(returned))}"
        return {str(key): number_in(number, source) for key, number in returned.items()}
    if returned is not None:
        return {FINAL: number_in(returned, f"{name} returned {reprlib.repr(returned)}")}
    if not or_none:
        raise EpisodeFailed(
            f"{name} returned None instead of a reward. End each path with `return` and a number "
            "or numbers by name, or call chat.reward(...) after a turn."
        )
    return {}


def number_in(value: object, source: str) -> float:
    """Return a reward as a float. Raises EpisodeFailed if it is not a finite number."""
    number = number_of(value)
    if number is None or not math.isfinite(number):
        raise EpisodeFailed(f"{source}: rewards must be finite numbers. Use a float.")
    return number
