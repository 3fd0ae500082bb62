"""What asyncio.TaskGroup raises, as the one error that a user should read."""

from __future__ import annotations


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the others."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
