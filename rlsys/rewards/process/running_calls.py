"""Table of running reward calls in memory that a process of functions shares with its runner.

The process writes a few values per call, without a system call. The runner reads them, even if the
process hangs or has died.

    row 0:   the async call whose step the event loop runs (0: none), number of calls that have
             begun so far, the loop's thread
    row 1..: number of the call (0: the row is free), when it began, its thread (0: not started)

Threads are kernel ids. Times come from the monotonic clock, which both processes share. The process
closes every descriptor of the table before user code runs. So code that writes to all descriptors,
or truncates them, does not change the table.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass

CELL_BYTES = 8
ROW_CELLS = 3


@dataclass(frozen=True, slots=True)
class Running:
    """A call that has begun and not ended."""

    number: int
    began_s: float
    thread: int


class RunningCalls:
    """The shared table."""

    def __init__(self, fd: int, num_rows: int) -> None:
        """Map a file of at least `num_bytes(num_rows)` bytes, which may be closed afterwards."""
        self._num_rows = num_rows
        memory = memoryview(mmap.mmap(fd, num_bytes(num_rows)))
        self._numbers = memory.cast("q")
        self._times = memory.cast("d")

    def begin(self, row: int, number: int, time_s: float) -> None:
        """Record that a call begins in a free row."""
        cell = ROW_CELLS * row
        self._times[cell + 1] = time_s
        self._numbers[cell + 2] = 0
        self._numbers[cell] = number  # last: a row with a number is complete

    def follow(self, row: int, number: int, time_s: float) -> None:
        """Record that another call begins in the row, in the same thread."""
        cell = ROW_CELLS * row
        self._numbers[cell] = 0
        self._times[cell + 1] = time_s
        self._numbers[cell] = number

    def set_time(self, row: int, time_s: float) -> None:
        """Set the beginning of the row's call: later by its waits, infinite while it waits."""
        self._times[ROW_CELLS * row + 1] = time_s

    def set_thread(self, row: int, thread: int) -> None:
        """Set the thread of the row's call."""
        self._numbers[ROW_CELLS * row + 2] = thread

    def end(self, row: int) -> None:
        """Free the row."""
        self._numbers[ROW_CELLS * row] = 0

    @property
    def num_begun(self) -> int:
        """Number of calls that have begun so far."""
        return self._numbers[1]

    @num_begun.setter
    def num_begun(self, count: int) -> None:
        self._numbers[1] = count

    @property
    def step(self) -> int:
        """The async call whose step the event loop runs, or 0."""
        return self._numbers[0]

    @step.setter
    def step(self, number: int) -> None:
        self._numbers[0] = number

    @property
    def loop_thread(self) -> int:
        """The thread of the event loop."""
        return self._numbers[2]

    @loop_thread.setter
    def loop_thread(self, thread: int) -> None:
        self._numbers[2] = thread

    def running(self) -> list[Running]:
        """Return the calls that have begun and not ended."""
        found: list[Running] = []
        for row in range(1, self._num_rows + 1):
            cell = ROW_CELLS * row
            if number := self._numbers[cell]:
                began_s, thread = self._times[cell + 1], self._numbers[cell + 2]
                if self._numbers[cell] == number:  # otherwise another call has begun in the row
                    found.append(Running(number, began_s, thread))
        return found


def close_files(fd: int) -> None:
    """Close all descriptors of the file `fd` in this process, including the one that mmap keeps."""
    table = os.fstat(fd)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if os.path.samestat(os.fstat(int(name)), table):
                os.close(int(name))


def num_bytes(num_rows: int) -> int:
    """Return the size of a table."""
    return CELL_BYTES * ROW_CELLS * (num_rows + 1)
