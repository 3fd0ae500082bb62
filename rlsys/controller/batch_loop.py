"""The loop of a stage whose batches workers compute, several at a time (rewards, frozen models)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rlsys.controller.state import RunState
from rlsys.dataflow.store.stream_store import RowBatch, Subscription


async def each_batch(
    state: RunState,
    stage: str,
    rollouts: Subscription,
    begin: Callable[[RowBatch], Coroutine[Any, Any, None]],
    *,
    max_batches: int,
) -> None:
    """Consume rollouts that the stage can read, in concurrent batches.

    The loop waits until fewer than `max_batches` batches are running and a rollout is ready. It
    then takes all ready rollouts and starts their batch without waiting for it. `begin` is called
    as soon as the batch is taken. The coroutine that it returns runs later, when groups may have
    been dropped.
    """
    async with asyncio.TaskGroup() as calls:
        slots = asyncio.Semaphore(max_batches)
        while True:
            with state.waiting(stage, "workers"):
                await slots.acquire()
            with state.waiting(stage, "rollouts"):
                batch = await rollouts.take(timeout_s=None)
            call = calls.create_task(begin(batch))
            call.add_done_callback(lambda _: slots.release())
