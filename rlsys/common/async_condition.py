"""Waiting for a condition over shared state without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class AsyncCondition:
    """Notifications about changes of shared state on one event loop.

    Call `notify` after each change. `until` checks its condition before it first waits and after
    each notification, so that no change is missed.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiters."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def next(self) -> None:
        """Wait for the next notification."""
        await self._changed.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true."""
        while not condition():
            await self._changed.wait()


async def first_of(*signals: AsyncCondition) -> None:
    """Wait for the next notification of any of the conditions."""
    # All events are read before another task runs, so that no notification is missed.
    waits = [asyncio.ensure_future(signal._changed.wait()) for signal in signals]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
