"""The errors that users meet, and what asyncio.TaskGroup raises, as the one that they should read.

A mistake (a value, a file, a dataset) is a ValueError that names the value, the rule and the fix.
What goes wrong in the world while a run is under way is a RunFailed. Anything else is a bug.
"""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run ended before its last step; the message says why, its directory holds what was done."""


def first_error(error: BaseException) -> BaseException:
    """The error of a group that ended the others; one that is no group is returned as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
