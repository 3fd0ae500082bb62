"""Assertions about errors as data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from rlsys.errors import NOT_GIVEN, InvalidValue

E = TypeVar("E", bound=BaseException)


@contextmanager
def invalid(field: str, value: Any = NOT_GIVEN) -> Iterator[pytest.ExceptionInfo[InvalidValue]]:
    """Assert that the block raises an InvalidValue about `field` and, if given, `value`."""
    with pytest.raises(InvalidValue) as found:
        yield found
    assert found.value.field == field, str(found.value)
    if value is not NOT_GIVEN:
        assert found.value.value == value, str(found.value)


@contextmanager
def error_about(kind: type[E], *names: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Assert that the block raises `kind` with a message that contains each of `names`.

    For errors without attributes. `names` are names and values, not sentences.
    """
    with pytest.raises(kind) as found:
        yield found
    for name in map(str, names):
        assert name in str(found.value), f"{name!r} is not in {str(found.value)!r}"
