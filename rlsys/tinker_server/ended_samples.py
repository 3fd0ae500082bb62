"""Which requests of a sampling client have ended, for the one poll that stands for all of them.

add(request) ──► 1, 2, 3, ... ──► wait(behind=n): those after the n-th, as soon as there are any

What a poll says it has seen is forgotten; what it has not, because an answer was lost, is told
again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EndedSample:
    request: str
    size: int | None  # bytes of the answer; None: it failed


class Completions:
    def __init__(self) -> None:
        self._events: deque[tuple[int, EndedSample]] = deque()
        self._count = 0
        self._added = asyncio.Event()

    def add(self, completion: EndedSample) -> None:
        self._count += 1
        self._events.append((self._count, completion))
        self._added.set()
        self._added = asyncio.Event()

    async def wait(self, *, behind: int, timeout_s: float) -> tuple[int, list[EndedSample]]:
        """The number of the last one, and those behind the one of this number; none after so
        long.
        """
        while self._events and self._events[0][0] <= behind:
            self._events.popleft()
        if not self._events and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._added.wait()
            except TimeoutError:
                pass
        found = [one for count, one in self._events if count > behind]
        return max(self._count, behind), found
