"""Clocks of calls of user code, which do not run while the call waits for a place.

A call of a reward, an episode or a tool has a limit of time. What it uses may have to wait before
its own work starts: for a child process, a place in the sandbox, or a process that starts. Code
that waits in this way does so inside `waiting()`, which stops every clock of the current call. Code
that enforces a limit counts with a clock of its own, made known by `clocked`.

The clocks of a call follow it through `await`, into tasks and into `asyncio.to_thread`. A thread
that user code starts by itself has none, and its waits count.
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

    def pause(self) -> None: ...

    def resume(self) -> None: ...


_clocks: ContextVar[tuple[CallClock, ...]] = ContextVar("clocks", default=())


@contextlib.contextmanager
def clocked(clock: CallClock) -> Iterator[None]:
    """Let `waiting` stop `clock` too, in the block and in the tasks that it starts."""
    token = _clocks.set((*_clocks.get(), clock))
    try:
        yield
    finally:
        _clocks.reset(token)


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[], None]]:
    """Stop the clocks of the current call for the block.

    Yields a function that starts them again before the end of the block, from any thread, when the
    work itself starts. Further calls of it have no effect.
    """
    hold = Hold()
    try:
        yield hold.release
    finally:
        hold.release()


class Hold:
    """Stops the clocks of the current call until `release`."""

    def __init__(self) -> None:
        self._clocks = _clocks.get()
        self._lock = threading.Lock()
        for clock in self._clocks:
            clock.pause()

    def release(self) -> None:
        with self._lock:
            clocks, self._clocks = self._clocks, ()
        for clock in clocks:
            clock.resume()


class Stopwatch:
    """Clock that counts the seconds outside of its pauses. `now` must be callable in any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._num_pauses = 0
        self._counted_s = 0.0
        self._resumed_s = now()

    @property
    def elapsed_s(self) -> float:
        with self._lock:
            since_s = 0.0 if self._num_pauses else self._now() - self._resumed_s
            return self._counted_s + since_s

    def pause(self) -> None:
        with self._lock:
            if not self._num_pauses:
                self._counted_s += self._now() - self._resumed_s
            self._num_pauses += 1

    def resume(self) -> None:
        with self._lock:
            self._num_pauses -= 1
            if not self._num_pauses:
                self._resumed_s = self._now()
