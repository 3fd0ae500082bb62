"""Waits of requests, all of which end at once when the server does.

    async with waits.wait(): ...    ─► ends by itself, or ApiError 503 after waits.end()

Without this, a client's poll of 30 s would outlast the time that a server has to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlsys.tinker_server.api_errors import ApiError


class RequestWaits:
    """All waits of one server, on one event loop."""

    def __init__(self) -> None:
        self.is_ending = False
        self._limits: set[asyncio.Timeout] = set()

    def end(self) -> None:
        """End all waits, and those that begin later."""
        self.is_ending = True
        while self._limits:
            self._limits.pop().reschedule(0.0)  # in the past of any event loop

    @asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Run the block, which waits, until the server ends.

        Raises:
            ApiError: 503, the server ends.
        """
        if self.is_ending:
            raise server_ends()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                raise server_ends() from None
            raise


def server_ends() -> ApiError:
    """Return the error of requests that wait while the server ends."""
    return ApiError(
        "server",
        rule="it ends, and requests whose results were not fetched are lost",
        fix="Start it again, and continue from a checkpoint.",
        status=503,
    )
