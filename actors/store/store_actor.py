"""The store's data plane on Ray: a shard on each node, and a client in each process that uses it.

StoreClient.put ──► this node's arena (no call while the lease has room) ──► BlockRef
StoreClient.get ◄── views of this node's arena, or one `fetch` per other node
StoreShards     ──► the controller's side: starts shards, returns freed rows, notices deaths
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    RayActorError,
    RayTaskError,
    TaskUnschedulableError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.worker_protocols import RowsLost
from rlsys.dataflow.store.arena import Arena, BlockWriter, Lease, has_owner, map_arena, read_only
from rlsys.dataflow.store.blocks import (
    Array,
    BlockRef,
    Bytes,
    ColumnRef,
    Columns,
    layout_of,
    pack_cells,
    read_column,
    unpack_cells,
)
from rlsys.reallocation.transport.shared_memory import MemoryGone

from ..cluster.calls import Heartbeat
from ..cluster.gauges import STORE_BYTES, STORE_CAPACITY_BYTES, Gauges

# Start of the process that writes rows on another node.
PUT_START_S = 60.0

T = TypeVar("T")
Cells = Mapping[str, Sequence[ColumnRef]]  # by column
Calls = dict[str, Any]  # shard -> reference to the answer of a call
Steps = Generator[Calls, list[Any], T]


class ShardLost(RowsLost):
    """The shard with the bytes has died, and the rows are lost."""


@dataclass(frozen=True, kw_only=True)
class ShardAddress:
    """Address of one shard."""

    name: str  # name of the actor, used in BlockRefs
    node_id: str
    path: str  # path of the arena's memory on that node


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Address of the store. Clients find later shards by their names."""

    shards: tuple[ShardAddress, ...]
    timeout_s: float  # limit of each call, and of each wait for room


class StoreShard(Heartbeat):
    """Actor that owns one arena. It is asynchronous and started by StoreShards."""

    def __init__(self, name: str, gauges: Gauges) -> None:
        self._name = name
        self._gauges = gauges
        self._turn = asyncio.Lock()
        self._returned = AsyncCondition()

    async def start(self, capacity_bytes: int) -> ShardAddress:
        """Allocate the memory; call this first.

        Raises:
            OSError: The node is out of memory.
        """
        self._arena = Arena(self._name, capacity_bytes)
        self._gauges.set(STORE_CAPACITY_BYTES, self._arena.capacity_bytes)
        self._report_size()
        return await self.address()

    def _report_size(self) -> None:
        self._gauges.set(STORE_BYTES, self._arena.bytes_leased)

    async def address(self) -> ShardAddress:
        """Return the address of the shard."""
        return ShardAddress(
            name=self._arena.shard,
            node_id=ray.get_runtime_context().get_node_id(),
            path=self._arena.path,
        )

    async def lease(
        self, writer: str, num_bytes: int, seals: list[tuple[int, int]], timeout_s: float
    ) -> Lease:
        """Return a lease after waiting for room, in the order of the calls.

        Raises:
            TimeoutError: There was no room in time. The message shows what fills the arena.
        """
        await self.seal(seals)
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while (lease_or_none := self._arena.lease(writer, num_bytes)) is None:
                    await self._returned.next()
                self._report_size()
                return lease_or_none
        except TimeoutError:
            raise TimeoutError(
                f"{writer} waited {timeout_s:g} s for {num_bytes} bytes of the store "
                f"({self._arena.shard}): {self._arena.describe()}. The reading stages are slower "
                "than the writing stages, or blocked. Otherwise raise the store's capacity "
                "(cluster.store_gib)."
            ) from None

    async def prefetch_lease(
        self, writer: str, num_bytes: int, seals: list[tuple[int, int]]
    ) -> Lease | None:
        """Return a lease ahead of need, or None if there is no room or another writer waits."""
        await self.seal(seals)
        return None if self._turn.locked() else self._arena.lease(writer, num_bytes)

    async def seal(self, seals: list[tuple[int, int]]) -> None:
        """Mark leases as complete, with their numbers of rows."""
        for lease, num_rows in seals:
            self._arena.seal(lease, num_rows)
        self._returned.notify()

    async def free(self, rows: dict[int, int]) -> None:
        """Free rows, given as counts by lease."""
        self._arena.free(rows)
        self._report_size()
        self._returned.notify()

    async def reclaim(self, writer: str, live_rows: dict[int, int]) -> None:
        """Free the leases of a dead writer, except for live rows."""
        self._arena.reclaim(writer, live_rows)
        self._report_size()
        self._returned.notify()

    async def fetch(self, cells: dict[str, list[ColumnRef]]) -> Bytes:
        """Return the bytes of cells for a reader on another node."""
        leases = {block.lease for of_column in cells.values() for block, _ in of_column}
        freed = sorted(lease for lease in leases if not self._arena.holds(lease))
        if freed:
            raise LookupError(
                f"rows of {self._arena.shard} were read after they were freed (leases {freed}). "
                "Release rows only after their bytes have been read."
            )
        return pack_cells(self._arena.buffer, cells)

    async def bytes_leased(self) -> int:
        """Return the number of leased bytes."""
        return self._arena.bytes_leased

    async def close(self) -> None:
        """Remove the arena."""
        self._arena.close()


