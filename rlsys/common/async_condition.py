"""Waiting for a condition over shared state, without polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class AsyncCondition:
    """`notify` after every change; `until` returns once its condition holds.

    For one event loop. A waiter looks at its condition before it first waits, and after each
    notification, so that none can be missed.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def next(self) -> None:
        """Wait for the next notification."""
        await self._changed.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


async def first_of(*signals: AsyncCondition) -> None:
    """Wait for the next notification of any."""
    # What they wait for is fixed before anybody else runs, so that no notification is missed.
    waits = [asyncio.ensure_future(signal._changed.wait()) for signal in signals]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
