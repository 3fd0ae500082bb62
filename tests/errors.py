"""Assertions about errors as data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlsys.errors import NOT_GIVEN, InvalidValue


@contextmanager
def invalid(field: str, value: Any = NOT_GIVEN) -> Iterator[pytest.ExceptionInfo[InvalidValue]]:
    """Assert that the block raises an InvalidValue about `field` and, if given, `value`."""
    with pytest.raises(InvalidValue) as found:
        yield found
    assert found.value.field == field, str(found.value)
    if value is not NOT_GIVEN:
        assert found.value.value == value, str(found.value)
