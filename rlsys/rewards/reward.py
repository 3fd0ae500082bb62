"""What a reward function is.

In: a plain function `(rollout) -> float | dict[str, float]`, sync or async, decorated or not.
Out: a `Reward`, with its name, its weight and what the runner has to know about it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from rlsys.types import Rollout

RewardValue = float | Mapping[str, float]
RewardFunction = Callable[[Rollout], RewardValue] | Callable[[Rollout], Awaitable[RewardValue]]


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function with what the runner has to know about it; still callable as itself."""

    function: RewardFunction
    name: str
    weight: float = 1.0
    timeout_s: float | None = None  # of one call; None: the runner's own limit
    required_columns: tuple[str, ...] = ()  # read from rollout.metadata
    environment: tuple[str, ...] = ()  # variables that it needs though they look like secrets

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(
                f"weight={self.weight} of reward {self.name!r} gives no total; use a finite number."
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(
                f"timeout_s={self.timeout_s} of reward {self.name!r} fails every rollout; use a "
                "positive time, or None for the pool's limit."
            )

    def __call__(self, rollout: Rollout) -> Any:
        return self.function(rollout)

    @functools.cached_property
    def is_async(self) -> bool:
        function = self.function
        return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    def weighted(self, weight: float) -> Reward:
        """The same reward with another weight in the total; 0 records it only."""
        return replace(self, weight=weight)


@overload
def reward(function: RewardFunction, /) -> Reward: ...
@overload
def reward(
    *,
    name: str | None = None,
    weight: float = 1.0,
    timeout_s: float | None = None,
    required_columns: Sequence[str] = (),
    environment: Sequence[str] = (),
) -> Callable[[RewardFunction], Reward]: ...
def reward(
    function: RewardFunction | None = None,
    /,
    *,
    name: str | None = None,
    weight: float = 1.0,
    timeout_s: float | None = None,
    required_columns: Sequence[str] = (),
    environment: Sequence[str] = (),
) -> Reward | Callable[[RewardFunction], Reward]:
    """Make a function a reward: `@reward`, or `@reward(weight=0.5, timeout_s=10)`.

    A bool counts as 1.0 or 0.0. Of a dict, the value is its "reward" key, or the sum of all values
    where it has none; every key is recorded. Declare the metadata columns that the function reads
    as `required_columns`, and a dataset without them is refused before anything starts. Functions
    run without the environment variables that hold secrets (see environment.py); name those that
    this one needs, such as the key of a judge, as `environment`.
    """

    def decorate(function: RewardFunction) -> Reward:
        own_name: str = getattr(function, "__name__", type(function).__name__)
        return Reward(
            function=function,
            name=own_name if name is None else name,
            weight=weight,
            timeout_s=timeout_s,
            required_columns=tuple(required_columns),
            environment=tuple(environment),
        )

    return decorate if function is None else decorate(function)


def as_rewards(functions: Sequence[Reward | RewardFunction]) -> tuple[Reward, ...]:
    """Each as a Reward. Raises ValueError if there is none, or if two share a name."""
    rewards = tuple(f if isinstance(f, Reward) else reward(f) for f in functions)
    if not rewards:
        raise ValueError("rewards=() scores nothing; give at least one reward function.")
    names = [one.name for one in rewards]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{names.count(name)} rewards are named {name!r}, but they are recorded by name; "
                'tell them apart with @rlsys.reward(name="...").'
            )
    return rewards


def check_columns(functions: Sequence[Reward | RewardFunction], columns: Collection[str]) -> None:
    """Raise ValueError if a reward requires a metadata column that the dataset does not have."""
    for one in as_rewards(functions):
        for column in one.required_columns:
            if column not in columns:
                raise ValueError(
                    f"reward {one.name!r} reads column {column!r}, which the dataset does not "
                    f"have beside its prompt; it has {sorted(columns)}. Name the right one."
                )
