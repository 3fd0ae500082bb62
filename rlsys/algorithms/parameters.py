"""Objects that are made of constants and of one another: losses, corrections, advantages.

`@parameters` makes a frozen dataclass of a class, whose fields are checked by their types before
its own `__post_init__` checks what they mean: that may take bounds for numbers, none of them NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar, dataclass_transform

from rlsys.common.user_functions import is_deferred, misfit, name_of

T = TypeVar("T")

# By a field's annotation, what its value must be, and how a message says it.
_NUMBERS: dict[str, tuple[Any, str]] = {
    "float": (Real, "number"),
    "int": (Integral, "whole number"),
}
_FUNCTIONS = {"LossFn": "loss", "Correction": "correction", "GroupAdvantage": "advantage"}


@dataclass_transform(frozen_default=True)
def parameters(cls: type[T]) -> type[T]:
    """Its instances raise ValueError for a field that is no number, NaN, or no function where one
    is wanted.
    """
    own: Callable[[Any], None] | None = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        for one in fields(self):
            _check(type(self).__name__, one.name, str(one.type), getattr(self, one.name))
        if own is not None:
            own(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def _check(owner: str, name: str, annotation: str, value: Any) -> None:
    annotation, _, optional = annotation.partition(" | ")
    if annotation in _NUMBERS and not (optional and value is None):
        kind, called = _NUMBERS[annotation]
        if not isinstance(value, kind) or isinstance(value, bool) or math.isnan(value):
            raise ValueError(f"{owner}: {name}={value!r} is no {called}; give one.")
    elif annotation in _FUNCTIONS:
        what = _FUNCTIONS[annotation]
        if isinstance(value, type):
            raise ValueError(
                f"{owner}: {name} is the class {value.__name__}; make one of it: "
                f"{value.__name__}(...)."
            )
        if not callable(value) or (what == "correction" and not hasattr(value, "weighs")):
            raise ValueError(
                f"{owner}: {name}={name_of(value)} is no {what}; give one that stands under "
                f"{what!r} in docs/algorithms.md, or of your own."
            )
        if is_deferred(value):
            raise ValueError(
                f"{owner}: {name}={name_of(value)} is an async function or a generator, whose call "
                "computes nothing yet; give a plain function that returns its values."
            )
        if what != "advantage" and (error := misfit(value, None)):
            raise ValueError(
                f"{owner}: {name}={name_of(value)} does not take one argument ({error}); let it "
                "take LossInputs alone, and give it other values with functools.partial."
            )
