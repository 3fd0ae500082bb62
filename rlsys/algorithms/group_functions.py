"""What advantages over a group tell the graph: how large it must be, and that it is refused.

A function over a group, `(*columns [G]) -> [G]`, may return None instead: the group teaches
nothing, and the gate issues another in its place. `min_group_size` is an attribute of the function
object; one without it takes any group.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from rlsys.algorithms.parameters import parameters
from rlsys.common.user_functions import FunctionFailed, attribute_of, called, misfit, name_of
from rlsys.config.fields import checked
from rlsys.errors import InvalidValue

GroupAdvantage = Callable[..., torch.Tensor | None]
F = TypeVar("F", bound=Callable[..., object])


def needs_group(size: int) -> Callable[[F], F]:
    """Decorate an advantage that says nothing about groups of fewer than `size` rollouts."""

    def mark(function: F) -> F:
        function.min_group_size = size  # type: ignore[attr-defined]
        return function

    return mark


def min_group_size(function: object) -> int:
    """The smallest group of which a function says something; 1 unless it says otherwise. Raises
    ValueError where that is no whole number.
    """
    size = attribute_of(function, "min_group_size", 1)
    return int(checked(size, int, f"{name_of(function)}: min_group_size"))


def check_group_size(function: object, group_size: int) -> None:
    """Raise ValueError where a graph's groups are too small for an advantage."""
    needed = min_group_size(function)
    if group_size < needed:
        raise InvalidValue(
            "group_size",
            group_size,
            rule=f"makes every advantage of {name_of(function)} zero",
            fix=f"Use at least {needed}.",
        )


def check_arguments(
    stage: str,
    function: Callable[..., Any],
    num_columns: int,
    *,
    given: Mapping[str, object] | None = None,
    hint: str = "",
) -> None:
    """Raise ValueError for a function that does not take so many columns, and `given` by name."""
    if error := misfit(function, *range(num_columns), **(given or {})):
        raise InvalidValue(
            f"flow.{stage}({name_of(function)})",
            rule=f"does not take {num_columns} column(s) ({error})",
            fix="Name the columns in the order of its arguments, and give it fixed ones with "
            f"functools.partial.{hint}",
        )


def check_group_function(function: Callable[..., Any], num_columns: int) -> None:
    """Raise ValueError for one that does not take so many columns."""
    if isinstance(function, dynamic_sampling):
        check_group_function(function.advantage, num_columns - function.by_last_column)
    else:
        check_arguments("per_group", function, num_columns)


def run_group_function(
    function: GroupAdvantage, columns: Sequence[torch.Tensor], *, stage: str
) -> torch.Tensor | None:
    """What the function of a stage makes of a group, [G]; None where it refuses the group. Raises
    ValueError for anything but one value per rollout, FunctionFailed where it raises, or where one
    is no finite number.
    """
    what = f"stage {stage!r}: {name_of(function)}"
    made = called(what, function, *columns)
    if made is None:
        return None
    size = len(columns[0])
    values = as_values(what, made)
    if values.shape != (size,):
        raise ValueError(
            f"{what} returned shape {tuple(values.shape)} for a group of {size} rollouts; return "
            "one value each, or None to refuse the group."
        )
    if not values.isfinite().all():
        given = ", ".join(shown(column) for column in columns)
        raise FunctionFailed(
            f"{what} returned {shown(values)} for a group, given {given}; return finite numbers, "
            "or None to refuse the group."
        )
    return values


def as_values(what: str, made: object) -> torch.Tensor:
    """As a tensor of numbers. Raises ValueError for what is none."""
    try:
        return torch.as_tensor(made, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"{what} returned {reprlib.repr(made)} ({type(made).__name__}), which is no tensor; "
            "return one, with a number each."
        ) from None


def shown(values: torch.Tensor) -> str:
    """The first few."""
    return reprlib.repr(values.tolist())


@parameters
class dynamic_sampling:
    """`advantage`, and None for a group whose rewards are all equal: DAPO, 2503.14476, section 3.2.

    With `by_last_column`, equality in the last column decides, which `advantage` does not get: as
    in the paper, where the accuracy decides and the reward has a penalty for length besides.
    """

    advantage: GroupAdvantage
    by_last_column: bool = False

    @property
    def min_group_size(self) -> int:
        return max(2, min_group_size(self.advantage))

    def __call__(self, *columns: torch.Tensor) -> torch.Tensor | None:
        judged, given = columns[0], columns
        if self.by_last_column:
            judged, given = columns[-1], columns[:-1]
        if bool((judged == judged[0]).all()):
            return None
        return self.advantage(*given)
