"""Finds reward calls past their limit, and the processes that they hold up.

In: the open calls, and the processes, whose tables tell what runs since when. Out: what to do.

- A call past its limit is given up by its process, which says so: a time-out. Its thread may live
  on; a process with such threads is replaced after some seconds.
- A process that runs none of its calls and answers none for some time is broken: it is killed.
- A process that does not answer is held up by one of its calls: one that keeps the interpreter lock
  or blocks the event loop. That call may run up to its own limit; then the process is killed. The
  others are innocent if the culprit is known.
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

# A process that does not give up a call in this time hangs as a whole, or the machine is so busy
# that what runs in it is tried again.
ANSWER_GRACE_S = 1.0

# How often a call that waits for a place is looked at: its limit may run again at any time.
WAITING_LOOK_S = 0.25

# A process with calls runs or answers one within this time, unless it is broken. Busy machines need
# much less.
IDLE_TIMEOUT_S = 30.0

# A process holds threads that were given up no longer than this, and no more than these.
STUCK_TIMEOUT_S = 10.0
MAX_STUCK_BEFORE_REPLACED = MAX_STUCK // 2


@dataclass(kw_only=True, eq=False)
class Watched:
    """What is known of a process."""

    is_alone: bool = False  # it runs one suspect after another
    has_told: bool = False  # an outcome
    idle_since_s: float | None = None  # when it was first seen to run none of its calls
    given_up: set[int] = field(default_factory=set)  # calls whose threads may live on
    stuck_since_s: float | None = None  # when such threads were first seen
    is_being_replaced: bool = False
    is_leaving: bool = False  # takes no more calls, ends when those that run have ended
    is_ending: bool = False
    culprit_found: bool = False  # it was killed because of one call; the others are innocent


class TimeLimits:
    """`calls` and `processes` are the runner's own, and change while this looks at them.

    min_limit_s: no call has a shorter one.
    time_out, kill, replace: what a call or a process has come to.
    look_at_leaving: called now and then with a process that is to end when it is idle.
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
        look_at_leaving: Callable[[RewardProcess], None],
    ) -> None:
        self._calls = calls
        self._processes = processes
        self._min_limit_s = min_limit_s
        self._time_out = time_out
        self._kill = kill
        self._replace = replace
        self._look_at_leaving = look_at_leaving
        self._call_came = asyncio.Event()

    def call_came(self) -> None:
        self._call_came.set()

    async def watch(self) -> None:
        while True:
            self._call_came.clear()
            if not self._calls and not any(w.given_up for w in self._processes.values()):
                await self._call_came.wait()
            # A call that begins now, or a process that is idle from now on, is not late before.
            next_s = time.monotonic() + min(self._min_limit_s, IDLE_TIMEOUT_S)
            for process in list(self._processes):
                if not self._processes[process].is_ending:
                    next_s = min(next_s, await self._look(process))
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _look(self, process: RewardProcess) -> float:
        """Act on what is late in a process; when to look again."""
        watched = self._processes[process]
        running = process.running()
        now_s, next_s = time.monotonic(), math.inf
        unanswered: list[RewardCall] = []
        is_idle = True
        for run in running:
            call = self._calls.get(run.number)
            if call is None or call.process is not process:
                continue
            if run.thread == 0:  # it has not started; its limit does not run
                deadline_s = run.began_s + max(call.limit_s, IDLE_TIMEOUT_S)
                if now_s >= deadline_s:
                    self._kill(process, "was ended, since it did not start a call")
                    return math.inf
                next_s = min(next_s, deadline_s)
                continue
            is_idle = False
            if run.began_s == math.inf:  # it waits for a place; its limit does not run
                next_s = min(next_s, now_s + WAITING_LOOK_S)
                continue
            if not run.began_s <= now_s:
                self._kill(process, "was ended, since its table of calls was overwritten")
                return math.inf
            deadline_s = run.began_s + call.limit_s
            if now_s >= deadline_s and call.asked_s is None:
                process.give_up(run.number)
                call.asked_s = now_s
            if call.asked_s is not None:
                deadline_s = call.asked_s + ANSWER_GRACE_S
            if now_s >= deadline_s:
                unanswered.append(call)
            else:
                next_s = min(next_s, deadline_s)
        next_s = min(next_s, self._look_at_idle(process, is_idle, now_s))
        watched.given_up &= {run.number for run in running}
        if watched.given_up:
            next_s = min(next_s, self._look_at_stuck(process, now_s))
        else:
            watched.stuck_since_s = None
        if unanswered:
            next_s = min(next_s, await self._unblock(process, running, unanswered))
        elif watched.is_leaving:
            self._look_at_leaving(process)
        return next_s

    def _look_at_idle(self, process: RewardProcess, is_idle: bool, now_s: float) -> float:
        """Kill a process that neither runs nor answers the calls it has; when to look again."""
        watched = self._processes[process]
        if not any(call.process is process for call in self._calls.values()):
            watched.idle_since_s = None
            return math.inf
        if not is_idle:
            watched.idle_since_s = None
        elif watched.idle_since_s is None:
            watched.idle_since_s = now_s
        elif now_s >= watched.idle_since_s + IDLE_TIMEOUT_S:
            reason = f"was ended, since it answered no call for {IDLE_TIMEOUT_S:g} s while none ran"
            self._kill(process, reason)
            return math.inf
        return (watched.idle_since_s or now_s) + IDLE_TIMEOUT_S

    def _look_at_stuck(self, process: RewardProcess, now_s: float) -> float:
        watched = self._processes[process]
        if watched.stuck_since_s is None:
            watched.stuck_since_s = now_s
        replace_s = watched.stuck_since_s + STUCK_TIMEOUT_S
        if now_s >= replace_s or len(watched.given_up) >= MAX_STUCK_BEFORE_REPLACED:
            self._replace(process)
            return math.inf
        return replace_s

    async def _unblock(
        self, process: RewardProcess, running: Sequence[Running], unanswered: Sequence[RewardCall]
    ) -> float:
        """A process does not answer: kill it, unless the call that blocks it still has time."""
        number = await process.culprit(running)
        now_s = time.monotonic()
        if process not in self._processes:  # it has died
            return now_s
        if not any(call.number in self._calls and call.process is process for call in unanswered):
            return now_s  # it answers after all
        culprit = None if number is None else self._calls.get(number)
        if culprit is not None:
            began_s = next(run.began_s for run in running if run.number == number)
            deadline_s = began_s + culprit.limit_s
            if now_s < deadline_s:
                for call in unanswered:
                    call.asked_s = deadline_s - ANSWER_GRACE_S
                return deadline_s
            self._time_out(culprit)
        self._processes[process].culprit_found = number is not None
        self._kill(process, "was ended, since it did not answer")
        return math.inf
