"""The store's data plane on Ray: a shard on each node, and a client in each process that uses it.

StoreClient.put ──► this node's arena (no call while the lease has room) ──► BlockRef
StoreClient.get ◄── views of this node's arena, or one `fetch` per other node
StoreShards     ──► the controller's side: starts shards, hands freed rows back, notices deaths
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

# For the process that writes rows on another node to start.
PUT_START_S = 60.0

T = TypeVar("T")
Cells = Mapping[str, Sequence[ColumnRef]]  # by column
Calls = dict[str, Any]  # shard -> reference to the answer of a call
Steps = Generator[Calls, list[Any], T]


class ShardLost(RowsLost):
    """The shard that has the bytes is dead; the rows are lost."""


@dataclass(frozen=True, kw_only=True)
class ShardAddress:
    name: str  # of the actor, and in BlockRefs
    node_id: str
    path: str  # of the arena's memory, on that node


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """What a process needs to use the store. Shards that come later are found by their names."""

    shards: tuple[ShardAddress, ...]
    timeout_s: float  # of each call, and of each wait for room


class StoreShard(Heartbeat):
    """Owns one arena. An asynchronous actor; StoreShards starts it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = asyncio.Lock()
        self._returned = AsyncCondition()

    async def start(self, capacity_bytes: int) -> ShardAddress:
        """Take the memory; nothing else may be called before. Raises OSError where it is short."""
        self._arena = Arena(self._name, capacity_bytes)
        return await self.address()

    async def address(self) -> ShardAddress:
        return ShardAddress(
            name=self._arena.shard,
            node_id=ray.get_runtime_context().get_node_id(),
            path=self._arena.path,
        )

    async def lease(
        self, writer: str, num_bytes: int, seals: list[tuple[int, int]], timeout_s: float
    ) -> Lease:
        """Waits until there is room; first come, first served. TimeoutError says what fills it."""
        await self.seal(seals)
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while (lease_or_none := self._arena.lease(writer, num_bytes)) is None:
                    await self._returned.next()
                return lease_or_none
        except TimeoutError:
            raise TimeoutError(
                f"{writer} waited {timeout_s:g} s for {num_bytes} bytes of the store "
                f"({self._arena.shard}): {self._arena.describe()}. The stages that read are slower "
                "than those that write, or are stuck; else raise the store's capacity "
                "(cluster.store_gib)."
            ) from None

    async def spare_lease(
        self, writer: str, num_bytes: int, seals: list[tuple[int, int]]
    ) -> Lease | None:
        """A lease ahead of need; None if there is no room, or somebody else waits for it."""
        await self.seal(seals)
        return None if self._turn.locked() else self._arena.lease(writer, num_bytes)

    async def seal(self, seals: list[tuple[int, int]]) -> None:
        for lease, num_rows in seals:
            self._arena.seal(lease, num_rows)
        self._returned.notify()

    async def free(self, rows: dict[int, int]) -> None:
        self._arena.free(rows)
        self._returned.notify()

    async def reclaim(self, writer: str, live_rows: dict[int, int]) -> None:
        self._arena.reclaim(writer, live_rows)
        self._returned.notify()

    async def fetch(self, cells: dict[str, list[ColumnRef]]) -> Bytes:
        """The cells' bytes, for a reader on another node."""
        leases = {block.lease for of_column in cells.values() for block, _ in of_column}
        freed = sorted(lease for lease in leases if not self._arena.holds(lease))
        if freed:
            raise LookupError(
                f"rows of {self._arena.shard} were read after they had been freed (leases "
                f"{freed}); release rows only when their bytes have been read."
            )
        return pack_cells(self._arena.buffer, cells)

    async def bytes_leased(self) -> int:
        return self._arena.bytes_leased

    async def close(self) -> None:
        self._arena.close()