class StoreClient:
    """Client that writes and reads columns, in one thread or one event loop.

    Arrays that `get` returns are read-only views of shared memory. They are valid until the rows
    are released.

    Raises:
        TimeoutError: A shard did not answer or had no room for `address.timeout_s`.
        ShardLost: A shard is dead.
    """

    def __init__(self, address: StoreAddress, *, writer: str | None = None) -> None:
        context = ray.get_runtime_context()
        self._writer = writer or context.get_actor_id() or f"process-{uuid.uuid4().hex}"
        self._timeout_s = address.timeout_s
        self._node_id = context.get_node_id()
        self._handles: dict[str, Any] = {}
        self._arenas: dict[str, Bytes | None] = {}  # by shard; None: on another node
        self._blocks: BlockWriter | None = None
        # The pending call for the lease after this one, so that no put waits for it.
        self._next_lease: Any = None
        self._local_shard = self._local_path = ""
        for shard in address.shards:
            with contextlib.suppress(ShardLost):  # reading its rows raises the error
                self._register(shard)
        here = [shard for shard in address.shards if self._arenas.get(shard.name) is not None]
        if here:  # writers are spread over the shards of their node
            home = here[zlib.crc32(self._writer.encode()) % len(here)]
            self._local_shard, self._local_path = home.name, home.path
            self._blocks = BlockWriter(map_arena(home.path, home.name))

    def put(self, columns: Columns) -> BlockRef:
        """Write rows as one one-dimensional array per row and column; block while there is no room.

        Raises:
            ValueError: The columns have different numbers of rows (see layout_of).
        """
        return self._run(self._put(columns))

    async def put_async(self, columns: Columns) -> BlockRef:
        """Write rows; see `put`."""
        return await self._run_async(self._put(columns))

    def get(self, cells: Sequence[ColumnRef], columns: Sequence[str]) -> dict[str, list[Array]]:
        """Read columns that were written together: one array per cell in each column."""
        return self._run(self._get(dict.fromkeys(columns, cells)))

    async def get_async(
        self, cells: Sequence[ColumnRef], columns: Sequence[str]
    ) -> dict[str, list[Array]]:
        """Read columns; see `get`."""
        return await self._run_async(self._get(dict.fromkeys(columns, cells)))

    def get_batch(self, cells: Cells) -> dict[str, list[Array]]:
        """Read columns of any writers, such as RowBatch.cells, with one transfer per other node."""
        return self._run(self._get(cells))

    async def get_batch_async(self, cells: Cells) -> dict[str, list[Array]]:
        """Read columns; see `get_batch`."""
        return await self._run_async(self._get(cells))

    def close(self) -> None:
        """Return the lease; nothing can be written afterwards."""
        self._run(self._close())

    async def close_async(self) -> None:
        """Return the lease; see `close`."""
        await self._run_async(self._close())

    # Each operation is a generator that yields remote calls and receives their answers, so that
    # threads and event loops share it.

    def _put(self, columns: Columns) -> Steps[BlockRef]:
        if self._blocks is None:
            raise ShardLost(
                f"node {self._node_id} has no shard of the store: it died, or none was started"
            )
        # its memory stays while it is mapped
        if not has_owner(self._local_path, self._local_shard):
            raise ShardLost(f"shard {self._local_shard} of the store died")
        layout = layout_of(columns)
        shard = self._handle(self._local_shard)
        while (block := self._blocks.write(layout, columns)) is None:
            if self._next_lease is not None:
                call, self._next_lease = self._next_lease, None
            else:
                self._blocks.seal()
                seals = self._blocks.take_seals()
                call = shard.lease.remote(self._writer, layout.num_bytes, seals, self._timeout_s)
            [lease] = yield {self._local_shard: call}
            if lease is not None:
                self._blocks.start(lease)
        if self._next_lease is None and self._blocks.is_half_full:
            seals = self._blocks.take_seals()
            self._next_lease = shard.prefetch_lease.remote(self._writer, layout.num_bytes, seals)
        return block

    def _get(self, wanted: Cells) -> Steps[dict[str, list[Array]]]:
        lists = {id(cells): cells for cells in wanted.values()}.values()
        shards = {block.shard for cells in lists for block, _ in cells}
        unknown = shards - self._arenas.keys()
        if unknown:
            for address in (yield {s: self._handle(s).address.remote() for s in unknown}):
                self._register(address)
        parts = _split(wanted, shards)
        arrays: dict[str, dict[str, list[Array]]] = {}
        remote: Calls = {}
        for shard, part in parts.items():
            arena = self._arenas[shard]
            if arena is None:
                remote[shard] = self._handle(shard).fetch.remote(part)
            else:
                arrays[shard] = {n: read_column(arena, cells, n) for n, cells in part.items()}
        if remote:
            for shard, packed in zip(remote, (yield remote), strict=True):
                arrays[shard] = unpack_cells(packed, parts[shard])
        return _merge(wanted, arrays)

    def _close(self) -> Steps[None]:
        if self._blocks is not None:
            if self._next_lease is not None:
                [lease] = yield {self._local_shard: self._next_lease}
                if lease is not None:
                    self._blocks.start(lease)
            self._blocks.seal()
            seals = self._blocks.take_seals()
            self._blocks = self._next_lease = None
            if seals:
                yield {self._local_shard: self._handle(self._local_shard).seal.remote(seals)}

    def _run(self, steps: Steps[T]) -> T:
        try:
            calls = next(steps)
            while True:
                try:
                    answers = ray.get(list(calls.values()), timeout=self._limit_s)
                except (GetTimeoutError, RayActorError) as error:
                    raise self._failure(calls, error) from None
                calls = steps.send(answers)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _run_async(self, steps: Steps[T]) -> T:
        try:
            calls = next(steps)
            while True:
                try:
                    answers = await asyncio.wait_for(asyncio.gather(*calls.values()), self._limit_s)
                except RayTaskError:  # the shard's own error, which may also be a TimeoutError
                    raise
                except (TimeoutError, RayActorError) as error:
                    raise self._failure(calls, error) from None
                calls = steps.send(answers)
        except StopIteration as stop:
            result: T = stop.value
            return result

    @property
    def _limit_s(self) -> float:
        # The shard's own limit must expire first, because its message is more informative.
        return self._timeout_s + 5.0

    def _failure(self, calls: Calls, error: Exception) -> Exception:
        if isinstance(error, RayActorError):
            return ShardLost(f"a shard of the store died ({', '.join(calls)}): {error}")
        return TimeoutError(
            f"shards {list(calls)} of the store did not answer within {self._limit_s:g} s. Their "
            "processes hang, or cluster.call_timeout_s is too short."
        )

    def _register(self, shard: ShardAddress) -> None:
        """Map a shard of this node; raise ShardLost if it is dead."""
        if shard.node_id != self._node_id:
            self._arenas[shard.name] = None
            return
        try:
            self._arenas[shard.name] = read_only(map_arena(shard.path, shard.name))
        except MemoryGone as gone:
            raise ShardLost(f"shard {shard.name} of the store died ({gone})") from None

    def _handle(self, shard: str) -> Any:
        if shard not in self._handles:
            try:
                self._handles[shard] = ray.get_actor(shard)
            except ValueError:  # Ray's error for a dead actor
                raise ShardLost(f"shard {shard} of the store died") from None
        return self._handles[shard]


