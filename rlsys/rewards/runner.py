"""Runs reward functions over rollouts, each within its time limit.

In: a batch of rollouts. Out, in the same order: a RewardResult or a RewardFailure for each.

Plain functions run in threads (see lanes.py), async ones on the caller's event loop. Two things are
beyond any limit here, because they stop the whole process: an async function that blocks the event
loop, and a C call that holds the interpreter lock (a regular expression that backtracks without
end, a power of huge integers). Run those in a process of their own, as math_answer.py does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlsys.rewards.lanes import PlainCalls
from rlsys.rewards.outcome import (
    Call,
    Outcome,
    RewardFailure,
    RewardResult,
    combine,
    components_of,
    failure_from,
    timeout_failure,
)
from rlsys.rewards.reward import Reward, RewardFunction, as_rewards
from rlsys.types import Rollout

# An async function past its limit is cancelled; one that has not ended after this time is stuck.
CANCEL_GRACE_S = 1.0


class RewardRunner:
    """Scores batches, several at a time if asked to, all on one event loop.

    At most `concurrency` calls run at a time. `timeout_s` limits one function on one rollout, in
    wall-clock time, where the reward has no limit of its own. Raises ValueError for rewards that
    share a name, or none at all.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | RewardFunction],
        *,
        concurrency: int = 16,
        timeout_s: float = 30.0,
    ) -> None:
        self._rewards = as_rewards(rewards)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._batches: list[PlainCalls] = []
        self._hung_tasks: set[asyncio.Task[Outcome]] = set()

    @property
    def num_stuck(self) -> int:
        """Functions past their limit that still have not returned: replace the process soon."""
        return sum(batch.num_stuck for batch in self._batches) + len(self._hung_tasks)

    async def score(self, rollouts: Sequence[Rollout]) -> list[RewardResult | RewardFailure]:
        rows = [[self._call(reward, rollout) for reward in self._rewards] for rollout in rollouts]
        calls = [call for row in rows for call in row]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_plain([call for call in calls if not call.reward.is_async]))
            for call in calls:
                if call.reward.is_async:
                    group.create_task(self._run_async(call))
        return [
            combine(self._rewards, [call.outcome for call in row if call.outcome is not None])
            for row in rows
        ]

    def _call(self, reward: Reward, rollout: Rollout) -> Call:
        limit_s = self._timeout_s if reward.timeout_s is None else reward.timeout_s
        return Call(reward=reward, rollout=rollout, limit_s=limit_s)

    async def _run_plain(self, calls: Sequence[Call]) -> None:
        if not calls:
            return
        self._batches = [batch for batch in self._batches if batch.num_running]
        batch = PlainCalls(calls)
        self._batches.append(batch)
        await batch.run(self._slots)

    async def _run_async(self, call: Call) -> None:
        async with self._slots:
            task = asyncio.create_task(_evaluate(call))
            try:
                await asyncio.wait({task}, timeout=call.limit_s)
            finally:
                is_late = task.cancel()  # False for one that has ended
            if is_late:
                call.outcome = timeout_failure(call)
                # Not awaited: a function that swallows its cancellation would hold up the batch.
                await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
                if not task.done():
                    self._hung_tasks.add(task)
                    task.add_done_callback(self._hung_tasks.discard)
            elif task.cancelled():
                call.outcome = failure_from(call.reward, asyncio.CancelledError("by itself"))
            else:
                call.outcome = task.result()


async def _evaluate(call: Call) -> Outcome:
    try:
        return components_of(call.reward, await call.reward(call.rollout))
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    # As for plain functions: SystemExit too is only the outcome of this rollout.
    except BaseException as error:  # noqa: BLE001
        return failure_from(call.reward, error)