class StoreClient:
    """Writes and reads columns, in one thread or one event loop.

    Arrays that `get` returns are read-only views of shared memory: they are valid until the rows
    are released. Raises TimeoutError when a shard does not answer or has no room for
    `address.timeout_s`, ShardLost when it is dead.
    """

    def __init__(self, address: StoreAddress, *, writer: str | None = None) -> None:
        context = ray.get_runtime_context()
        self._writer = writer or context.get_actor_id() or f"process-{uuid.uuid4().hex}"
        self._timeout_s = address.timeout_s
        self._node_id = context.get_node_id()
        self._handles: dict[str, Any] = {}
        self._arenas: dict[str, Bytes | None] = {}  # by shard; None: on another node
        self._blocks: BlockWriter | None = None
        # The answer to a call for the lease after this one, so that no put waits for it.
        self._spare: Any = None
        self._home = self._home_path = ""
        for shard in address.shards:
            with contextlib.suppress(ShardLost):  # whoever asks for its rows is told
                self._learn(shard)
        here = [shard for shard in address.shards if self._arenas.get(shard.name) is not None]
        if here:  # several writers of a node spread over its shards
            home = here[zlib.crc32(self._writer.encode()) % len(here)]
            self._home, self._home_path = home.name, home.path
            self._blocks = BlockWriter(map_arena(home.path, home.name))

    def put(self, columns: Columns) -> BlockRef:
        """Write rows: per column, one one-dimensional array per row. Blocks while there is no room.

        Raises ValueError for columns that do not fit together (see layout_of).
        """
        return self._run(self._put(columns))

    async def put_async(self, columns: Columns) -> BlockRef:
        return await self._run_async(self._put(columns))

    def get(self, cells: Sequence[ColumnRef], columns: Sequence[str]) -> dict[str, list[Array]]:
        """Columns that were written together: per column, one array per cell."""
        return self._run(self._get(dict.fromkeys(columns, cells)))

    async def get_async(
        self, cells: Sequence[ColumnRef], columns: Sequence[str]
    ) -> dict[str, list[Array]]:
        return await self._run_async(self._get(dict.fromkeys(columns, cells)))

    def get_batch(self, cells: Cells) -> dict[str, list[Array]]:
        """Columns of any writers, such as RowBatch.cells; one transfer per other node."""
        return self._run(self._get(cells))

    async def get_batch_async(self, cells: Cells) -> dict[str, list[Array]]:
        return await self._run_async(self._get(cells))

    def close(self) -> None:
        """Give the lease back; nothing can be put any more."""
        self._run(self._close())

    async def close_async(self) -> None:
        await self._run_async(self._close())

    # What each call does is a generator that yields remote calls and is sent their answers, so that
    # waiting in a thread and in an event loop share it.

    def _put(self, columns: Columns) -> Steps[BlockRef]:
        if self._blocks is None:
            raise ShardLost(
                f"node {self._node_id} has no shard of the store to write to: it died, or none was "
                "started there."
            )
        if not has_owner(self._home_path, self._home):  # its memory stays, as long as it is mapped
            raise ShardLost(f"shard {self._home} of the store died")
        layout = layout_of(columns)
        home = self._handle(self._home)
        while (block := self._blocks.write(layout, columns)) is None:
            if self._spare is not None:
                call, self._spare = self._spare, None
            else:
                self._blocks.seal()
                seals = self._blocks.take_seals()
                call = home.lease.remote(self._writer, layout.num_bytes, seals, self._timeout_s)
            [lease] = yield {self._home: call}
            if lease is not None:
                self._blocks.start(lease)
        if self._spare is None and self._blocks.is_half_full:
            seals = self._blocks.take_seals()
            self._spare = home.spare_lease.remote(self._writer, layout.num_bytes, seals)
        return block

    def _get(self, wanted: Cells) -> Steps[dict[str, list[Array]]]:
        lists = {id(cells): cells for cells in wanted.values()}.values()
        shards = {block.shard for cells in lists for block, _ in cells}
        unknown = shards - self._arenas.keys()
        if unknown:
            for address in (yield {s: self._handle(s).address.remote() for s in unknown}):
                self._learn(address)
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
            if self._spare is not None:
                [lease] = yield {self._home: self._spare}
                if lease is not None:
                    self._blocks.start(lease)
            self._blocks.seal()
            seals = self._blocks.take_seals()
            self._blocks = self._spare = None
            if seals:
                yield {self._home: self._handle(self._home).seal.remote(seals)}

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
                except RayTaskError:  # the shard's own error, which may be a TimeoutError too
                    raise
                except (TimeoutError, RayActorError) as error:
                    raise self._failure(calls, error) from None
                calls = steps.send(answers)
        except StopIteration as stop:
            result: T = stop.value
            return result

    @property
    def _limit_s(self) -> float:
        # A shard's own limit comes first, because its message says more.
        return self._timeout_s + 5.0

    def _failure(self, calls: Calls, error: Exception) -> Exception:
        if isinstance(error, RayActorError):
            return ShardLost(f"a shard of the store died ({', '.join(calls)}): {error}")
        return TimeoutError(
            f"shards {list(calls)} of the store did not answer within {self._limit_s:g} s; their "
            "processes hang, or cluster.call_timeout_s is too short."
        )

    def _learn(self, shard: ShardAddress) -> None:
        """Raises ShardLost if it is a dead one of this node."""
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
            except ValueError:  # Ray's word for an actor that is dead
                raise ShardLost(f"shard {shard} of the store died") from None
        return self._handles[shard]


async def put_on_node(
    node_id: str, rows: Sequence[Columns], address: StoreAddress
) -> Sequence[BlockRef]:
    """Write rows into the shard of any node, each as a block. ShardLost if the node has died."""
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
    """By shard, the cells that lie there, in their order."""
    if len(shards) == 1:
        return dict.fromkeys(shards, wanted)
    return {
        shard: {name: [c for c in cells if c[0].shard == shard] for name, cells in wanted.items()}
        for shard in shards
    }


def _merge(wanted: Cells, arrays: Mapping[str, dict[str, list[Array]]]) -> dict[str, list[Array]]:
    """Inverse of _split, on what the cells hold."""
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    turns = {
        (shard, name): iter(of_column)
        for shard, by_column in arrays.items()
        for name, of_column in by_column.items()
    }
    return {
        name: [next(turns[block.shard, name]) for block, _ in cells]
        for name, cells in wanted.items()
    }
