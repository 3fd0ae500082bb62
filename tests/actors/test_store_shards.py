"""What a shard is told of freed rows and of dead writers, in which order."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.store.store_actor import ShardAddress
from actors.store.store_shards import _Shard
from rlsys.dataflow.store.arena import PAGE_BYTES, Arena


class ArenaWorker:
    """Carries calls out on an arena, each when the test lets it."""

    name = "shard"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.may_answer = asyncio.Event()

    async def call(self, method: str, *args: Any) -> None:
        await self.may_answer.wait()
        getattr(self._arena, method)(*args)


def test_rows_freed_while_a_dead_writers_lease_is_taken_back_are_counted_once() -> None:
    """The lease has three rows. One is freed and on its way when the writer dies; another is freed
    while the first is still on its way."""

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
        await asyncio.sleep(0)  # `free` is under way
        reclaiming = asyncio.create_task(shard.reclaim("writer", lambda: dict(live)))
        await asyncio.sleep(0)
        free_one()
        worker.may_answer.set()
        await reclaiming
        assert arena.bytes_leased > 0  # a row is needed still
        free_one()
        for _ in range(5):  # turns of the loop: all that is left is done without waiting
            await asyncio.sleep(0)
        assert arena.bytes_leased == 0
        sending.cancel()
        arena.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
