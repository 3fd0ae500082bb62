"""Clocks of calls of user code, which stop while the call waits for a resource.

A call of a reward, an episode or a tool has a time limit. Before its work starts it may have to
wait for a child process or for a slot of the sandbox. Code that waits like this uses `waiting()`,
which stops all clocks of the current call. Code that enforces a limit registers its clock with
`clocked`.

The clocks of a call follow it through `await`, into tasks and into `asyncio.to_thread`. A thread
that user code starts has no clocks, so its waits count.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol


class CallClock(Protocol):
    """Clock of one call. Both methods may be called from any thread, and nest."""

    def pause(self) -> None:
        """Stop the clock."""

    def resume(self) -> None:
        """Start the clock again, unless other pauses are active."""


_clocks: ContextVar[tuple[CallClock, ...]] = ContextVar("clocks", default=())


@contextlib.contextmanager
def clocked(clock: CallClock) -> Iterator[None]:
    """Register `clock` for `waiting` in the block and in tasks that it starts."""
    token = _clocks.set((*_clocks.get(), clock))
    try:
        yield
    finally:
        _clocks.reset(token)


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[], None]]:
    """Stop the clocks of the current call for the block.

    Yields a function that starts them again before the end of the block, from any thread. Further
    calls of it have no effect.
    """
    hold = Hold()
    try:
        yield hold.release
    finally:
        hold.release()


class Hold:
    """A pause of the clocks of the current call, until `release`."""

    def __init__(self) -> None:
        self._clocks = _clocks.get()
        self._lock = threading.Lock()
        for clock in self._clocks:
            clock.pause()

    def release(self) -> None:
        """Start the clocks again. Further calls have no effect."""
        with self._lock:
            clocks, self._clocks = self._clocks, ()
        for clock in clocks:
            clock.resume()


class Stopwatch:
    """Clock that counts seconds outside of pauses. `now` is called in any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._num_pauses = 0
        self._counted_s = 0.0
        self._resumed_s = now()

    @property
    def elapsed_s(self) -> float:
        """Seconds outside of pauses."""
        with self._lock:
            since_s = 0.0 if self._num_pauses else self._now() - self._resumed_s
            return self._counted_s + since_s

    def pause(self) -> None:
        """Stop the clock."""
        with self._lock:
            if not self._num_pauses:
                self._counted_s += self._now() - self._resumed_s
            self._num_pauses += 1

    def resume(self) -> None:
        """Start the clock again, unless other pauses are active."""
        with self._lock:
            self._num_pauses -= 1
            if not self._num_pauses:
                self._resumed_s = self._now()
