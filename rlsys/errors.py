"""The errors that users meet, and what asyncio.TaskGroup raises, as the one that they should read.

A mistake (a value, a file, a dataset) is a ValueError that names the value, the rule and the fix.
What goes wrong in the world while a run is under way is a RunFailed. Anything else is a bug.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class RunFailed(RuntimeError):
    """A run ended before its last step; the message says why, its directory holds what was done."""


def first_error(error: BaseException) -> BaseException:
    """The error of a group that ended the others; one that is no group is returned as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class ErrorCollector:
    """Gathers a user's mistakes, so that he reads all at once: checks that do not depend on each
    other run each in a `noted` block, and `tell` raises what they found."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except ValueError as mistake:
            if str(mistake) not in self._found:
                self._found.append(str(mistake))

    def tell(self) -> None:
        """Raise one ValueError with a mistake a line, if there is any."""
        if len(self._found) == 1:
            raise ValueError(self._found[0])
        if self._found:
            lines = "".join(f"\n  - {mistake}" for mistake in self._found)
            raise ValueError(f"{len(self._found)} mistakes:{lines}")
