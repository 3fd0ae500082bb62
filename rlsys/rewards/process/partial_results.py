"""Results that arrive one by one and are taken in parts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Generic, TypeVar

T = TypeVar("T")


class PartialResults(Generic[T]):
    """Collector of `size` results, each identified by its place. Use it on one event loop only."""

    def __init__(self, size: int) -> None:
        self._num_open = size
        self._fresh: dict[int, T] = {}
        self._some = asyncio.Event()
        self._all = asyncio.Event()
        self._error: BaseException | None = None
        if size == 0:
            self._all.set()

    @property
    def is_complete(self) -> bool:
        """Return whether all results have arrived, or an error."""
        return self._all.is_set()

    async def complete(self) -> None:
        """Wait until all results have arrived, or an error."""
        await self._all.wait()

    def add(self, place: int, result: T) -> None:
        """Add the result of a place."""
        self._fresh[place] = result
        self._num_open -= 1
        self._some.set()
        if self._num_open == 0:
            self._all.set()

    def fail(self, error: BaseException) -> None:
        """Let `take` raise this error from now on."""
        self._error = error
        self._some.set()
        self._all.set()

    async def take(self, *, at_most_s: float, gather_s: float) -> dict[int, T]:
        """Return the new results by place.

        Waits up to `at_most_s` for the first one, then up to `gather_s` for others.
        """
        if not self.is_complete:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._some.wait(), at_most_s)
                await asyncio.wait_for(self._all.wait(), gather_s)
        if self._error is not None:
            raise self._error
        fresh, self._fresh = self._fresh, {}
        self._some.clear()
        return fresh
