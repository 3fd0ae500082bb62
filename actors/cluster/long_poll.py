"""Long polling: a call with a bounded wait for results that an object collects in its own time.

collect() ─► pending over several calls ─► results of all that ended, or [] after the wait
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Longest wait of one call for a result. It does not limit the work, since the next call continues
# to wait. It bounds how late the death of an actor is noticed.
COLLECT_WAIT_S = 5.0


class LongPoll(Generic[T]):
    """Results of `collect`, which waits until something has ended and returns it.

    The coroutine stays pending over several calls, because cancelling it could lose its result.
    """

    def __init__(self, collect: Callable[[], Coroutine[Any, Any, list[T]]]) -> None:
        self._collect = collect
        self._pending: asyncio.Task[list[T]] | None = None

    async def within(self, timeout_s: float) -> list[T]:
        """Return what has ended, or [] if nothing does within the time."""
        if self._pending is None:
            self._pending = asyncio.create_task(self._collect())
            self._pending.add_done_callback(_retrieve_exception)
        done, _ = await asyncio.wait([self._pending], timeout=timeout_s)
        if not done:
            return []
        task, self._pending = self._pending, None
        return task.result()

    async def gathered(self, gather_s: float, more: Callable[[], bool] = lambda: True) -> list[T]:
        """Return what ends within COLLECT_WAIT_S, and what ends up to `gather_s` after the first.

        One call for several results costs less than a call for each. `more` returns whether
        further results may come; without any, the call returns at once.
        """
        found = await self.within(COLLECT_WAIT_S)
        clock = asyncio.get_running_loop().time
        deadline = clock() + gather_s
        while found and more() and (left_s := deadline - clock()) > 0:
            found += await self.within(left_s)
        return found


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a collect that no call waits for, so that asyncio does not log it.

    An engine that is closed fails its pending collect. The next call, if there is one, raises.
    """
    if not task.cancelled():
        task.exception()
