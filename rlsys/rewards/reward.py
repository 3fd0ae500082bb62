"""Reward functions and what the runner needs to know about them.

In: a plain function `(rollout) -> float | dict[str, float]`, sync or async, decorated or not.
Out: a `Reward`, with a name, a weight, limits and required columns.
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
from rlsys.errors import InvalidValue, require
from rlsys.rewards.column_paths import split_path
from rlsys.types import Rollout

RewardValue = float | Mapping[str, float]
RewardFunction = Callable[[Rollout], RewardValue] | Callable[[Rollout], Awaitable[RewardValue]]


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function with its settings. It can be called like the function itself.

    Attributes:
        function: Takes a rollout and returns a number, or a dict of numbers by name.
        name: Names the reward in metrics and messages.
        weight: Factor of the value in the total.
        timeout_s: Limit of one call in seconds. None: reward.timeout_s.
        required_columns: Metadata columns that the function reads.
        column_types: Types that values of these columns may have. Empty: any type.
        environment: Environment variables that it needs although they look like secrets.

    Raises:
        InvalidValue: An attribute is wrong.
    """

    function: RewardFunction
    name: str
    weight: float = 1.0
    timeout_s: float | None = None
    required_columns: tuple[str, ...] = ()
    column_types: tuple[type, ...] = ()
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked(self.name, str, "name of a reward")
        require(
            self.name.strip() != "",
            "name of a reward",
            self.name,
            rule="is empty, and rewards are recorded by name",
            fix='Give a name, as in @rlsys.reward(name="...").',
        )
        _check_function(self.name, self.function)
        _check_number(self.weight, f"reward {self.name!r}: weight")
        require(
            math.isfinite(self.weight),
            f"reward {self.name!r}: weight",
            self.weight,
            rule="must be finite",
            fix="Use a finite number.",
        )
        if self.timeout_s is not None:
            _check_number(self.timeout_s, f"reward {self.name!r}: timeout_s")
            require(
                self.timeout_s > 0,
                f"reward {self.name!r}: timeout_s",
                self.timeout_s,
                rule="fails every rollout",
                fix="Use a positive time, or None for reward.timeout_s.",
            )

    def __call__(self, rollout: Rollout) -> Any:
        """Call the function with a rollout."""
        return self.function(rollout)

    @functools.cached_property
    def is_async(self) -> bool:
        """Return whether the function is a coroutine function."""
        function = self.function
        return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    def weighted(self, weight: float) -> Reward:
        """Return the same reward with another weight in the total.

        Args:
            weight: The factor. With 0 the value is recorded and does not count.
        """
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

    A returned bool counts as 1.0 or 0.0. The value of a returned dict is its "reward" key, or the
    sum of all values without that key. All keys are recorded.

    Args:
        function: Takes a rollout and returns a number, or a dict of numbers by name.
        name: Name in metrics and messages. The default is the function's name.
        weight: Factor of the value in the total.
        timeout_s: Limit of one call in seconds. None: reward.timeout_s.
        required_columns: Metadata columns that the function reads. A dataset without them is
            refused before the run starts.
        column_types: Types that values of these columns may have, such as (str,). Other values are
            refused before the run starts. Empty: any type.
        environment: Environment variables that the function needs although they look like secrets,
            such as the key of a judge. Functions run without secrets (process_environment.py).

    Returns:
        The reward, or a decorator if no function is given.

    Raises:
        InvalidValue: An argument is wrong, or the function does not take one rollout.
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
    """Return each function as a Reward.

    Args:
        functions: Functions of one rollout, or rewards.

    Raises:
        InvalidValue: There is no function, two have the same name, or one does not take a rollout.
    """
    rewards = tuple(f if isinstance(f, Reward) else reward(f) for f in functions)
    require(
        len(rewards) > 0,
        "rewards",
        functions,
        rule="scores nothing",
        fix="Give at least one reward function.",
    )
    names = [one.name for one in rewards]
    for name in names:
        require(
            names.count(name) == 1,
            "rewards",
            names,
            rule=f"{names.count(name)} rewards have the name {name!r}, and rewards are recorded by "
            "name",
            fix='Give them different names, as in @rlsys.reward(name="...").',
        )
    return rewards


