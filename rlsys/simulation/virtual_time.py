"""An event loop whose clock jumps: whatever sleeps, wakes at once, in the right order.

A loop that waits for nothing but the future is a deadlock, and raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Every task waits, and no timer will ever wake one."""


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Deadlock("every task waits for another")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_end_tasks())
        loop.close()


async def _end_tasks() -> None:
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