async def put_on_node(
    node_id: str, rows: Sequence[Columns], address: StoreAddress
) -> Sequence[BlockRef]:
    """Write rows into the shard of any node, each as a block.

    Raises:
        ShardLost: The node has died.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        client = StoreClient(address)
        blocks: Sequence[BlockRef] = [await client.put_async(columns) for columns in rows]
        await client.close_async()
        return blocks
    task = (
        ray.remote(_put_all)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(rows, address)
    )
    limit_s = PUT_START_S + len(rows) * address.timeout_s
    try:
        blocks = await asyncio.wait_for(task, limit_s)
    except (WorkerCrashedError, NodeDiedError, TaskUnschedulableError) as error:
        raise ShardLost(f"rows could not be written on node {node_id}: {error}") from None
    return blocks


def _put_all(rows: Sequence[Columns], address: StoreAddress) -> Sequence[BlockRef]:
    client = StoreClient(address)
    blocks = [client.put(columns) for columns in rows]
    client.close()
    return blocks


def _split(wanted: Cells, shards: set[str]) -> dict[str, Cells]:
    """Return the cells of each shard, in their order."""
    if len(shards) == 1:
        return dict.fromkeys(shards, wanted)
    return {
        shard: {name: [c for c in cells if c[0].shard == shard] for name, cells in wanted.items()}
        for shard in shards
    }


def _merge(wanted: Cells, arrays: Mapping[str, dict[str, list[Array]]]) -> dict[str, list[Array]]:
    """Combine the arrays of all shards in the order of the cells (inverse of _split)."""
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    columns_of = {
        (shard, name): iter(of_column)
        for shard, by_column in arrays.items()
        for name, of_column in by_column.items()
    }
    return {
        name: [next(columns_of[block.shard, name]) for block, _ in cells]
        for name, cells in wanted.items()
    }
