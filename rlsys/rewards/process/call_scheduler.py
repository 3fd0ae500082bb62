"""Scheduler of calls inside the process of reward functions.

    calls ──► [ pending ] ──► threads, call after call ──┐
                         └──► tasks on one event loop ───┴─► outcomes

At most `concurrency` calls run at a time, sync and async ones together, in the order of arrival.
One thread runs all cheap calls, because a thread per call would cost more than the call. More
threads start when calls have waited for some milliseconds behind slower ones. A cancelled call
frees its place at once. Its thread cannot be killed: it gets an exception, which ends Python code,
and its result is ignored.

After each call the thread checks the descriptors that the process itself needs. If the call has
closed or replaced one, the process ends, and the runner finds the call among the unanswered ones.
"""

from __future__ import annotations

import _thread
import asyncio
import ctypes
import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from rlsys.common.background_tasks import end_process, guarded
from rlsys.common.call_clock import CallClock, clocked
from rlsys.rewards.outcome import Outcome, components_of, failure_from
from rlsys.rewards.process.reward_messages import PackedRollouts
from rlsys.rewards.process.running_calls import RunningCalls
from rlsys.rewards.reward import Reward

# Calls that have waited this long behind slower ones get additional threads. The built-in verifiers
# take microseconds. Slower functions mostly wait, so they can run in parallel.
SPREAD_AFTER_S = 0.01

# A thread whose call began less than this ago will soon take the next one.
CHEAP_S = 0.001

# Bound here, so that user code that replaces them has no effect on this module.
_exit, _fstat, _getpid = os._exit, os.fstat, os.getpid
begin_thread, _get_ident, _get_native_id = (
    _thread.start_new_thread,
    _thread.get_ident,
    threading.get_native_id,
)
_set_async_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


def now(clock: Callable[[], float] = time.monotonic) -> float:
    """Return the time of the monotonic clock.

    The clock is bound as a default, because libraries that freeze time replace attributes of
    modules.
    """
    return clock()


class CallCancelled(BaseException):
    """Raised in the thread of a call past its limit."""


@dataclass(kw_only=True, eq=False, slots=True)
class ScheduledCall:
    """A reward function on one rollout."""

    number: int
    reward: Reward
    rollouts: PackedRollouts
    place: int  # index of its rollout among them
    queued_s: float
    row: int = 0  # in the table, after it has begun
    began_s: float = 0.0
    thread: int = 0  # Python's id of its thread; 0 before it runs and for async calls
    task: asyncio.Task[Outcome] | None = None
    is_cancelled: bool = False


