"""The loop of a stage whose batches are computed elsewhere, several at a time: rewards, and frozen
models.
"""

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
    at_once: int,
) -> None:
    """Consumes rollouts that the stage can read. Waits until fewer than `at_once` batches are under
    way, and for a rollout; takes all there are, and does not wait for what becomes of them.

    `begin` is called as soon as a batch is taken: what it returns runs later, and groups may have
    been dropped by then.
    """
    async with asyncio.TaskGroup() as calls:
        slots = asyncio.Semaphore(at_once)
        while True:
            with state.waiting(stage, "workers"):
                await slots.acquire()
            with state.waiting(stage, "rollouts"):
                batch = await rollouts.take(timeout_s=None)
            call = calls.create_task(begin(batch))
            call.add_done_callback(lambda _: slots.release())
