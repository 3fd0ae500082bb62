"""Sees from another thread that an event loop is blocked, by which episode, and where.

The tasks of an episode have its name, so that the loop's current task says whose turn it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlsys.common.background_tasks import start_thread
from rlsys.common.user_functions import LIBRARY_DIRS, printable

# An environment that computes on the event loop holds up all episodes beside it; longer than this,
# and it is told. What takes time is a plain function, or awaits.
BLOCKED_S = 30.0

# Time is counted in pieces of this length: while the process itself stands still, none passes.
TICK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """An event loop did nothing else for `seconds`. `task`: the name of what ran, "" for none;
    `where`: the line that it stood at, the last that is the user's own if there is one.
    """

    seconds: float
    task: str
    where: str

    @property
    def told(self) -> str:
        return f"blocked the event loop for {self.seconds:g} s at {self.where}"


class LoopWatchdog:
    """Of the event loop that it is made in. `limit_s`: blocked for longer than this is told;
    `sleep` waits between two looks.
    """

    def __init__(self, *, limit_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._limit_s = limit_s
        self._sleep = sleep
        self._answered = threading.Event()
        self._answered.set()
        self._num_silent = 0  # ticks since the loop was asked

    def watch(self, seconds: float) -> Blocked | None:
        """In another thread: looks for so long; None where the loop went on."""
        for _ in range(max(1, math.ceil(seconds / TICK_S))):
            if self._answered.is_set():
                self._num_silent = 0
                self._answered.clear()
                try:
                    self._loop.call_soon_threadsafe(self._answered.set)
                except RuntimeError:  # it is closed
                    return None
            elif self._num_silent * TICK_S >= self._limit_s:
                return self._seen()
            self._sleep(TICK_S)
            self._num_silent += 1
        return None

    def _seen(self) -> Blocked:
        task = asyncio.current_task(self._loop)
        return Blocked(
            seconds=self._num_silent * TICK_S,
            task="" if task is None else task.get_name(),
            where=self._where(),
        )

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread)
        frames = traceback.extract_stack(frame) if frame is not None else []
        own = [one for one in frames if not one.filename.startswith(LIBRARY_DIRS)]
        if not (shown := (own or frames)[-1:]):
            return "a place that cannot be seen"
        (last,) = shown
        line = f" ({last.line})" if last.line else ""
        return printable(f"{last.filename}:{last.lineno}, in {last.name}{line}")


@contextlib.contextmanager
def watched(on_blocked: Callable[[Blocked], None], *, limit_s: float = BLOCKED_S) -> Iterator[None]:
    """Of the running event loop: `on_blocked` is called in another thread, once, when it has been
    blocked for longer than `limit_s`.
    """
    witness = LoopWatchdog(limit_s=limit_s)
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            if (blocked := witness.watch(TICK_S)) is not None:
                on_blocked(blocked)
                return

    start_thread(watch, name="witness")
    try:
        yield
    finally:
        ended.set()