class CallScheduler:
    """Scheduler of reward calls.

    `report` gets each outcome, or None for a cancelled call. It must not block. In addition to
    `concurrency` running calls, up to `max_stuck` cancelled calls may not have returned yet.
    """

    def __init__(
        self,
        table: RunningCalls,
        report: Callable[[int, Outcome | None], None],
        *,
        concurrency: int,
        max_stuck: int,
        channel_fd: int,
    ) -> None:
        self._table = table
        self._report = report
        self._concurrency = concurrency
        self._free_rows = list(range(1, concurrency + max_stuck + 1))
        self._pending: deque[ScheduledCall] = deque()
        self._running: dict[int, ScheduledCall] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._own_files = {channel_fd: _file_of(channel_fd)}
        self._selector = selectors.EpollSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.time = now  # type: ignore[method-assign]
        self._call_on_loop = self._loop.call_soon_threadsafe

    def start_loop(self) -> None:
        """Start the event loop, before the first async call."""
        watched = [key.fd for key in self._selector.get_map().values()]
        self._own_files |= {fd: _file_of(fd) for fd in (self._selector.fileno(), *watched)}
        begin_thread(guarded(self._run_loop, name="rewards", returns=False), ())

    def add(self, calls: Sequence[ScheduledCall]) -> None:
        """Add calls, and begin the first of them if no thread is about to take it."""
        with self._lock:
            self._pending += calls
            if not self._has_quick_thread():
                self._begin_next(num_threads=1)

    def spread(self) -> float | None:
        """Start more threads for calls that have waited long enough.

        Return the seconds until the next check, or None if only an outcome or another call can
        change anything.
        """
        with self._lock:
            if not self._pending or not self._has_room():
                return None
            wait_s = self._pending[0].queued_s + SPREAD_AFTER_S - now()
            if wait_s > 0:
                return wait_s
            if not self._has_quick_thread():
                # Double each time: a process that got no processor time looks slow too.
                self._begin_next(num_threads=max(1, len(self._running)))
            return SPREAD_AFTER_S

    def cancel(self, number: int) -> None:
        """Cancel a call. A call that has ended is not affected."""
        with self._lock:
            call = self._running.get(number)
            if call is None:
                return
            if call.reward.is_async:
                # On the loop itself: if it is blocked, the call must not look cancelled.
                self._call_on_loop(guarded(self._cancel_task, name="cancel"), call)
                return
            self._release(call)
            _set_async_exception(ctypes.c_ulong(call.thread), ctypes.py_object(CallCancelled))
            self._begin_next(num_threads=1)

    def take_pending(self) -> list[int]:
        """Remove all calls that have not begun, and return their numbers."""
        with self._lock:
            numbers = [call.number for call in self._pending]
            self._pending.clear()
        return numbers

    def clock_of(self, call: ScheduledCall) -> CallClock:
        """Return the clock of a call. It moves the call's beginning in the table by each wait."""
        return _ClockOfCall(call, self._lock, self._move)

    # These methods need the lock:

    def _move(self, call: ScheduledCall, began_s: float) -> None:
        if self._running.get(call.number) is call:
            self._table.set_time(call.row, began_s)

    def _has_room(self) -> bool:
        return len(self._running) < self._concurrency and bool(self._free_rows)

    def _has_quick_thread(self) -> bool:
        since_s = now() - CHEAP_S
        return any(
            call.began_s > since_s and not call.reward.is_async for call in self._running.values()
        )

    def _begin_next(self, *, num_threads: int) -> None:
        """Begin pending calls while there is room, with at most `num_threads` new threads."""
        while self._pending and self._has_room():
            is_sync = not self._pending[0].reward.is_async
            if is_sync and num_threads == 0:
                return
            call = self._begin()
            if not is_sync:
                self._call_on_loop(guarded(self._start_task, name="start"), call)
                continue
            num_threads -= 1
            try:
                begin_thread(guarded(self._work, name="reward", expected=(CallCancelled,)), (call,))
            except RuntimeError:  # no memory for another thread
                self._end(call)
                self._table.num_begun -= 1
                self._pending.appendleft(call)
                if not self._running:
                    _exit(1)  # no call will free memory; a new process can continue
                return

    def _begin(self) -> ScheduledCall:
        call = self._pending.popleft()
        call.row = self._free_rows.pop()
        call.began_s = now()
        self._running[call.number] = call
        self._table.num_begun += 1
        self._table.begin(call.row, call.number, call.began_s)
        return call

    def _end(self, call: ScheduledCall) -> None:
        self._table.end(call.row)
        self._free_rows.append(call.row)
        self._running.pop(call.number, None)

    def _release(self, call: ScheduledCall) -> None:
        call.is_cancelled = True
        del self._running[call.number]
        self._report(call.number, None)

    # These methods run in the threads of calls:

    def _work(self, call: ScheduledCall | None) -> None:
        try:
            name, kernel_id = _get_ident(), _get_native_id()
            while call is not None:
                if call.thread == 0:
                    call.thread = name
                    self._start_clock(call, kernel_id)
                with clocked(self.clock_of(call)):
                    outcome = _evaluate(call)
                self._check_process()
                call = self._next(call, outcome)
        except CallCancelled:  # it arrived after the function had returned
            return

    def _next(self, call: ScheduledCall, outcome: Outcome) -> ScheduledCall | None:
        with self._lock:
            if call.is_cancelled:
                self._end(call)
                return None
            self._report(call.number, outcome)
            if self._pending and not self._pending[0].reward.is_async:
                following = self._pending.popleft()
                self._take_over(call, following)
                return following
            self._end(call)
            self._begin_next(num_threads=0)  # async calls only
            if self._pending and self._has_room():
                return self._begin()
        return None

    def _start_clock(self, call: ScheduledCall, thread: int) -> None:
        """Start the limit of a call, in its own thread or on the loop."""
        call.began_s = now()
        self._table.set_time(call.row, call.began_s)
        self._table.set_thread(call.row, thread)

    def _take_over(self, call: ScheduledCall, following: ScheduledCall) -> None:
        """Let a call take the place of one that has ended."""
        del self._running[call.number]
        following.row, following.thread = call.row, call.thread
        following.began_s = now()
        self._running[following.number] = following
        self._table.num_begun += 1
        self._table.follow(following.row, following.number, following.began_s)

    def _check_process(self) -> None:
        """End this process if it is a fork that a call made, or if a descriptor is broken.

        A descriptor is broken if a call has closed or replaced it.
        """
        if _getpid() != self._pid:
            _exit(0)
        for fd, file in self._own_files.items():
            if _file_of(fd) != file:
                end_process(OSError(f"descriptor {fd} was closed or replaced by a reward function"))

    # These methods run on the event loop:

    def _run_loop(self) -> None:
        self._table.loop_thread = threading.get_native_id()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _start_task(self, call: ScheduledCall) -> None:
        self._start_clock(call, self._table.loop_thread)
        steps = _Steps(_evaluate_async(call), call.number, self._table, self._check_process)
        with clocked(self.clock_of(call)):
            call.task = self._loop.create_task(steps)
        ended = guarded(lambda task: self._task_ended(call, task), name="end of a reward")
        call.task.add_done_callback(ended)

    def _task_ended(self, call: ScheduledCall, task: asyncio.Task[Outcome]) -> None:
        if task.cancelled():
            outcome: Outcome = failure_from(call.reward.name, asyncio.CancelledError("by itself"))
        else:
            outcome = task.result()
        with self._lock:
            self._end(call)
            if not call.is_cancelled:
                self._report(call.number, outcome)
            self._begin_next(num_threads=1)

    def _cancel_task(self, call: ScheduledCall) -> None:
        with self._lock:
            if call.is_cancelled or call.number not in self._running:
                return
            self._release(call)
            if call.task is not None:
                call.task.cancel()
            self._begin_next(num_threads=1)


