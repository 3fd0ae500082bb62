"""Functions over one group of rollouts, as `Dataflow.per_group` runs them.

A function `(*columns [G]) -> [G]` returns one value per rollout, or None to refuse the group: a
group that teaches nothing is dropped, and the gate issues another one. The attribute
`min_group_size` of the function object is the smallest group that it accepts; a function without it
accepts any group.

Shape legend: G rollouts of one group.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rlsys.algorithms.parameters import parameters
from rlsys.common.user_functions import FunctionFailed, attribute_of, called, misfit, name_of
from rlsys.config.fields import checked
from rlsys.errors import InvalidValue, require

GroupAdvantage = Callable[..., torch.Tensor | None]
F = TypeVar("F", bound=Callable[..., object])


def needs_group(size: int) -> Callable[[F], F]:
    """Return a decorator that sets `min_group_size` of an advantage to `size` rollouts."""

    def mark(function: F) -> F:
        function.min_group_size = size  # type: ignore[attr-defined]
        return function

    return mark


def min_group_size(function: object) -> int:
    """Return the size of the smallest group that a function accepts, 1 by default.

    Raises:
        ValueError: Its attribute `min_group_size` is not a whole number.
    """
    size = attribute_of(function, "min_group_size", 1)
    return int(checked(size, int, f"{name_of(function)}: min_group_size"))


def check_group_size(function: object, group_size: int) -> None:
    """Check that a graph's groups are large enough for an advantage.

    Raises:
        InvalidValue: They are too small.
    """
    require_group_size(group_size, min_group_size(function), name_of(function))


def require_group_size(group_size: int, needed: int, algorithm: str) -> None:
    """Raise InvalidValue for a group in which every advantage of an algorithm would be 0."""
    require(
        group_size >= needed,
        "group_size",
        group_size,
        rule=f"every advantage of {algorithm} would be zero",
        fix=f"Use group_size >= {needed}.",
    )


def check_arguments(
    stage: str,
    function: Callable[..., Any],
    num_columns: int,
    *,
    by_name: Mapping[str, object] | None = None,
    hint: str = "",
) -> None:
    """Raise InvalidValue for a function that does not take `num_columns` columns and `by_name`."""
    if error := misfit(function, *range(num_columns), **(by_name or {})):
        raise InvalidValue(
            f"flow.{stage}({name_of(function)})",
            rule=f"the function does not take {num_columns} column(s): {error}",
            fix="Pass the columns in the order of its arguments, and constants with "
            f"functools.partial.{hint}",
        )


def check_group_function(function: Callable[..., Any], num_columns: int) -> None:
    """Raise InvalidValue for a function that does not take `num_columns` columns."""
    if isinstance(function, dynamic_sampling):
        check_group_function(function.advantage, num_columns - function.by_last_column)
    else:
        check_arguments("per_group", function, num_columns)


def run_group_function(
    function: GroupAdvantage, columns: Sequence[torch.Tensor], *, stage: str
) -> torch.Tensor | None:
    """Return the values [G] of a stage's function over a group, or None if it refuses the group.

    Raises:
        InvalidValue: The result is not one number per rollout.
        FunctionFailed: The function raised, or a value is not finite.
    """
    caller = f"stage {stage!r}: {name_of(function)}"
    result = called(caller, function, *columns)
    if result is None:
        return None
    size = len(columns[0])
    values = as_values(caller, result)
    require(
        values.shape == (size,),
        caller,
        rule=f"returned shape {tuple(values.shape)} for a group of {size} rollouts",
        fix="Return one value for each rollout, or None to refuse the group.",
    )
    if not values.isfinite().all():
        arguments = ", ".join(shortened(column) for column in columns)
        raise FunctionFailed(
            f"{caller} returned {shortened(values)} for a group, from {arguments}. Return finite "
            "numbers, or None to refuse the group."
        )
    return values


def as_values(caller: str, result: object) -> torch.Tensor:
    """Return the result of a user's function as float32.

    Raises:
        InvalidValue: It is not a tensor, a number or a list of numbers.
    """
    try:
        return torch.as_tensor(result, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidValue(
            caller,
            rule=f"returned {reprlib.repr(result)} ({type(result).__name__}), not a tensor",
            fix="Return a tensor with one number for each value.",
        ) from None


def shortened(values: torch.Tensor) -> str:
    """Return the first few values as text."""
    return reprlib.repr(values.tolist())


@parameters
class dynamic_sampling:
    """`advantage`, or None if all rewards of a group are equal: DAPO, 2503.14476, section 3.2.

    With `by_last_column` the last column decides, and `advantage` does not get that column. In the
    paper, for example, the accuracy decides, while the reward also has a penalty for length.
    """

    advantage: GroupAdvantage
    by_last_column: bool = False

    @property
    def min_group_size(self) -> int:
        """Return the smallest group of `advantage`, at least 2: one reward is always equal."""
        return max(2, min_group_size(self.advantage))

    def __call__(self, *columns: torch.Tensor) -> torch.Tensor | None:
        """Return the advantages [G], or None to refuse the group."""
        compared, arguments = columns[0], columns
        if self.by_last_column:
            compared, arguments = columns[-1], columns[:-1]
        if bool((compared == compared[0]).all()):
            return None
        return self.advantage(*arguments)
