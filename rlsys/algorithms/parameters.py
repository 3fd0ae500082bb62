"""Checked constants of losses, corrections and advantages.

`@parameters` turns a class into a frozen dataclass. It checks the fields by their annotations
before the class's own `__post_init__` checks their ranges, which may therefore assume numbers that
are not NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar, dataclass_transform

from rlsys.common.user_functions import is_deferred, misfit
from rlsys.errors import InvalidValue, require

T = TypeVar("T")

# By a field's annotation: the type of its value, and the name of the type in messages.
_NUMBERS: dict[str, tuple[Any, str]] = {
    "float": (Real, "number"),
    "int": (Integral, "whole number"),
}
_FUNCTIONS = {"LossFn": "loss", "Correction": "correction", "GroupAdvantage": "advantage"}


@dataclass_transform(frozen_default=True)
def parameters(cls: type[T]) -> type[T]:
    """Return the class as a frozen dataclass with checked fields.

    Creating an instance raises InvalidValue for a number field that is NaN or not a number, and
    for a function field that is not a function.
    """
    own: Callable[[Any], None] | None = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        for one in fields(self):
            _check(type(self).__name__, one.name, str(one.type), getattr(self, one.name))
        if own is not None:
            own(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def require_field(owner: object, name: str, holds: bool, *, rule: str, fix: str) -> None:
    """Raise InvalidValue about the field `name` of `owner` unless `holds`."""
    field = f"{type(owner).__name__}: {name}"
    require(holds, field, getattr(owner, name), rule=rule, fix=fix)


def _check(owner: str, name: str, annotation: str, value: Any) -> None:
    field = f"{owner}: {name}"
    annotation, _, optional = annotation.partition(" | ")
    if annotation in _NUMBERS and not (optional and value is None):
        kind, noun = _NUMBERS[annotation]
        if not isinstance(value, kind) or isinstance(value, bool) or math.isnan(value):
            raise InvalidValue(field, value, rule=f"must be a {noun}", fix=f"Pass a {noun}.")
    elif annotation in _FUNCTIONS:
        _check_function(field, _FUNCTIONS[annotation], value)


def _check_function(field: str, kind: str, value: Any) -> None:
    require(
        not isinstance(value, type),
        field,
        value,
        rule=f"must be a {kind}, not a class",
        fix=f"Create one: {getattr(value, '__name__', '')}(...).",
    )
    require(
        callable(value) and (kind != "correction" or hasattr(value, "weighs")),
        field,
        value,
        rule=f"must be a {kind}",
        fix=f"Use a {kind} of docs/algorithms.md, or write your own.",
    )
    require(
        not is_deferred(value),
        field,
        value,
        rule="must not be async or a generator, whose call computes nothing yet",
        fix="Use a plain function that returns its values.",
    )
    error = misfit(value, None) if kind != "advantage" else None
    require(
        error is None,
        field,
        value,
        rule=f"must take one argument ({error})",
        fix="Let it take only LossInputs, and pass constants with functools.partial.",
    )
