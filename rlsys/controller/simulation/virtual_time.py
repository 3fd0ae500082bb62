"""An event loop whose clock jumps: sleeping tasks wake at once, in the right order.

Deadlocks and livelocks raise errors instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """All tasks wait, and no timer will wake one."""


class Livelock(AssertionError):
    """Tasks wake each other without end."""


# Iterations of the loop: a hundred times those of the longest simulation.
MAX_TURNS = 1_000_000


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0
    num_turns = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Deadlock("every task waits for another")
        self.num_turns += 1
        if self.num_turns > MAX_TURNS:
            raise Livelock(f"no end after {self.num_turns} turns, at {self.now_s:g} s")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop whose clock jumps; return its result."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(main)
    finally:
        loop.set_exception_handler(lambda *_: None)  # of tasks that an interrupt has ended
        loop.run_until_complete(_end_tasks())
        loop.close()


async def _end_tasks() -> None:
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
