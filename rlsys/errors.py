"""What asyncio.TaskGroup raises, as the one error that a user should read."""

from __future__ import annotations


def first_error(error: BaseException) -> BaseException:
    """The error of a group that ended the others; one that is no group is returned as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
