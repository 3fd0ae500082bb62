"""Runner of reward functions that may hang, crash or break their process.

In: rollouts. Out, for each: a RewardResult or a RewardFailure.

    submit ──► main process ──► outcomes
                  │  ├─ a call past its limit: cancelled; a process that does not answer: killed
                  │  └─ it dies: begun calls without an outcome are retried alone, all others go to
                  │     the next process
                  └──► retried calls, one at a time in another process ──► outcomes

No user code runs in this process, so it cannot block this event loop. time_limits.py finds late
calls. When a process dies, or is killed and the blocking call is unknown, each call that had begun
in it without an outcome is retried alone. A call fails as a "crash" if a new process dies while the
call runs alone there. A call that finds no memory is also retried alone, because another one may
have taken all of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from rlsys.common.local_process import START_ERRORS
from rlsys.common.supervision import REWARD_PROCESSES, Decision, Supervisor
from rlsys.rewards.outcome import (
    FailureKind,
    Outcome,
    RewardFailure,
    RewardResult,
    timeout_failure,
)
from rlsys.rewards.process.call_batch import OnResult, RewardBatch, RewardCall
from rlsys.rewards.process.partial_results import PartialResults
from rlsys.rewards.process.reward_messages import pack_rollouts
from rlsys.rewards.process.reward_pickle import PackedRewards
from rlsys.rewards.process.reward_process import Death, RewardProcess, WireOutcome
from rlsys.rewards.process.time_limits import TimeLimits, Watched
from rlsys.types import Rollout


class RewardRunner:
    """Runner of reward functions in separate processes.

    Several batches may be scored at the same time. Call `start` first and `close` at the end.

    Args:
        packed: The reward functions.
        concurrency: Maximum number of calls that run at a time, in the order of arrival.
        timeout_s: Limit of one function on one rollout in seconds, if it has no own limit.
        memory_gib: Memory limit of the functions and their child processes.
        start_timeout_s: Time limit for loading the functions.
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
        self._processes: dict[RewardProcess, Watched] = {}  # including those that are ending
        self._waiting: list[RewardCall] = []  # for the main process
        self._to_retry: deque[RewardCall] = deque()
        self._call_alone: RewardCall | None = None
        self._alone_ended = asyncio.Event()
        self._supervisor = Supervisor[int](REWARD_PROCESSES)  # of the main process and all calls
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_added = asyncio.Event()
        self._error: BaseException | None = None
        self._limits = TimeLimits(
            self._open,
            self._processes,
            min_limit_s=min(self._limits_s),
            time_out=self._time_out,
            kill=self._kill,
            replace=self._replace,
            check_draining=self._end_if_idle,
        )

    async def start(self) -> None:
        """Start the main process and load the functions.

        Raises:
            InvalidValue: The functions cannot be loaded.
            TimeoutError: They were not loaded in time.
            ProcessEnded: The process ended before they were loaded.
        """
        self._main = await self._start_process(self._concurrency)
        self._start_task(self._limits.watch())
        self._start_task(self._run_retries())

    async def close(self) -> None:
        """End all processes, and wait until nothing of them is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.close() for process in self._processes))

    def submit(
        self,
        rollouts: Sequence[Rollout],
        *,
        on_result: OnResult,
        fail: Callable[[BaseException], None],
    ) -> None:
        """Score rollouts and return at once.

        Args:
            rollouts: The rollouts to score.
            on_result: Gets the place and the result of each rollout later.
            fail: Gets the error of a bug in this module, which replaces the missing results.
        """
        batch = RewardBatch(self._packed.rewards, rollouts, on_result=on_result, fail=fail)
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
        self._limits.call_added()
        self._send(calls)

    async def score(self, rollouts: Sequence[Rollout]) -> list[RewardResult | RewardFailure]:
        """Return the results in the order of the rollouts.

        Args:
            rollouts: The rollouts to score.
        """
        parts = PartialResults[RewardResult | RewardFailure](len(rollouts))
        self.submit(rollouts, on_result=parts.add, fail=parts.fail)
        await parts.complete()
        results = await parts.take(at_most_s=0, gather_s=0)
        return [results[place] for place in range(len(rollouts))]

    # Processes

    async def _start_process(self, concurrency: int, *, is_alone: bool = False) -> RewardProcess:
        process = RewardProcess(
            self._packed,
            concurrency=concurrency,
            memory_gib=self._memory_gib,
            on_outcomes=self._take_outcomes,
            on_returned=self._take_returned,
            on_death=self._process_ended,
        )
        await process.start(self._start_timeout_s)
        assert process.serving is not None
        process.serving.add_done_callback(self._fail_all)
        self._processes[process] = Watched(is_alone=is_alone)
        return process

    async def _replace_main(self) -> None:
        """Start a new main process for waiting and new calls.

        The previous one, if it lives, finishes its running calls.
        """
        while True:
            await asyncio.sleep(self._supervisor.pause_s())
            try:
                successor = await self._start_process(self._concurrency)
                break
            except START_ERRORS as error:  # the functions were loaded before
                self._act(self._supervisor.died(str(error)))
        before, self._main = self._main, successor
        if before is not None:
            before.return_pending()
            self._processes[before].is_draining = True
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def _act(self, decision: Decision[int]) -> None:
        """Isolate calls, and fail the waiting calls if the main process has died too often."""
        self._retry_alone([self._open[number] for number in decision.isolate])
        if decision.gives_up:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                reason = f"{decision.gives_up}, before it began"
                self._decide(call, self._crash(call, "crash", reason))

    def _process_ended(self, process: RewardProcess, death: Death) -> None:
        watched = self._processes.pop(process)
        left = [call for call in self._open.values() if call.process is process]
        if watched.is_alone:
            self._end_alone(process, watched, death, left)
            return
        is_main = process is self._main
        if is_main:
            self._main = None
        num_begun = 0 if watched.blocking_call_known else death.num_begun
        self._send([call for call in left if call.position > num_begun])
        begun = [call.number for call in left if call.position <= num_begun]
        if begun or (is_main and not watched.blocking_call_known):
            self._act(self._supervisor.died(f"the process {death.reason}", begun))
        if is_main and not watched.is_being_replaced:
            self._start_task(self._replace_main())

    def _end_alone(
        self, process: RewardProcess, watched: Watched, death: Death, left: Sequence[RewardCall]
    ) -> None:
        """Fail the call that ran in the process, or retry it if another ran there before."""
        if process is self._alone:
            self._alone = None
        for call in left:
            if watched.has_answered:  # an earlier call may have broken the process
                call.process = None
                self._to_retry.appendleft(call)
                self._alone_ended.set()
            else:
                self._fail_alone(call, death.kind, f"the process {death.reason}, alone with it")

    def _fail_alone(self, call: RewardCall, kind: FailureKind, reason: str) -> None:
        """Fail a call whose process died while it ran alone there, or did not start."""
        decision = self._supervisor.died(reason, [call.number], is_alone=True)
        for number, why in decision.drop.items():
            self._decide(self._open[number], self._crash(call, kind, why))

    def _kill(self, process: RewardProcess, reason: str) -> None:
        self._processes[process].is_ending = True
        if process is self._alone:
            self._alone = None
        process.kill(reason)

    # Calls

    def _send(self, calls: Sequence[RewardCall]) -> None:
        """Send calls to the main process, or let them wait for it."""
        if self._main is None:
            self._waiting += calls
            return
        for batch in dict.fromkeys(call.batch for call in calls):  # in order
            self._run(self._main, batch, [call for call in calls if call.batch is batch])

    def _run(self, process: RewardProcess, batch: RewardBatch, calls: Sequence[RewardCall]) -> None:
        places = sorted({call.place for call in calls})
        packed = pack_rollouts([batch.rollouts[place] for place in places])
        moved = {place: i for i, place in enumerate(places)}
        for position, call in enumerate(calls, process.num_sent + 1):
            call.process, call.position, call.cancel_sent_s = process, position, None
        process.run(packed, [(call.number, call.reward, moved[call.place]) for call in calls])

    def _take_outcomes(
        self, process: RewardProcess, outcomes: Iterable[tuple[int, WireOutcome]]
    ) -> None:
        watched = self._processes.get(process)
        for number, outcome in outcomes:
            call = self._open.get(number)
            if call is None or call.process is not process or watched is None:
                continue
            if outcome is None:
                watched.cancelled.add(number)
                self._time_out(call)
                continue
            watched.has_answered, watched.idle_since_s = True, None
            if isinstance(outcome, dict):
                if self._name(call) not in outcome:
                    raise ValueError(f"not an outcome: {outcome}")
                self._decide(call, outcome)
            elif outcome[0] == "memory" and not watched.is_alone:
                self._retry_alone([call])  # another may have taken all of it
            else:
                kind, message = outcome
                self._decide(
                    call, RewardFailure(kind=kind, reward=self._name(call), message=message)
                )
        if watched is None:
            return
        if watched.has_answered and process is self._main:
            self._supervisor.progressed()
        if watched.is_draining:
            self._end_if_idle(process)

    def _take_returned(self, numbers: Sequence[int]) -> None:
        self._send([self._open[number] for number in numbers if number in self._open])

    def _decide(self, call: RewardCall, outcome: Outcome) -> None:
        del self._open[call.number]
        call.batch.ended(call.place, call.reward, outcome)
        if call is self._call_alone:
            self._supervisor.ended([call.number])
            self._call_alone = None
            self._alone_ended.set()

    def _time_out(self, call: RewardCall) -> None:
        reward = self._packed.rewards[call.reward]
        self._decide(call, timeout_failure(reward, call.limit_s))

    def _crash(self, call: RewardCall, kind: FailureKind, reason: str) -> RewardFailure:
        name = self._name(call)
        message = f"{name} gave no value: {reason}."
        return RewardFailure(kind=kind, reward=name, message=message)

    def _name(self, call: RewardCall) -> str:
        return self._packed.rewards[call.reward].name

    def _retry_alone(self, calls: Sequence[RewardCall]) -> None:
        for call in calls:
            call.process = None
        self._to_retry += calls
        self._retry_added.set()

    async def _run_retries(self) -> None:
        """Run calls one at a time, in a process that lives until one fails or none is left."""
        while True:
            await self._retry_added.wait()
            self._retry_added.clear()
            while self._to_retry:
                call = self._to_retry.popleft()
                try:
                    if self._alone is None:
                        self._alone = await self._start_process(1, is_alone=True)
                except START_ERRORS as error:
                    self._fail_alone(call, "crash", str(error))
                    continue
                alone = self._alone
                self._call_alone = call
                self._alone_ended.clear()
                self._run(alone, call.batch, [call])
                await self._alone_ended.wait()
                if self._alone is alone and self._processes[alone].cancelled:
                    self._kill(alone, "is no longer needed")
            if self._alone is not None:
                self._kill(self._alone, "is no longer needed")

    def _end_if_idle(self, process: RewardProcess) -> None:
        if not any(call.process is process for call in self._open.values()):
            self._kill(process, "is no longer needed")

    def _replace(self, process: RewardProcess) -> None:
        if process is self._main and not self._processes[process].is_being_replaced:
            self._processes[process].is_being_replaced = True
            self._start_task(self._replace_main())

    # Tasks of this object

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._fail_all)

    def _fail_all(self, task: asyncio.Task[None]) -> None:
        """Fail all batches if a bug ended a task, so that no caller waits forever."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._error = error
        for batch in {call.batch for call in self._open.values()}:
            batch.fail(error)
        self._open.clear()