def check_columns(
    functions: Sequence[Reward | RewardFunction],
    columns: Collection[str],
    where: str = "the dataset",
) -> None:
    """Check that a dataset has the columns that rewards require.

    Args:
        functions: Functions of one rollout, or rewards.
        columns: The metadata columns of the dataset.
        where: Names the dataset in the message.

    Raises:
        InvalidValue: A column is missing.
    """
    for one in as_rewards(functions):
        for column in one.required_columns:
            require(
                split_path(column, columns) is not None,
                f"reward {one.name!r}: column",
                column,
                rule=f"{where} has no such column besides its prompt; it has {sorted(columns)}",
                fix="Name one of these.",
            )


def takes_rollout(function: Callable[..., Any]) -> bool:
    """Return whether a function is a reward, or annotates a parameter as a rollout."""
    signature = _signature(function)
    annotations = [one.annotation for one in signature.parameters.values()] if signature else []
    return isinstance(function, Reward) or any(
        annotation in (Rollout, "Rollout", "rlsys.Rollout") for annotation in annotations
    )


def check_column_name(column: object, maker: str) -> None:
    """Raise InvalidValue for an argument of `maker`, such as exact_match, that is not a name."""
    if isinstance(column, Rollout):
        raise InvalidValue(
            f"{maker}: column",
            rule="is a rollout, and this function takes a column and returns a reward",
            fix=f'Call the reward: {maker}("answer")(rollout), or use rewards=[{maker}("answer")].',
        )
    require(
        isinstance(column, str),
        f"{maker}: column",
        column,
        rule="is not the name of a column",
        fix=f'Give a name, such as {maker}("answer").',
    )


def is_missing(value: object) -> bool:
    """Return whether a value is None, or the NaN that some tables use for it."""
    return value is None or (isinstance(value, float) and value != value)


def check_type(value: object, types: tuple[type, ...], field: str) -> None:
    """Raise InvalidValue about `field` if a column's value has none of `types`.

    Without types, any value is accepted. A bool does not count as an int here.
    """
    if not types or (isinstance(value, types) and (bool in types or not isinstance(value, bool))):
        return
    raise InvalidValue(
        field,
        value,
        rule=f"is of type {type(value).__name__}, and the reward compares values of type "
        f"{' or '.join(one.__name__ for one in types)}",
        fix="Make the column text, or write a reward that reads it.",
    )


def _check_function(name: str, function: object) -> None:
    """Raise InvalidValue unless `function` can be called with one rollout."""
    field = f"reward {name!r}"
    if not callable(function):
        raise InvalidValue(
            field, function, rule="is not a function", fix="Give one that takes a rollout."
        )
    require(
        not inspect.isgeneratorfunction(function) and not inspect.isasyncgenfunction(function),
        field,
        rule="is a generator",
        fix="Return the value instead of yielding it.",
    )
    signature = _signature(function)
    require(
        signature is None or signature.return_annotation not in (Reward, "Reward"),
        field,
        rule="makes a reward and is not a reward itself",
        fix=f"Call it, as in rewards=[{name}()].",
    )
    if error := misfit(function, None):
        takes = f"takes {signature}, and " if signature else ""
        raise InvalidValue(
            field,
            rule=f"{takes}is called with one rollout ({error})",
            fix="Take only the rollout. The columns of the dataset are in rollout.metadata; pass "
            "other values with functools.partial.",
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # functions in C without a signature, partials with wrong arguments
        return None


def _check_number(value: object, field: str) -> None:
    require(
        isinstance(value, Real) and not isinstance(value, bool),
        field,
        value,
        rule="is not a number",
        fix="Give one, such as 0.5.",
    )


def _types(types: object, reward_name: str) -> tuple[type, ...]:
    if not isinstance(types, Iterable) or not all(isinstance(one, type) for one in types):
        raise InvalidValue(
            f"reward {reward_name!r}: column_types",
            types,
            rule="is not a list of types",
            fix="Give one, such as column_types=(str,).",
        )
    return tuple(types)


def _names(field: str, names: object, reward_name: str) -> tuple[str, ...]:
    """Return names as a tuple, or raise InvalidValue: a text would be read as its letters."""
    where = f"reward {reward_name!r}: {field}"
    if isinstance(names, str):
        raise InvalidValue(
            where,
            names,
            rule="is a text, not a list of names",
            fix=f"Give a list, {field}=({names!r},).",
        )
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise InvalidValue(
            where,
            names,
            rule="is not a list of names",
            fix=f'Give one, such as {field}=("answer",).',
        )
    return tuple(names)
