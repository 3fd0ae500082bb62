"""Inside the process of reward functions: which call runs when, and in which thread.

    calls ──► [ pending ] ──► lanes: threads, call after call ──┐
                         └──► tasks on one event loop ──────────┴─► outcomes

At most `concurrency` calls run at a time, plain and async ones together, in the order in which they
came. One lane does cheap calls, for a thread a call would cost more than the call; more lanes start
when those that wait have waited for some milliseconds behind slower ones. A call that is given up
gives its place back at once. Its thread cannot be killed: it gets an exception, which ends what
runs in Python, and is ignored from then on.

After each call the lane checks the descriptors that the process itself needs. The process ends if
the call has closed or replaced one, so the supervisor finds the call among those not answered.
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

# Calls that have waited for so long behind slower ones get lanes of their own. The built-in
# verifiers take microseconds; what takes longer mostly waits, and does so better side by side.
SPREAD_AFTER_S = 0.01

# A lane that has been in its call for less is about to take the next one.
CHEAP_S = 0.001

# Bound here, so that user code that replaces them changes nothing for us.
_exit, _fstat, _getpid = os._exit, os.fstat, os.getpid
begin_thread, _get_ident, _get_native_id = (
    _thread.start_new_thread,
    _thread.get_ident,
    threading.get_native_id,
)
_set_async_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


def now(clock: Callable[[], float] = time.monotonic) -> float:
    """Return the monotonic clock's time.

    The clock is bound as a default: libraries that freeze time replace modules' attributes too.
    """
    return clock()


class GivenUp(BaseException):
    """Raised in the thread of a call past its limit."""


@dataclass(kw_only=True, eq=False, slots=True)
class ScheduledCall:
    """One reward function on one rollout."""

    number: int
    reward: Reward
    rollouts: PackedRollouts
    place: int  # of its rollout among them
    queued_s: float
    row: int = 0  # in the table, from when it begins
    began_s: float = 0.0
    thread: int = 0  # Python's name of its lane, once that runs; 0 for async ones
    task: asyncio.Task[Outcome] | None = None
    given_up: bool = False


class CallScheduler:
    """`tell` is called with each outcome, or with None for a call that was given up; it must not
    block. Calls may outlive `concurrency` by `max_stuck`: those given up that have not returned."""

    def __init__(
        self,
        table: RunningCalls,
        tell: Callable[[int, Outcome | None], None],
        *,
        concurrency: int,
        max_stuck: int,
        channel_fd: int,
    ) -> None:
        self._table = table
        self._tell = tell
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
        with self._lock:
            self._pending += calls
            if not self._has_quick_lane():
                self._begin_next(num_lanes=1)

    def spread(self) -> float | None:
        """More lanes for calls that have waited long enough. Seconds until the next look; None if
        only an outcome or another call can change anything."""
        with self._lock:
            if not self._pending or not self._has_room():
                return None
            wait_s = self._pending[0].queued_s + SPREAD_AFTER_S - now()
            if wait_s > 0:
                return wait_s
            if not self._has_quick_lane():
                # Twice as many each time, since a process that had no processor looks slow too.
                self._begin_next(num_lanes=max(1, len(self._running)))
            return SPREAD_AFTER_S

    def give_up(self, number: int) -> None:
        """Nobody waits for the call any more; no effect on one that has ended."""
        with self._lock:
            call = self._running.get(number)
            if call is None:
                return
            if call.reward.is_async:
                # On the loop itself: one that is blocked must not look as if it had given up.
                self._call_on_loop(guarded(self._cancel, name="cancel"), call)
                return
            self._set_aside(call)
            _set_async_exception(ctypes.c_ulong(call.thread), ctypes.py_object(GivenUp))
            self._begin_next(num_lanes=1)

    def hand_back(self) -> list[int]:
        """Numbers of the calls that have not begun, and now never will."""
        with self._lock:
            numbers = [call.number for call in self._pending]
            self._pending.clear()
        return numbers

    def clock_of(self, call: ScheduledCall) -> CallClock:
        """Return the clock of a call, which moves its beginning in the table by each wait."""
        return _ClockOfCall(call, self._lock, self._move)

    # With the lock held:

    def _move(self, call: ScheduledCall, began_s: float) -> None:
        if self._running.get(call.number) is call:
            self._table.set_time(call.row, began_s)

    def _has_room(self) -> bool:
        return len(self._running) < self._concurrency and bool(self._free_rows)

    def _has_quick_lane(self) -> bool:
        since_s = now() - CHEAP_S
        return any(
            call.began_s > since_s and not call.reward.is_async for call in self._running.values()
        )

    def _begin_next(self, *, num_lanes: int) -> None:
        """Begin pending calls while there is room, plain ones in at most `num_lanes` new lanes."""
        while self._pending and self._has_room():
            is_plain = not self._pending[0].reward.is_async
            if is_plain and num_lanes == 0:
                return
            call = self._begin()
            if not is_plain:
                self._call_on_loop(guarded(self._start_task, name="start"), call)
                continue
            num_lanes -= 1
            try:
                begin_thread(guarded(self._work, name="reward", expected=(GivenUp,)), (call,))
            except RuntimeError:  # no memory for another thread
                self._end(call)
                self._table.num_begun -= 1
                self._pending.appendleft(call)
                if not self._running:
                    _exit(1)  # nothing will ever free any: a new process can go on
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

    def _set_aside(self, call: ScheduledCall) -> None:
        call.given_up = True
        del self._running[call.number]
        self._tell(call.number, None)

    # In a lane:

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
        except GivenUp:  # it came when the function had just returned
            return

    def _next(self, call: ScheduledCall, outcome: Outcome) -> ScheduledCall | None:
        with self._lock:
            if call.given_up:
                self._end(call)
                return None
            self._tell(call.number, outcome)
            if self._pending and not self._pending[0].reward.is_async:
                following = self._pending.popleft()
                self._take_over(call, following)
                return following
            self._end(call)
            self._begin_next(num_lanes=0)  # async ones; a plain one behind them waits for a lane
            if self._pending and self._has_room():
                return self._begin()
        return None

    def _start_clock(self, call: ScheduledCall, thread: int) -> None:
        """Start the limit of a call, in its own thread or on the loop."""
        call.began_s = now()
        self._table.set_time(call.row, call.began_s)
        self._table.set_thread(call.row, thread)

    def _take_over(self, call: ScheduledCall, following: ScheduledCall) -> None:
        """The following call runs in the place of one that has ended."""
        del self._running[call.number]
        following.row, following.thread = call.row, call.thread
        following.began_s = now()
        self._running[following.number] = following
        self._table.num_begun += 1
        self._table.follow(following.row, following.number, following.began_s)

    def _check_process(self) -> None:
        """End a copy of this process, which a call has forked, and end this process if a call has
        closed or replaced a descriptor that it needs."""
        if _getpid() != self._pid:
            _exit(0)
        for fd, file in self._own_files.items():
            if _file_of(fd) != file:
                end_process(OSError(f"descriptor {fd} was closed or replaced by a reward function"))

    # On the loop:

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
            if not call.given_up:
                self._tell(call.number, outcome)
            self._begin_next(num_lanes=1)

    def _cancel(self, call: ScheduledCall) -> None:
        with self._lock:
            if call.given_up or call.number not in self._running:
                return
            self._set_aside(call)
            if call.task is not None:
                call.task.cancel()
            self._begin_next(num_lanes=1)


class _ClockOfCall:
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
    """Return what identifies the open file of a descriptor; None if it is closed."""
    try:
        found = _fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _evaluate(call: ScheduledCall) -> Outcome:
    try:
        returned = call.reward.function(call.rollouts.rollout(call.place))
        return components_of(call.reward, returned)
    # Whatever a user's function raises, SystemExit included, is the outcome of its rollout.
    except BaseException as error:  # noqa: BLE001
        return failure_from(call.reward.name, error)


async def _evaluate_async(call: ScheduledCall) -> Outcome:
    try:
        returned: Any = call.reward.function(call.rollouts.rollout(call.place))
        return components_of(call.reward, await returned)
    except asyncio.CancelledError:
        raise
    # As for plain functions.
    except BaseException as error:  # noqa: BLE001
        return failure_from(call.reward.name, error)


class _Steps(Coroutine[Any, Any, Outcome]):
    """The same coroutine; the table tells while one of its steps runs. So a step that blocks the
    loop has a name."""

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
