"""Ended requests of a sampling client, for one poll that replaces a poll per request.

    add(request) ──► 1, 2, 3, ... ──► wait(behind=n): those after the n-th, as soon as there are any

A poll names the last event that it has seen, and earlier ones are forgotten. Events of an answer
that was lost are returned again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EndedSample:
    """An ended request."""

    request: str
    size: int | None  # bytes of the answer; None: it failed


class Completions:
    """Numbered events of one sampling client."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, EndedSample]] = deque()
        self._count = 0
        self._added = asyncio.Event()

    def add(self, completion: EndedSample) -> None:
        """Add an event, and wake all polls."""
        self._count += 1
        self._events.append((self._count, completion))
        self.wake()

    def wake(self) -> None:
        """Answer all polls that wait, for example because the session has ended."""
        self._added.set()
        self._added = asyncio.Event()

    async def wait(self, *, behind: int, timeout_s: float) -> tuple[int, list[EndedSample]]:
        """Return the number of the last event, and the events after number `behind`.

        Wait until there is one, at most `timeout_s`.
        """
        while self._events and self._events[0][0] <= behind:
            self._events.popleft()
        if not self._events and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._added.wait()
            except TimeoutError:
                pass
        found = [event for count, event in self._events if count > behind]
        return max(self._count, behind), found
