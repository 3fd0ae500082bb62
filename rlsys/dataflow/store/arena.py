"""Shared memory of a node: one file, leased in pieces to writers and mapped by all processes.

    Arena (owner) ──lease──► BlockWriter.write(columns) ──► BlockRef ──► read_column (any process)
       ▲                        │ seal: number of rows in the lease          │
       └────────────────────────┴──────────── free: number of unneeded rows ─┘

A writer fills its lease without messages, so a write costs only the copy. A lease returns to the
arena when it is sealed and all its rows are freed. So a reader must read a row before it releases
it. The owner reserves and touches all pages at the start: missing memory is an error then, not a
killed process later.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlsys.dataflow.store.blocks import BlockLayout, BlockRef, Bytes, Columns, write_block
from rlsys.errors import require
from rlsys.reallocation.transport.shared_memory import (
    SharedMemory,
    is_there,
    map_shared,
    open_shared,
)

PAGE_BYTES = mmap.PAGESIZE

# Size of a lease: large enough that requests for leases cost nothing. At most a fraction of the
# arena, because a long-lived row keeps its whole lease.
MAX_LEASE_BYTES = 4 << 20
MIN_LEASES = 64


class Lease(NamedTuple):
    """A piece of an arena that one writer may fill."""

    shard: str
    lease: int  # unique number
    offset: int  # bytes
    num_bytes: int


@dataclass(kw_only=True)
class _LeaseState:
    writer: str
    offset: int
    num_bytes: int
    num_freed: int = 0
    num_rows: int | None = None  # written in total; None until the lease is sealed


class Arena:
    """The owner's side: leases and free pieces. For one thread.

    `shard` is a unique name. Raises OSError if the node does not have the memory.
    """

    def __init__(self, shard: str, capacity_bytes: int) -> None:
        require(
            capacity_bytes >= PAGE_BYTES,
            "capacity_bytes",
            capacity_bytes,
            rule="an arena has at least one page",
            fix=f"Use at least {PAGE_BYTES}.",
        )
        self.shard = shard
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self._memory = SharedMemory(
            _name(shard), self.capacity_bytes, purpose="the store (cluster.store_gib)"
        )
        self.buffer = self._memory.map(mmap.MAP_POPULATE)
        self._leases: dict[int, _LeaseState] = {}
        self._num_leased = 0
        self._gaps = [(0, self.capacity_bytes)]  # unleased (offset, bytes), in order, not touching

    @property
    def path(self) -> str:
        """Path for `map_arena` in other processes of this node."""
        return self._memory.path

    @property
    def bytes_leased(self) -> int:
        """Number of bytes in leases."""
        return sum(state.num_bytes for state in self._leases.values())

    def lease(self, writer: str, num_bytes: int) -> Lease | None:
        """Lease a piece of at least this size to a writer; return None if none is free now.

        Raises:
            InvalidValue: The size exceeds the arena.
        """
        require(
            num_bytes <= self.capacity_bytes,
            "bytes of a block",
            num_bytes,
            rule=f"the store has {self.capacity_bytes} bytes on this node ({self.shard})",
            fix="Raise cluster.store_gib, or write fewer rows at a time.",
        )
        usual = max(num_bytes, min(MAX_LEASE_BYTES, self.capacity_bytes // MIN_LEASES))
        offset = self._take_gap(size := _whole_pages(usual))
        if offset is None:
            offset = self._take_gap(size := _whole_pages(num_bytes))
        if offset is None:
            return None
        self._num_leased += 1
        self._leases[self._num_leased] = _LeaseState(writer=writer, offset=offset, num_bytes=size)
        return Lease(self.shard, self._num_leased, offset, size)

    def seal(self, lease: int, num_rows: int) -> None:
        """Record that a lease is complete, with `num_rows` rows."""
        state = self._leases[lease]
        assert state.num_rows is None, f"lease {lease} of {self.shard} is sealed twice"
        state.num_rows = num_rows
        self._return_if_unused(lease)

    def free(self, rows: Mapping[int, int]) -> None:
        """Free rows: the number of newly unneeded rows, by lease."""
        for lease, num_rows in rows.items():
            self._leases[lease].num_freed += num_rows
            self._return_if_unused(lease)

    def reclaim(self, writer: str, live_rows: Mapping[int, int]) -> None:
        """Take back the leases of a dead writer, except for the live rows, by lease.

        Rows that it wrote without reporting them are freed too.
        """
        for lease, state in list(self._leases.items()):
            if state.writer == writer:
                state.num_rows = state.num_freed + live_rows.get(lease, 0)
                self._return_if_unused(lease)

    def holds(self, lease: int) -> bool:
        """Return whether a lease has not returned yet."""
        return lease in self._leases

    def describe(self) -> str:
        """Return one line about the leases and their rows."""
        states = self._leases.values()
        sealed = [state for state in states if state.num_rows is not None]
        rows = sum((state.num_rows or 0) - state.num_freed for state in sealed)
        return (
            f"{self.bytes_leased} of {self.capacity_bytes} bytes are leased in {len(states)} "
            f"pieces: {len(sealed)} complete ones with {rows} rows in use, and "
            f"{len(states) - len(sealed)} in use by "
            f"{len({state.writer for state in states if state.num_rows is None})} writers; the "
            f"largest free piece has {max((size for _, size in self._gaps), default=0)} bytes"
        )

    def close(self) -> None:
        """Unlink the memory. Existing mappings stay valid."""
        self._memory.close()

    def _take_gap(self, size: int) -> int | None:
        # First fit: the lowest pages are reused often and stay in the caches.
        for number, (offset, gap_bytes) in enumerate(self._gaps):
            if gap_bytes >= size:
                rest = [(offset + size, gap_bytes - size)] if gap_bytes > size else []
                self._gaps[number : number + 1] = rest
                return offset
        return None

    def _return_if_unused(self, lease: int) -> None:
        state = self._leases[lease]
        if state.num_rows is None or state.num_freed < state.num_rows:
            return
        assert state.num_freed == state.num_rows, f"lease {lease}: more rows freed than written"
        del self._leases[lease]
        merged: list[tuple[int, int]] = []
        for offset, size in sorted([*self._gaps, (state.offset, state.num_bytes)]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._gaps = merged


class BlockWriter:
    """A writer's side: fills its lease with one block after another.

    `start` replaces a full lease. `take_seals` returns the full leases, to report them to the
    arena.
    """

    def __init__(self, arena: Bytes) -> None:
        self._arena = arena
        self._lease: Lease | None = None
        self._used = 0  # bytes
        self._num_rows = 0
        self._seals: list[tuple[int, int]] = []

    def write(self, layout: BlockLayout, columns: Columns) -> BlockRef | None:
        """Write a block and return its place; return None if the lease has no room.

        In that case, get another lease of at least `layout.num_bytes` bytes.
        """
        num_bytes = layout.num_bytes
        if self._lease is None or self._used + num_bytes > self._lease.num_bytes:
            return None
        block = BlockRef(
            self._lease.shard, self._lease.lease, self._lease.offset + self._used, layout
        )
        write_block(self._arena, block.offset, layout, columns)
        self._used += num_bytes
        self._num_rows += layout.num_rows
        return block

    @property
    def is_half_full(self) -> bool:
        """Return whether it is time to request the next lease."""
        return self._lease is not None and 2 * self._used > self._lease.num_bytes

    def start(self, lease: Lease) -> None:
        """Seal the current lease and continue in another."""
        self.seal()
        self._lease, self._used, self._num_rows = lease, 0, 0

    def seal(self) -> None:
        """Complete the current lease."""
        if self._lease is not None:
            self._seals.append((self._lease.lease, self._num_rows))
        self._lease = None

    def take_seals(self) -> list[tuple[int, int]]:
        """Return (lease, number of rows) of each newly completed lease."""
        seals, self._seals = self._seals, []
        return seals


def map_arena(path: str, shard: str) -> Bytes:
    """Map an arena on this node and return its bytes.

    Raises:
        MemoryGone: Its owner is dead or has closed it.
    """
    descriptor = open_shared(path, _name(shard), writable=True)
    try:
        return map_shared(descriptor)
    finally:
        os.close(descriptor)


def has_owner(path: str, shard: str) -> bool:
    """Return whether the owner of an arena on this node lives; otherwise, writes are lost."""
    return is_there(path, _name(shard))


def read_only(arena: Bytes) -> Bytes:
    """Return a read-only view of the same bytes."""
    view = arena.view()
    view.flags.writeable = False
    return view


def _name(shard: str) -> str:
    return f"rlsys-{shard}"


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
