"""Time limits of reward calls, and of the processes that run them.

In: the open calls, and the processes with their tables of running calls. Out: time-outs, and
processes to kill or to replace.

- A process cancels a call past its limit and confirms it: a time-out. The call's thread may go on.
  A process with such threads is replaced after some seconds.
- A process that neither runs nor answers its calls for some time is broken, and is killed.
- A process that does not answer is blocked by one of its calls, which keeps the interpreter lock or
  blocks the event loop. This call may run up to its own limit. Then the process is killed. If the
  blocking call is known, the others are not at fault.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlsys.rewards.process.call_batch import RewardCall
from rlsys.rewards.process.reward_process import MAX_STUCK, RewardProcess
from rlsys.rewards.process.running_calls import Running

# A process that does not cancel a call in this time hangs as a whole, or the machine is very busy.
# Its calls are retried.
ANSWER_GRACE_S = 1.0

# Time between two checks of a call that waits for a place: its limit may start again at any time.
WAITING_CHECK_S = 0.25

# A process with calls runs or answers one within this time unless it is broken. Even busy machines
# need much less.
IDLE_TIMEOUT_S = 30.0

# Maximum time and number of threads of cancelled calls in a process.
STUCK_TIMEOUT_S = 10.0
MAX_STUCK_BEFORE_REPLACED = MAX_STUCK // 2


@dataclass(kw_only=True, eq=False)
class Watched:
    """State of a process."""

    is_alone: bool = False  # it runs one retried call after another
    has_answered: bool = False  # with an outcome
    idle_since_s: float | None = None  # when it was first seen without a running call
    cancelled: set[int] = field(default_factory=set)  # calls whose threads may go on
    stuck_since_s: float | None = None  # when such threads were first seen
    is_being_replaced: bool = False
    is_draining: bool = False  # gets no more calls, and ends after its running calls
    is_ending: bool = False
    blocking_call_known: bool = False  # killed because of one call; the others are not at fault


class TimeLimits:
    """Checker of the time limits.

    Args:
        calls: The open calls of the runner, which change during checks.
        processes: The processes of the runner, which change during checks.
        min_limit_s: The shortest limit of a call.
        time_out: Called with a call past its limit.
        kill: Called with a process to kill and the reason.
        replace: Called with a process to replace.
        check_draining: Called regularly with a process that ends when it is idle.
    """

    def __init__(
        self,
        calls: Mapping[int, RewardCall],
        processes: Mapping[RewardProcess, Watched],
        *,
        min_limit_s: float,
        time_out: Callable[[RewardCall], None],
        kill: Callable[[RewardProcess, str], None],
        replace: Callable[[RewardProcess], None],
        check_draining: Callable[[RewardProcess], None],
    ) -> None:
        self._calls = calls
        self._processes = processes
        self._min_limit_s = min_limit_s
        self._time_out = time_out
        self._kill = kill
        self._replace = replace
        self._check_draining = check_draining
        self._call_added = asyncio.Event()

    def call_added(self) -> None:
        """Wake the checker up, because there are new calls."""
        self._call_added.set()

    async def watch(self) -> None:
        """Check all processes until cancelled."""
        while True:
            self._call_added.clear()
            if not self._calls and not any(w.cancelled for w in self._processes.values()):
                await self._call_added.wait()
            # A call that begins now, or a process that gets idle now, is not late before this time.
            next_s = time.monotonic() + min(self._min_limit_s, IDLE_TIMEOUT_S)
            for process in list(self._processes):
                if not self._processes[process].is_ending:
                    next_s = min(next_s, await self._check(process))
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _check(self, process: RewardProcess) -> float:
        """Act on late calls of a process, and return the time of the next check."""
        watched = self._processes[process]
        running = process.running()
        now_s, next_s = time.monotonic(), math.inf
        unanswered: list[RewardCall] = []
        is_idle = True
        for run in running:
            call = self._calls.get(run.number)
            if call is None or call.process is not process:
                continue
            if run.thread == 0:  # it has not started, so its limit does not run
                deadline_s = run.began_s + max(call.limit_s, IDLE_TIMEOUT_S)
                if now_s >= deadline_s:
                    self._kill(process, "was ended because it did not start a call")
                    return math.inf
                next_s = min(next_s, deadline_s)
                continue
            is_idle = False
            if run.began_s == math.inf:  # it waits for a place, so its limit does not run
                next_s = min(next_s, now_s + WAITING_CHECK_S)
                continue
            if not run.began_s <= now_s:
                self._kill(process, "was ended because its table of calls was overwritten")
                return math.inf
            deadline_s = run.began_s + call.limit_s
            if now_s >= deadline_s and call.cancel_sent_s is None:
                process.cancel(run.number)
                call.cancel_sent_s = now_s
            if call.cancel_sent_s is not None:
                deadline_s = call.cancel_sent_s + ANSWER_GRACE_S
            if now_s >= deadline_s:
                unanswered.append(call)
            else:
                next_s = min(next_s, deadline_s)
        next_s = min(next_s, self._check_idle(process, is_idle, now_s))
        watched.cancelled &= {run.number for run in running}
        if watched.cancelled:
            next_s = min(next_s, self._check_stuck(process, now_s))
        else:
            watched.stuck_since_s = None
        if unanswered:
            next_s = min(next_s, await self._unblock(process, running, unanswered))
        elif watched.is_draining:
            self._check_draining(process)
        return next_s

    def _check_idle(self, process: RewardProcess, is_idle: bool, now_s: float) -> float:
        """Kill a process that neither runs nor answers its calls.

        Return the time of the next check.
        """
        watched = self._processes[process]
        if not any(call.process is process for call in self._calls.values()):
            watched.idle_since_s = None
            return math.inf
        if not is_idle:
            watched.idle_since_s = None
        elif watched.idle_since_s is None:
            watched.idle_since_s = now_s
        elif now_s >= watched.idle_since_s + IDLE_TIMEOUT_S:
            reason = f"was ended because it answered no call for {IDLE_TIMEOUT_S:g} s and ran none"
            self._kill(process, reason)
            return math.inf
        return (watched.idle_since_s or now_s) + IDLE_TIMEOUT_S

    def _check_stuck(self, process: RewardProcess, now_s: float) -> float:
        watched = self._processes[process]
        if watched.stuck_since_s is None:
            watched.stuck_since_s = now_s
        replace_s = watched.stuck_since_s + STUCK_TIMEOUT_S
        if now_s >= replace_s or len(watched.cancelled) >= MAX_STUCK_BEFORE_REPLACED:
            self._replace(process)
            return math.inf
        return replace_s

    async def _unblock(
        self, process: RewardProcess, running: Sequence[Running], unanswered: Sequence[RewardCall]
    ) -> float:
        """Kill a process that does not answer, unless the call that blocks it still has time.

        Return the time of the next check.
        """
        number = await process.blocking_call(running)
        now_s = time.monotonic()
        if process not in self._processes:  # it has died
            return now_s
        if not any(call.number in self._calls and call.process is process for call in unanswered):
            return now_s  # it has answered
        blocking = None if number is None else self._calls.get(number)
        if blocking is not None:
            began_s = next(run.began_s for run in running if run.number == number)
            deadline_s = began_s + blocking.limit_s
            if now_s < deadline_s:
                for call in unanswered:
                    call.cancel_sent_s = deadline_s - ANSWER_GRACE_S
                return deadline_s
            self._time_out(blocking)
        self._processes[process].blocking_call_known = number is not None
        self._kill(process, "was ended because it did not answer")
        return math.inf
