"""Sizes of tests in the default tier: parameters left to `-m slow`, and numbers of examples."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = 200  # max_examples of the profile "thorough"

Parameter = type(pytest.param())


def rest_slow(values: Iterable[Any], first: int = 1, *, only: Collection[Any] = ()) -> list[Any]:
    """Return parameters for `pytest.mark.parametrize`, of which most are marked slow.

    A tuple has the values of several arguments, unless it is within `pytest.param`.

    Args:
        values: The values of the parameters.
        first: How many of the first values the default tier runs, unless `only` names them.
        only: The values that the default tier runs.
    """
    listed = list(values)
    assert all(value in listed for value in only), only
    kept = [value in only if only else number < first for number, value in enumerate(listed)]
    return [_parameter(value, kept) for value, kept in zip(listed, kept, strict=True)]


def _parameter(value: Any, is_default: bool) -> Any:
    if not isinstance(value, Parameter):
        value = pytest.param(*(value if isinstance(value, tuple) else (value,)))
    return value if is_default else value._replace(marks=[*value.marks, pytest.mark.slow])


def examples(count: int) -> int:
    """Return `count` for the profile "thorough" and a quarter of it for the default profile."""
    profile = settings.default
    return count if profile and profile.max_examples >= THOROUGH else max(10, count // 4)
