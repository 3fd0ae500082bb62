"""Plain functions in threads, each call within its time limit.

In: the calls of one batch. Out: an outcome in each.

    calls ──► [ pending ] ──► lane: one thread, call after call
                 │  │
                 │  └───────► more lanes, once the batch proves slow
                 └──────────► a new lane for each that hangs in a call past its limit

One thread does a cheap batch, for a thread a call would cost more than the call. A thread cannot be
killed: a lane that hangs is given up, and whatever it returns later is ignored.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rlsys.rewards.outcome import Call, Outcome, components_of, failure_from, timeout_failure

# A batch that still runs after this time gets more lanes. The built-in verifiers take microseconds
# a rollout; a function that takes longer mostly waits, and waiting is done better side by side.
SPREAD_AFTER_S = 0.02


@dataclass(kw_only=True, eq=False)
class _Lane:
    call: Call  # the current one
    started_s: float  # when that began
    given_up: bool = False
    ended: bool = False

    @property
    def deadline_s(self) -> float:
        return self.started_s + self.call.limit_s


class PlainCalls:
    """One batch. The lock covers what lanes and event loop share."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._pending = deque(calls)
        self._num_open = len(calls)
        self._min_limit_s = min(call.limit_s for call in calls)
        self._lanes: list[_Lane] = []
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._all_done = asyncio.Event()

    @property
    def num_running(self) -> int:
        return sum(not lane.ended for lane in self._lanes)

    @property
    def num_stuck(self) -> int:
        """Lanes past their limit that still have not returned."""
        now = time.monotonic()
        return sum(not lane.ended and lane.deadline_s <= now for lane in self._lanes)

    async def run(self, slots: asyncio.Semaphore) -> None:
        """Returns when every call has its outcome. Each lane takes one of `slots`."""
        num_slots = 0
        try:
            await slots.acquire()
            num_slots += 1
            self._start_lane()
            spread_at_s = time.monotonic() + SPREAD_AFTER_S
            while not await self._done_by(min(self._next_check_s(), spread_at_s)):
                self._give_up_overdue()
                if time.monotonic() < spread_at_s:
                    continue
                spread_at_s = math.inf
                while self._pending and not slots.locked():
                    await slots.acquire()
                    num_slots += 1
                    self._start_lane()
        finally:
            self._close()
            for _ in range(num_slots):
                slots.release()

    async def _done_by(self, time_s: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, time_s - time.monotonic())):
                await self._all_done.wait()
        except TimeoutError:
            return False
        return True

    def _next_check_s(self) -> float:
        """No call can be overdue before: neither one that runs, nor one that is yet to begin."""
        with self._lock:
            running = [lane for lane in self._lanes if not (lane.given_up or lane.ended)]
            deadlines = [lane.deadline_s for lane in running]
        return min([*deadlines, time.monotonic() + self._min_limit_s])

    def _give_up_overdue(self) -> None:
        with self._lock:
            now = time.monotonic()
            overdue = [
                lane
                for lane in self._lanes
                if not (lane.given_up or lane.ended) and lane.deadline_s <= now
            ]
            for lane in overdue:
                lane.given_up = True
                self._finish(lane.call, timeout_failure(lane.call))
        for _ in overdue:
            self._start_lane()

    def _start_lane(self) -> None:
        with self._lock:
            if not self._pending:
                return
            lane = _Lane(call=self._pending.popleft(), started_s=time.monotonic())
            self._lanes.append(lane)
        # A daemon, so that a function that hangs does not keep the process from ending.
        threading.Thread(target=self._work, args=(lane,), name="reward", daemon=True).start()

    def _work(self, lane: _Lane) -> None:
        while not lane.ended:
            outcome = _evaluate(lane.call)
            with self._lock:
                if not lane.given_up:
                    self._finish(lane.call, outcome)
                if lane.given_up or not self._pending:
                    lane.ended = True
                else:
                    lane.call, lane.started_s = self._pending.popleft(), time.monotonic()

    def _finish(self, call: Call, outcome: Outcome) -> None:
        call.outcome = outcome
        self._num_open -= 1
        if self._num_open == 0:
            self._loop.call_soon_threadsafe(self._all_done.set)

    def _close(self) -> None:
        """Begin no more calls; where the batch was cancelled, ignore those that run."""
        with self._lock:
            self._pending.clear()
            for lane in self._lanes:
                lane.given_up = True


def _evaluate(call: Call) -> Outcome:
    try:
        return components_of(call.reward, call.reward.function(call.rollout))
    # Whatever a user's function raises, SystemExit included, is the outcome of its rollout: a lane
    # that died of it would leave its batch waiting for ever.
    except BaseException as error:  # noqa: BLE001
        return failure_from(call.reward, error)
