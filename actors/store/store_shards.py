"""The store's shards as the controller sees them: started, handed freed rows, noticed when dead."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from collections import Counter
from collections.abc import Callable, Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.common.async_condition import AsyncCondition
from rlsys.dataflow.store.tensor_memory import FreedRows

from ..cluster.calls import HEARTBEAT_GROUP, Worker, WorkerDied, end_all
from .store_actor import ShardAddress, StoreAddress, StoreShard


class StoreShards:
    """All shards, as the controller sees them.

    `run` must be running: it hands freed rows back, in one call at a time per shard, and calls
    `on_lost` with the address of a shard that died. Other failures are raised from it.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        timeout_s: float,
        heartbeat_timeout_s: float,
        on_lost: Callable[[ShardAddress], None],
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._timeout_s = timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._on_lost = on_lost
        self._adding = asyncio.Lock()
        self._run_name = f"store-{uuid.uuid4().hex[:8]}"
        self._num_started = 0
        self._shards: dict[str, _Shard] = {}
        self._added = AsyncCondition()

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(
            shards=tuple(shard.address for shard in self._shards.values()),
            timeout_s=self._timeout_s,
        )

    async def add(self, node_id: str) -> ShardAddress:
        """Start a shard on a node; another in its place if it dies meanwhile. Raises OSError if the
        node has not got the memory, WorkerDied with the shard's name if the second dies too.
        """
        with contextlib.suppress(WorkerDied):
            return await self._start(node_id)
        return await self._start(node_id)

    async def _start(self, node_id: str) -> ShardAddress:
        name = f"{self._run_name}-{self._num_started}"
        self._num_started += 1
        handle = (
            ray.remote(concurrency_groups=HEARTBEAT_GROUP)(StoreShard)
            .options(
                name=name,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(name)
        )
        worker = Worker(
            name,
            handle,
            timeout_s=self._timeout_s,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
        try:
            address: ShardAddress = await worker.call("start", self._capacity_bytes)
        except BaseException:
            worker.kill()
            raise
        self._shards[name] = _Shard(worker, address)
        self._added.notify()
        return address

    async def ensure(self, node_id: str) -> None:
        """Start a shard on a node that has none. Raises WorkerError as `add` does."""
        async with self._adding:
            if node_id not in (shard.address.node_id for shard in self._shards.values()):
                await self.add(node_id)

    def free(self, freed: FreedRows) -> None:
        """For StreamStore(on_free=...): remember, and send soon."""
        for name, rows in freed.items():
            if name in self._shards:
                self._shards[name].free(rows)

    async def reclaim(self, writer: str, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """A writer died: take its leases back, less the rows that are still needed
        (StreamStore.live_rows). `writer` is the id of its actor.
        """
        for name, shard in list(self._shards.items()):
            with contextlib.suppress(WorkerDied):  # with the same node; `run` tells of it
                await shard.reclaim(writer, functools.partial(live_rows, name))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            kept: set[str] = set()
            while True:
                for name, shard in self._shards.items():
                    if name not in kept:
                        kept.add(name)
                        tasks.create_task(self._keep(shard), name=name)
                await self._added.next()

    async def close(self) -> None:
        """Remove all arenas and end the shards."""
        shards, self._shards = self._shards, {}  # their deaths are no losses from now on
        await end_all(shard.worker for shard in shards.values())

    async def _keep(self, shard: _Shard) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(shard.send_freed())
                tasks.create_task(shard.worker.watch())
        except* WorkerDied:
            name = shard.worker.name
            if self._shards.pop(name, None):
                self._on_lost(shard.address)


class _Shard:
    """One shard, and what it is to be told."""

    def __init__(self, worker: Worker, address: ShardAddress) -> None:
        self.worker = worker
        self.address = address
        self._freed: Counter[int] = Counter()
        self._changed = AsyncCondition()
        # One call at a time: a reclaim must not overtake what was freed before it.
        self._turn = asyncio.Lock()

    def free(self, rows: Mapping[int, int]) -> None:
        self._freed.update(rows)
        self._changed.notify()

    async def send_freed(self) -> None:
        while True:
            await self._changed.until(lambda: bool(self._freed))
            async with self._turn:
                await self._send(self._take_freed())

    async def reclaim(self, writer: str, live_rows: Callable[[], Mapping[int, int]]) -> None:
        async with self._turn:
            # In one instant: what is freed later is not live any more, and will be told later.
            freed, live = self._take_freed(), dict(live_rows())
            await self._send(freed)
            await self.worker.call("reclaim", writer, live)

    def _take_freed(self) -> Mapping[int, int]:
        freed, self._freed = self._freed, Counter()
        return freed

    async def _send(self, freed: Mapping[int, int]) -> None:
        if freed:
            await self.worker.call("free", dict(freed))
