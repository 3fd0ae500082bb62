"""The store's shards as the controller sees them: started, handed freed rows, noticed when dead."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.dataflow.memory import FreedRows
from rlsys.dataflow.signal import Signal

from .calls import Worker, WorkerDied, WorkerError
from .store import WATCH_S, ShardAddress, StoreAddress, StoreShard


class StoreShards:
    """All shards, as the controller sees them.

    `run` must be running: it hands freed rows back, in one call at a time per shard, and calls
    `on_lost` with the address of a shard that died. Other failures are raised from it.
    """

    def __init__(
        self, *, capacity_bytes: int, timeout_s: float, on_lost: Callable[[ShardAddress], None]
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._run_name = f"store-{uuid.uuid4().hex[:8]}"
        self._num_started = 0
        self._shards: dict[str, _Shard] = {}
        self._added = Signal()

    @property
    def address(self) -> StoreAddress:
        return StoreAddress(
            shards=tuple(shard.address for shard in self._shards.values()),
            timeout_s=self._timeout_s,
        )

    async def add(self, node_id: str) -> ShardAddress:
        """Start a shard on a node. Raises WorkerError if the node has not got the memory."""
        name = f"{self._run_name}-{self._num_started}"
        self._num_started += 1
        handle = (
            ray.remote(StoreShard)
            .options(
                name=name,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(name, self._capacity_bytes)
        )
        worker = Worker(name, handle, timeout_s=self._timeout_s)
        address: ShardAddress = await worker.call("address")
        self._shards[name] = _Shard(worker, address, timeout_s=self._timeout_s)
        self._added.notify()
        return address

    def free(self, freed: FreedRows) -> None:
        """For StreamStore(on_free=...): remember, and send soon."""
        for name, rows in freed.items():
            if name in self._shards:
                self._shards[name].free(rows)

    async def reclaim(self, writer: str, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """A writer died: take its leases back, less the rows that are still needed
        (StreamStore.live_rows). `writer` is the id of its actor."""
        for name, shard in list(self._shards.items()):
            with contextlib.suppress(WorkerDied):  # with the same node; `run` tells of it
                await shard.reclaim(writer, live_rows(name))

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
        for shard in shards.values():
            with contextlib.suppress(WorkerError):  # it is gone already, or will be killed
                await shard.worker.call("close")
            shard.worker.kill()

    async def _keep(self, shard: _Shard) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(shard.send_freed())
                tasks.create_task(shard.watch())
        except* WorkerDied:
            name = shard.worker.name
            if self._shards.pop(name, None):
                self._on_lost(shard.address)


class _Shard:
    """One shard, and what it is to be told."""

    def __init__(self, worker: Worker, address: ShardAddress, *, timeout_s: float) -> None:
        self.worker = worker
        self.address = address
        self._timeout_s = timeout_s
        self._freed: Counter[int] = Counter()
        self._changed = Signal()
        # One call at a time: a reclaim must not overtake what was freed before it.
        self._turn = asyncio.Lock()

    def free(self, rows: Mapping[int, int]) -> None:
        self._freed.update(rows)
        self._changed.notify()

    async def send_freed(self) -> None:
        while True:
            await self._changed.until(lambda: bool(self._freed))
            async with self._turn:
                await self._send()

    async def reclaim(self, writer: str, live_rows: Mapping[int, int]) -> None:
        async with self._turn:
            await self._send()
            await self.worker.call("reclaim", writer, dict(live_rows))

    async def watch(self) -> None:
        while True:
            await self.worker.call("watch", WATCH_S, timeout_s=WATCH_S + self._timeout_s)

    async def _send(self) -> None:
        freed, self._freed = self._freed, Counter()
        if freed:
            await self.worker.call("free", dict(freed))
