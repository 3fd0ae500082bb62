"""The controller's side of the store's shards: start them, return freed rows, notice deaths."""

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
from rlsys.common.supervision import STORE_SHARDS, retried
from rlsys.dataflow.store.tensor_memory import FreedRows

from ..cluster.calls import HEARTBEAT_GROUP, Worker, WorkerDied, end_all
from ..cluster.gauges import Gauges
from .store_actor import ShardAddress, StoreAddress, StoreShard


class StoreShards:
    """All shards of the store.

    `run` must be running. It returns freed rows, in one call at a time per shard, and calls
    `on_lost` with the address of a shard that died. It raises other failures. `run` is the name of
    the run, for the gauges.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        timeout_s: float,
        heartbeat_timeout_s: float,
        on_lost: Callable[[ShardAddress], None],
        run: str = "",
    ) -> None:
        self._run = run
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
        """Return the address of the store with its current shards."""
        return StoreAddress(
            shards=tuple(shard.address for shard in self._shards.values()),
            timeout_s=self._timeout_s,
        )

    async def add(self, node_id: str) -> ShardAddress:
        """Start a shard on a node; retry once if it dies during its start.

        Raises:
            OSError: The node is out of memory.
            WorkerDied: The last attempt died too.
        """
        return await retried(lambda: self._start(node_id), STORE_SHARDS, WorkerDied)

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
            .remote(name, Gauges(self._run, f"store-{self._num_started - 1}"))
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
        """Start a shard on a node that has none, with the errors of `add`."""
        async with self._adding:
            if node_id not in (shard.address.node_id for shard in self._shards.values()):
                await self.add(node_id)

    def free(self, freed: FreedRows) -> None:
        """Return rows to their shards soon; for StreamStore(on_free=...)."""
        for name, rows in freed.items():
            if name in self._shards:
                self._shards[name].free(rows)

    async def reclaim(self, writer: str, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """Free the leases of a dead writer, except for rows that are still needed.

        `writer` is the id of its actor, `live_rows` is StreamStore.live_rows.
        """
        for name, shard in list(self._shards.items()):
            with contextlib.suppress(WorkerDied):  # it died with the same node; `run` reports it
                await shard.reclaim(writer, functools.partial(live_rows, name))

    async def run(self) -> None:
        """Send freed rows and watch the shards, forever."""
        async with asyncio.TaskGroup() as tasks:
            served: set[str] = set()
            while True:
                for name, shard in self._shards.items():
                    if name not in served:
                        served.add(name)
                        tasks.create_task(self._serve(shard), name=name)
                await self._added.next()

    async def close(self) -> None:
        """Remove all arenas and end the shards."""
        shards, self._shards = self._shards, {}  # from now on their deaths are not reported
        await end_all(shard.worker for shard in shards.values())

    async def _serve(self, shard: _Shard) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(shard.send_freed())
                tasks.create_task(shard.worker.watch())
        except* WorkerDied:
            name = shard.worker.name
            if self._shards.pop(name, None):
                self._on_lost(shard.address)


class _Shard:
    """A shard and the freed rows that have not been sent to it."""

    def __init__(self, worker: Worker, address: ShardAddress) -> None:
        self.worker = worker
        self.address = address
        self._freed: Counter[int] = Counter()
        self._changed = AsyncCondition()
        # One call at a time, because a reclaim must not overtake rows that were freed before it.
        self._lock = asyncio.Lock()

    def free(self, rows: Mapping[int, int]) -> None:
        self._freed.update(rows)
        self._changed.notify()

    async def send_freed(self) -> None:
        while True:
            await self._changed.until(lambda: bool(self._freed))
            async with self._lock:
                await self._send(self._take_freed())

    async def reclaim(self, writer: str, live_rows: Callable[[], Mapping[int, int]]) -> None:
        async with self._lock:
            # Taken together: rows that are freed later are not live, and are sent later.
            freed, live = self._take_freed(), dict(live_rows())
            await self._send(freed)
            await self.worker.call("reclaim", writer, live)

    def _take_freed(self) -> Mapping[int, int]:
        freed, self._freed = self._freed, Counter()
        return freed

    async def _send(self, freed: Mapping[int, int]) -> None:
        if freed:
            await self.worker.call("free", dict(freed))
