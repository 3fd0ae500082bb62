"""Thread that detects a blocked event loop and names the episode and line that block it.

The tasks of an episode have its name, so the current task of the loop identifies the episode.
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

# An environment that computes on the event loop stops all other episodes. It is reported after
# this time. Slow environments must be synchronous functions, or await.
BLOCKED_S = 30.0

# Time is counted in ticks, so that none passes while the whole process is suspended.
TICK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Blocked:
    """Report about a blocked event loop.

    Attributes:
        seconds: Time for which the loop ran nothing else.
        task: Name of the running task; "" if there is none.
        where: The current line of code, the innermost one of the user's code if there is one.
    """

    seconds: float
    task: str
    where: str

    @property
    def message(self) -> str:
        """The report as a clause without a subject."""
        return f"blocked the event loop for {self.seconds:g} s at {self.where}"


class LoopWatchdog:
    """Watchdog of the event loop that runs when it is created.

    Args:
        limit_s: Time after which a blocked loop is reported.
        sleep: Function that waits between two checks.
    """

    def __init__(self, *, limit_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._limit_s = limit_s
        self._sleep = sleep
        self._answered = threading.Event()
        self._answered.set()
        self._num_silent = 0  # ticks since the last unanswered check

    def watch(self, seconds: float) -> Blocked | None:
        """Watch the loop for some time, from another thread; return None if it is not blocked."""
        for _ in range(max(1, math.ceil(seconds / TICK_S))):
            if self._answered.is_set():
                self._num_silent = 0
                self._answered.clear()
                try:
                    self._loop.call_soon_threadsafe(self._answered.set)
                except RuntimeError:  # it is closed
                    return None
            elif self._num_silent * TICK_S >= self._limit_s:
                return self._report()
            self._sleep(TICK_S)
            self._num_silent += 1
        return None

    def _report(self) -> Blocked:
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
            return "an unknown line"
        (last,) = shown
        line = f" ({last.line})" if last.line else ""
        return printable(f"{last.filename}:{last.lineno}, in {last.name}{line}")


@contextlib.contextmanager
def watched(on_blocked: Callable[[Blocked], None], *, limit_s: float = BLOCKED_S) -> Iterator[None]:
    """Watch the running event loop inside of the block.

    `on_blocked` is called at most once, in another thread, when the loop has been blocked for
    longer than `limit_s`.
    """
    watchdog = LoopWatchdog(limit_s=limit_s)
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            if (blocked := watchdog.watch(TICK_S)) is not None:
                on_blocked(blocked)
                return

    start_thread(watch, name="loop-watchdog")
    try:
        yield
    finally:
        ended.set()
