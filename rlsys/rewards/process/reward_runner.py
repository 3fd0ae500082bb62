"""Runs reward functions over rollouts, whatever they do.

In: rollouts. Out, for each: a RewardResult or a RewardFailure.

    submit ──► main process ──► outcomes
                  │  ├─ a call past its limit: given up; a process that does not answer then: killed
                  │  └─ it dies: a call that had begun without an outcome is a suspect, all others
                  │     go to the next process
                  └──► suspects, one at a time in a process of its own ──► outcomes

No user code runs here, so nothing that it does can hold up this event loop. What is late is found
in time_limits.py. When a process dies, or is killed without a culprit, each call that had begun in
it and has no outcome is tried again alone. A call fails as a "crash" if a new process dies while it
runs alone there. A call that finds no memory is tried again alone as well, since another may have
taken all of it.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from rlsys.rewards.outcome import (
    FailureKind,
    Outcome,
    RewardFailure,
    RewardResult,
    timeout_failure,
)
from rlsys.rewards.process.call_batch import RewardBatch, RewardCall, TellResult
from rlsys.rewards.process.partial_results import PartialResults
from rlsys.rewards.process.reward_messages import pack_rollouts
from rlsys.rewards.process.reward_pickle import PackedRewards
from rlsys.rewards.process.reward_process import Death, ProcessEnded, RewardProcess, Told
from rlsys.rewards.process.time_limits import TimeLimits, Watched
from rlsys.types import Rollout

# Of a process that could not be started; the functions were loaded before, so this may pass.
HIRE_ERRORS = (ProcessEnded, ValueError, OSError, subprocess.SubprocessError)

# Processes in a row that end before any call has: then what waits for one has failed.
MAX_FRUITLESS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # before another is started


class RewardRunner:
    """Scores batches, several at a time if asked to.

    concurrency: calls that run at a time, in the order in which they came.
    timeout_s: limit of one function on one rollout, in wall-clock time, where it has no own.
    memory_gib: for the functions and all that they start.
    start_timeout_s: for the functions to be loaded.
    """

    def __init__(
        self,
        packed: PackedRewards,
        *,
        concurrency: int,
        timeout_s: float,
        memory_gib: float,
        start_timeout_s: float,
    ) -> None:
        self._packed = packed
        self._concurrency = concurrency
        self._memory_gib = memory_gib
        self._start_timeout_s = start_timeout_s
        self._limits_s = [
            timeout_s if one.timeout_s is None else one.timeout_s for one in packed.rewards
        ]
        self._num_calls = 0
        self._open: dict[int, RewardCall] = {}
        self._main: RewardProcess | None = None  # None while it is being replaced
        self._alone: RewardProcess | None = None
        self._processes: dict[RewardProcess, Watched] = {}  # those that are ending too
        self._waiting: list[RewardCall] = []  # for the main process
        self._suspects: deque[RewardCall] = deque()
        self._tried_alone: RewardCall | None = None
        self._alone_ended = asyncio.Event()
        self._num_fruitless = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._suspect_came = asyncio.Event()
        self._error: BaseException | None = None
        self._limits = TimeLimits(
            self._open,
            self._processes,
            min_limit_s=min(self._limits_s),
            time_out=self._time_out,
            kill=self._kill,
            replace=self._replace,
            look_at_leaving=self._end_if_idle,
        )

    async def start(self) -> None:
        """Raises ValueError for functions that cannot be loaded, TimeoutError or ProcessEnded."""
        self._main = await self._hire(self._concurrency)
        self._do(self._limits.watch())
        self._do(self._run_suspects())

    async def close(self) -> None:
        """Nothing of any process is left afterwards."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._processes))

    def submit(
        self,
        rollouts: Sequence[Rollout],
        *,
        tell: TellResult,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`tell` is called later, with each rollout's place and result; `fail`, once, instead of
        what has not been told, with an error that is a bug here."""
        batch = RewardBatch(self._packed.rewards, rollouts, tell=tell, fail=fail)
        if self._error is not None:
            fail(self._error)
            return
        calls: list[RewardCall] = []
        for place in range(len(rollouts)):
            for reward, limit_s in enumerate(self._limits_s):
                self._num_calls += 1
                calls.append(
                    RewardCall(
                        number=self._num_calls,
                        reward=reward,
                        place=place,
                        batch=batch,
                        limit_s=limit_s,
                    )
                )
        self._open |= {call.number: call for call in calls}
        self._limits.call_came()
        self._send(calls)

    async def score(self, rollouts: Sequence[Rollout]) -> list[RewardResult | RewardFailure]:
        """All results, in the order of the rollouts."""
        parts = PartialResults[RewardResult | RewardFailure](len(rollouts))
        self.submit(rollouts, tell=parts.tell, fail=parts.fail)
        await parts.complete()
        results = await parts.take(at_most_s=0, gather_s=0)
        return [results[place] for place in range(len(rollouts))]

    # Processes

    async def _hire(self, concurrency: int, *, is_alone: bool = False) -> RewardProcess:
        process = RewardProcess(
            self._packed,
            concurrency=concurrency,
            memory_gib=self._memory_gib,
            on_outcomes=self._take_outcomes,
            on_handed_back=self._take_back,
            on_death=self._bury,
        )
        await process.start(self._start_timeout_s)
        assert process.serving is not None
        process.serving.add_done_callback(self._check)
        self._processes[process] = Watched(is_alone=is_alone)
        return process

    async def _replace_main(self) -> None:
        """Another main process, for what waits and what comes; the one before, if it lives, ends
        what runs in it."""
        while True:
            try:
                successor = await self._hire(self._concurrency)
                break
            except HIRE_ERRORS as error:
                self._count_fruitless(str(error))
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._num_fruitless))
        before, self._main = self._main, successor
        if before is not None:
            before.hand_back()
            self._processes[before].is_leaving = True
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def _count_fruitless(self, reason: str) -> None:
        self._num_fruitless += 1
        if self._num_fruitless >= MAX_FRUITLESS:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                self._decide(call, self._crash(call, "crash", f"{reason}, before it began"))

    def _bury(self, process: RewardProcess, death: Death) -> None:
        watched = self._processes.pop(process)
        left = [call for call in self._open.values() if call.process is process]
        if watched.is_alone:
            self._end_alone(process, watched, death, left)
            return
        suspects = (
            [] if watched.culprit_found else [call for call in left if call.turn <= death.num_begun]
        )
        self._suspect(suspects)
        innocents = [call for call in left if call not in suspects]
        if process is not self._main:
            self._send(innocents)
            return
        self._main = None
        self._waiting += innocents
        if not (suspects or watched.culprit_found or watched.has_told):
            self._count_fruitless(death.reason)
        if not watched.is_being_replaced:
            self._do(self._replace_main())

    def _end_alone(
        self, process: RewardProcess, watched: Watched, death: Death, left: Sequence[RewardCall]
    ) -> None:
        """Fail the call that ran in the process, or try it again if another ran there before."""
        if process is self._alone:
            self._alone = None
        for call in left:
            if watched.has_told:  # the earlier call may be what broke the process
                call.process = None
                self._suspects.appendleft(call)
                self._alone_ended.set()
            else:
                self._decide(call, self._crash(call, death.kind, f"{death.reason}, alone with it"))

    def _kill(self, process: RewardProcess, reason: str) -> None:
        self._processes[process].is_ending = True
        if process is self._alone:
            self._alone = None
        process.kill(reason)

    # Calls

    def _send(self, calls: Sequence[RewardCall]) -> None:
        """To the main process, or to those that wait for it."""
        if self._main is None:
            self._waiting += calls
            return
        for batch in dict.fromkeys(call.batch for call in calls):  # in their order
            self._run(self._main, batch, [call for call in calls if call.batch is batch])

    def _run(self, process: RewardProcess, batch: RewardBatch, calls: Sequence[RewardCall]) -> None:
        places = sorted({call.place for call in calls})
        packed = pack_rollouts([batch.rollouts[place] for place in places])
        moved = {place: i for i, place in enumerate(places)}
        for turn, call in enumerate(calls, process.num_sent + 1):
            call.process, call.turn, call.asked_s = process, turn, None
        process.run(packed, [(call.number, call.reward, moved[call.place]) for call in calls])

    def _take_outcomes(self, process: RewardProcess, told: Iterable[tuple[int, Told]]) -> None:
        watched = self._processes.get(process)
        for number, outcome in told:
            call = self._open.get(number)
            if call is None or call.process is not process or watched is None:
                continue
            if outcome is None:
                watched.given_up.add(number)
                self._time_out(call)
                continue
            watched.has_told, watched.idle_since_s = True, None
            self._num_fruitless = 0
            if isinstance(outcome, dict):
                if self._name(call) not in outcome:
                    raise ValueError(f"no outcome: {outcome}")
                self._decide(call, outcome)
            elif outcome[0] == "memory" and not watched.is_alone:
                self._suspect([call])  # another may have taken all of it
            else:
                kind, message = outcome
                self._decide(
                    call, RewardFailure(kind=kind, reward=self._name(call), message=message)
                )
        if watched is not None and watched.is_leaving:
            self._end_if_idle(process)

    def _take_back(self, numbers: Sequence[int]) -> None:
        self._send([self._open[number] for number in numbers if number in self._open])

    def _decide(self, call: RewardCall, outcome: Outcome) -> None:
        del self._open[call.number]
        call.batch.ended(call.place, call.reward, outcome)
        if call is self._tried_alone:
            self._tried_alone = None
            self._alone_ended.set()

    def _time_out(self, call: RewardCall) -> None:
        reward = self._packed.rewards[call.reward]
        self._decide(call, timeout_failure(reward, call.limit_s))

    def _crash(self, call: RewardCall, kind: FailureKind, reason: str) -> RewardFailure:
        name = self._name(call)
        message = f"{name} gave no value: the process {reason}."
        return RewardFailure(kind=kind, reward=name, message=message)

    def _name(self, call: RewardCall) -> str:
        return self._packed.rewards[call.reward].name

    def _suspect(self, calls: Sequence[RewardCall]) -> None:
        for call in calls:
            call.process = None
        self._suspects += calls
        self._suspect_came.set()

    async def _run_suspects(self) -> None:
        """Each alone, in a process that lives as long as it does well and there are more."""
        while True:
            await self._suspect_came.wait()
            self._suspect_came.clear()
            while self._suspects:
                call = self._suspects.popleft()
                try:
                    if self._alone is None:
                        self._alone = await self._hire(1, is_alone=True)
                except HIRE_ERRORS as error:
                    self._decide(call, self._crash(call, "crash", str(error)))
                    continue
                alone = self._alone
                self._tried_alone = call
                self._alone_ended.clear()
                self._run(alone, call.batch, [call])
                await self._alone_ended.wait()
                if self._alone is alone and self._processes[alone].given_up:
                    self._kill(alone, "is no longer needed")
            if self._alone is not None:
                self._kill(self._alone, "is no longer needed")

    def _end_if_idle(self, process: RewardProcess) -> None:
        if not any(call.process is process for call in self._open.values()):
            self._kill(process, "is no longer needed")

    def _replace(self, process: RewardProcess) -> None:
        if process is self._main and not self._processes[process].is_being_replaced:
            self._processes[process].is_being_replaced = True
            self._do(self._replace_main())

    # This object's own tasks

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._check)

    def _check(self, task: asyncio.Task[None]) -> None:
        """A bug in a task here is an error of every batch, instead of a wait without end."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._error = error
        for batch in {call.batch for call in self._open.values()}:
            batch.fail(error)
        self._open.clear()
