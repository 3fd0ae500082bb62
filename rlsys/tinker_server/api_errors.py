"""Errors of the API that reach its clients."""

from __future__ import annotations

from typing import Any

from rlsys.errors import NOT_GIVEN, InvalidValue


class ApiError(InvalidValue):
    """A refused request, answered with the HTTP status `status`."""

    def __init__(
        self, field: str, value: Any = NOT_GIVEN, *, rule: str, fix: str, status: int = 422
    ) -> None:
        super().__init__(field, value, rule=rule, fix=fix)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.field, self.value, self.rule, self.fix, self.status)

    def within(self, prefix: str) -> ApiError:
        """Return the same error about the field `prefix` + `field`."""
        return _restore(f"{prefix}{self.field}", self.value, self.rule, self.fix, self.status)


class PartDied(RuntimeError):
    """Death of an actor that a request needs. The message has its name and the reason."""


def _restore(field: str, value: Any, rule: str, fix: str, status: int) -> ApiError:
    return ApiError(field, value, rule=rule, fix=fix, status=status)
