"""What a reward function is.

In: a plain function `(rollout) -> float | dict[str, float]`, sync or async, decorated or not.
Out: a `Reward`, with its name, its weight and what the runner has to know about it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, overload

from rlsys.common.user_functions import misfit
from rlsys.config.fields import checked
from rlsys.rewards.column_paths import split_path
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
    column_types: tuple[type, ...] = ()  # that values of those may have; empty: any
    environment: tuple[str, ...] = ()  # variables that it needs though they look like secrets

    def __post_init__(self) -> None:
        checked(self.name, str, "name of a reward")
        _check_function(self.name, self.function)
        _check_number(self.weight, f"weight={self.weight!r} of reward {self.name!r}")
        if not math.isfinite(self.weight):
            raise ValueError(
                f"weight={self.weight} of reward {self.name!r} gives no total; use a finite number."
            )
        if self.timeout_s is not None:
            _check_number(self.timeout_s, f"timeout_s={self.timeout_s!r} of reward {self.name!r}")
            if not self.timeout_s > 0:
                raise ValueError(
                    f"timeout_s={self.timeout_s} of reward {self.name!r} fails every rollout; use "
                    "a positive time, or None for the pool's limit."
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
    column_types: Sequence[type] = (),
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
    column_types: Sequence[type] = (),
    environment: Sequence[str] = (),
) -> Reward | Callable[[RewardFunction], Reward]:
    """Make a function a reward: `@reward`, or `@reward(weight=0.5, timeout_s=10)`.

    A bool counts as 1.0 or 0.0. Of a dict, the value is its "reward" key, or the sum of all values
    where it has none; every key is recorded. Declare the metadata columns that the function reads
    as `required_columns`, and a dataset without them is refused before anything starts; so is a
    value in them of none of the `column_types`, where there are any, such as (str,). Functions run
    without the environment variables that hold secrets (see process_environment.py); name those
    that this one needs, such as the key of a judge, as `environment`.
    """

    def decorate(function: RewardFunction) -> Reward:
        own_name: str = getattr(function, "__name__", type(function).__name__)
        return Reward(
            function=function,
            name=own_name if name is None else name,
            weight=weight,
            timeout_s=timeout_s,
            required_columns=_names("required_columns", required_columns, own_name),
            column_types=_types(column_types, own_name),
            environment=_names("environment", environment, own_name),
        )

    return decorate if function is None else decorate(function)


def as_rewards(functions: Sequence[Reward | RewardFunction]) -> tuple[Reward, ...]:
    """Each as a Reward. Raises ValueError if there is none, if two share a name, or for what is no
    function of one rollout.
    """
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


def check_columns(
    functions: Sequence[Reward | RewardFunction],
    columns: Collection[str],
    where: str = "the dataset",
) -> None:
    """Raise ValueError if a reward requires a metadata column that the dataset does not have;
    `where` names that.
    """
    for one in as_rewards(functions):
        for column in one.required_columns:
            if split_path(column, columns) is None:
                raise ValueError(
                    f"reward {one.name!r} reads column {column!r}, which {where} does not have "
                    f"beside its prompt; it has {sorted(columns)}. Name the right one."
                )


def takes_rollout(function: Callable[..., Any]) -> bool:
    """Whether it is a reward, or says of a parameter that it is a rollout."""
    signature = _signature(function)
    annotations = [one.annotation for one in signature.parameters.values()] if signature else []
    return isinstance(function, Reward) or any(
        annotation in (Rollout, "Rollout", "rlsys.Rollout") for annotation in annotations
    )


def check_column_name(column: object, maker: str) -> None:
    """Raise ValueError for an argument of `maker`, such as exact_match, that names no column."""
    if isinstance(column, Rollout):
        raise ValueError(
            f"{maker} is given a rollout; it makes a reward that reads a column, and the reward "
            f'takes the rollout: {maker}("answer")(rollout), or rewards=[{maker}("answer")].'
        )
    if not isinstance(column, str):
        raise ValueError(
            f"{maker}({column!r}): {column!r} names no column; give its name, such as "
            f'{maker}("answer").'
        )


def is_missing(value: object) -> bool:
    """None, or the NaN that some tables have in its stead."""
    return value is None or (isinstance(value, float) and value != value)


def is_of(value: object, types: tuple[type, ...]) -> bool:
    """Whether it has one of the types; a bool is no int here."""
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def not_of(value: object, types: tuple[type, ...]) -> str:
    """What to say of a column's value of another type, after its name and itself."""
    return (
        f"is of type {type(value).__name__}, and the reward compares with a value of type "
        f"{' or '.join(one.__name__ for one in types)}; make the column text, or write a reward "
        "that reads it."
    )


def _check_function(name: str, function: object) -> None:
    """Raise ValueError for what cannot be called with a rollout, and nothing else."""
    if not callable(function):
        raise ValueError(
            f"reward {name!r} is {function!r}, which is no function; give one that takes a rollout."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"reward {name!r} is a generator; let it return its value, not yield it.")
    signature = _signature(function)
    if signature is not None and signature.return_annotation in (Reward, "Reward"):
        raise ValueError(
            f"{name} makes a reward and is none itself; call it, as in rewards=[{name}()]."
        )
    if error := misfit(function, None):
        takes = f"takes {signature}, and " if signature else ""
        raise ValueError(
            f"reward {name!r} {takes}is called with one rollout ({error}); let it take the rollout "
            "alone: columns of the dataset are in rollout.metadata, other values come with "
            "functools.partial."
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # of a function in C, which does not tell, or a partial with wrong arguments
        return None


def _check_number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{what} is no number; give one, such as 0.5.")


def _types(types: object, reward_name: str) -> tuple[type, ...]:
    if not isinstance(types, Iterable) or not all(isinstance(one, type) for one in types):
        raise ValueError(
            f"column_types={types!r} of reward {reward_name!r} is no list of types; give one such "
            "as column_types=(str,)."
        )
    return tuple(types)


def _names(field: str, names: object, reward_name: str) -> tuple[str, ...]:
    """As a tuple. Raises ValueError for a text, which would be taken as letters, and other things
    that are no list of names.
    """
    if isinstance(names, str):
        raise ValueError(
            f"{field}={names!r} of reward {reward_name!r} is one text; give a list of names, "
            f"{field}=({names!r},)."
        )
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{field}={names!r} of reward {reward_name!r} is no list of names; give one such as "
            f'{field}=("answer",).'
        )
    return tuple(names)
