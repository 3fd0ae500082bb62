"""Assertions about refused requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlsys.errors import NOT_GIVEN
from rlsys.tinker_server.api_errors import ApiError


@contextmanager
def refused(
    field: str, value: Any = NOT_GIVEN, *, status: int = 422
) -> Iterator[pytest.ExceptionInfo[ApiError]]:
    """Assert that the block raises an ApiError about `field` and, if given, `value`."""
    with pytest.raises(ApiError) as found:
        yield found
    assert (found.value.field, found.value.status) == (field, status), str(found.value)
    if value is not NOT_GIVEN:
        assert found.value.value == value, str(found.value)