class _ClockOfCall:
    """Clock of a call that does not count its waits."""

    def __init__(
        self,
        call: ScheduledCall,
        lock: threading.Lock,
        move: Callable[[ScheduledCall, float], None],
    ) -> None:
        self._call = call
        self._lock = lock
        self._move = move
        self._num_pauses = 0
        self._began_s = call.began_s
        self._elapsed_s = 0.0

    def pause(self) -> None:
        with self._lock:
            if not self._num_pauses:
                self._elapsed_s = now() - self._began_s
                self._move(self._call, math.inf)
            self._num_pauses += 1

    def resume(self) -> None:
        with self._lock:
            self._num_pauses -= 1
            if not self._num_pauses:
                self._began_s = now() - self._elapsed_s
                self._move(self._call, self._began_s)


def _file_of(fd: int) -> tuple[int, int] | None:
    """Return device and inode of the open file of a descriptor, or None if it is closed."""
    try:
        found = _fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _evaluate(call: ScheduledCall) -> Outcome:
    try:
        returned = call.reward.function(call.rollouts.rollout(call.place))
        return components_of(call.reward, returned)
    # Any exception of a user's function, including SystemExit, is the outcome of its rollout.
    except BaseException as error:  # noqa: BLE001
        return failure_from(call.reward.name, error)


async def _evaluate_async(call: ScheduledCall) -> Outcome:
    try:
        returned: Any = call.reward.function(call.rollouts.rollout(call.place))
        return components_of(call.reward, await returned)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - as for sync functions
        return failure_from(call.reward.name, error)


class _Steps(Coroutine[Any, Any, Outcome]):
    """The same coroutine, which marks in the table which of its steps runs.

    So a step that blocks the event loop can be identified.
    """

    def __init__(
        self,
        inner: Coroutine[Any, Any, Outcome],
        number: int,
        table: RunningCalls,
        check_process: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._number = number
        self._table = table
        self._check_process = check_process

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Outcome]:
        return self._inner.__await__()

    def _step(self, advance: Callable[..., Any], *args: Any) -> Any:
        self._table.step = self._number
        try:
            return advance(*args)
        finally:
            self._check_process()
            self._table.step = 0
