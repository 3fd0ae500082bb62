"""Cores that simulated workers share: more busy workers than cores slow all of them down.

    busy workers ─► rate = min(1, cores / busy) ─► work clock = integral of the rate

All workers take their times from the work clock, which is the clock of the loop while the cores
suffice. Time slices are equal, as those of the operating system are for equal priorities.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class WorkTimer:
    """A call at a time of the work clock. `cancel` prevents it."""

    cores: SharedCores
    at_s: float
    call: Callable[[], None]
    handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Prevent the call."""
        self.cores.forget(self)
        if self.handle is not None:
            self.handle.cancel()


@dataclass(kw_only=True, eq=False)
class SharedCores:
    """The cores of one machine. An infinite number slows nothing down."""

    num_cores: float = math.inf
    num_busy: int = 0
    _work_s: float = 0.0  # work clock at `_since_s`
    _since_s: float = 0.0
    _timers: dict[WorkTimer, None] = field(default_factory=dict)  # in order, unlike a set

    @property
    def now_s(self) -> float:
        """Time of the work clock."""
        return self._work_s + (_loop_s() - self._since_s) * self._rate

    @property
    def _rate(self) -> float:
        return min(1.0, self.num_cores / self.num_busy) if self.num_busy else 1.0

    def set_busy(self, change: int) -> None:
        """Add to the number of busy workers."""
        before = self._rate
        self._work_s, self._since_s = self.now_s, _loop_s()
        self.num_busy += change
        if self._rate != before:
            for timer in self._timers:
                assert timer.handle is not None
                timer.handle.cancel()
                self._start(timer)

    @contextlib.contextmanager
    def busy(self, num_workers: int = 1) -> Iterator[None]:
        """Keep workers busy while the block runs."""
        self.set_busy(num_workers)
        try:
            yield
        finally:
            self.set_busy(-num_workers)

    async def work(self, seconds: float, num_workers: int = 1) -> None:
        """Let workers compute for a time of the work clock."""
        if math.isinf(self.num_cores):
            await asyncio.sleep(seconds)
            return
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        done = asyncio.get_running_loop().create_future()
        with self.busy(num_workers):
            timer = self.call_at(self.now_s + seconds, lambda: _end(done))
            try:
                await done
            finally:
                timer.cancel()

    def call_at(self, at_s: float, call: Callable[[], None]) -> WorkTimer:
        """Call a function at a time of the work clock."""
        timer = WorkTimer(self, at_s, call)
        if not math.isinf(self.num_cores):
            self._timers[timer] = None
        self._start(timer)
        return timer

    def forget(self, timer: WorkTimer) -> None:
        """Drop a timer that was cancelled or has fired."""
        self._timers.pop(timer, None)

    def _start(self, timer: WorkTimer) -> None:
        left_s = max(0.0, timer.at_s - self.now_s) / self._rate

        def fire() -> None:
            self.forget(timer)
            timer.call()

        timer.handle = asyncio.get_running_loop().call_at(_loop_s() + left_s, fire)


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


def _end(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
