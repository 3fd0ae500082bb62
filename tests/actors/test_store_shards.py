"""Order in which a shard receives freed rows and dead writers."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.store.store_actor import ShardAddress
from actors.store.store_shards import _Shard
from rlsys.dataflow.store.arena import PAGE_BYTES, Arena


class ArenaWorker:
    """Worker that runs calls on an arena when the test allows it."""

    name = "shard"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.may_answer = asyncio.Event()

    async def call(self, method: str, *args: Any) -> None:
        await self.may_answer.wait()
        getattr(self._arena, method)(*args)


def test_rows_freed_during_the_reclaim_of_a_lease_are_counted_once() -> None:
    # The lease has three rows. The first is being sent as freed when the writer dies, and the
    # second is freed before that call ends.
    async def scenario() -> None:
        arena = Arena("shard", 16 * PAGE_BYTES)
        lease = arena.lease("writer", PAGE_BYTES)
        assert lease is not None
        worker = ArenaWorker(arena)
        shard = _Shard(worker, ShardAddress(name="shard", node_id="", path=""))  # type: ignore[arg-type]
        live = {lease.lease: 3}

        def free_one() -> None:
            live[lease.lease] -= 1
            shard.free({lease.lease: 1})

        sending = asyncio.create_task(shard.send_freed())
        free_one()
        await asyncio.sleep(0)  # the call of `free` is pending
        reclaiming = asyncio.create_task(shard.reclaim("writer", lambda: dict(live)))
        await asyncio.sleep(0)
        free_one()
        worker.may_answer.set()
        await reclaiming
        assert arena.bytes_leased > 0  # one row is still needed
        free_one()
        for _ in range(5):  # lets the remaining tasks run
            await asyncio.sleep(0)
        assert arena.bytes_leased == 0
        sending.cancel()
        arena.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
