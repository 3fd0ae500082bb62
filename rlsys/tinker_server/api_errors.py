"""What a client of the API is told of its mistakes."""

from __future__ import annotations


class ApiError(ValueError):
    """A request that is not carried out. `status`: of the HTTP answer; the message says the value,
    the rule and the fix.
    """

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


class PartDied(RuntimeError):
    """An actor that a request needs has died; the message has its name and the reason."""
