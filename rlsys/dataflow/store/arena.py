"""A node's shared memory: one file, leased in pieces to writers, mapped by everyone.

    Arena (owner) ──lease──► BlockWriter.write(columns) ──► BlockRef ──► read_column (any process)
       ▲                        │ seal: so many rows are in this lease             │
       └────────────────────────┴────────────── free: so many rows are not needed ─┘

A writer fills its lease without asking anybody; that makes a write as cheap as the copy. A lease
returns to the arena when it is sealed and all rows in it are freed, so whoever reads a row must not
have released it. Pages are reserved and touched by the owner at the start: memory that is short is
an error then, not a killed process later, and writers meet warm pages.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlsys.config import require
from rlsys.dataflow.store.blocks import BlockLayout, BlockRef, Bytes, Columns, write_block
from rlsys.reallocation.transport.shared_memory import (
    SharedMemory,
    is_there,
    map_shared,
    open_shared,
)

PAGE_BYTES = mmap.PAGESIZE

# A writer asks for its next lease once per so many bytes: rare enough to cost nothing. A fraction
# of the arena at most, because a row that lives long keeps its whole lease from coming back.
MAX_LEASE_BYTES = 4 << 20
MIN_LEASES = 64


class Lease(NamedTuple):
    """A piece of an arena that one writer may fill."""

    shard: str
    lease: int  # never used twice
    offset: int  # bytes
    num_bytes: int


@dataclass(kw_only=True)
class _LeaseState:
    writer: str
    offset: int
    num_bytes: int
    num_freed: int = 0
    num_rows: int | None = None  # written in all; None while the writer still writes


class Arena:
    """The owner's side: which pieces are leased, and when they come back. One thread.

    `shard` is a name that no other arena has. Raises OSError if the memory is not there.
    """

    def __init__(self, shard: str, capacity_bytes: int) -> None:
        require(
            capacity_bytes >= PAGE_BYTES,
            f"an arena of {capacity_bytes} bytes is smaller than a page; use {PAGE_BYTES} or more.",
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
        """For `map_arena` in the other processes of this node."""
        return self._memory.path

    @property
    def bytes_leased(self) -> int:
        return sum(state.num_bytes for state in self._leases.values())

    def lease(self, writer: str, num_bytes: int) -> Lease | None:
        """A piece of at least this size for the writer; None if there is none just now.

        Raises ValueError for a size that the arena can never give.
        """
        require(
            num_bytes <= self.capacity_bytes,
            f"a block of {num_bytes} bytes does not fit into the store's {self.capacity_bytes} "
            f"bytes on this node ({self.shard}); raise its capacity, or put fewer rows at a time.",
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
        """The writer has written so many rows into the lease and will write no more."""
        state = self._leases[lease]
        assert state.num_rows is None, f"lease {lease} of {self.shard} is sealed twice"
        state.num_rows = num_rows
        self._return_if_unused(lease)

    def free(self, rows: Mapping[int, int]) -> None:
        """Lease -> how many more of its rows nobody needs."""
        for lease, num_rows in rows.items():
            self._leases[lease].num_freed += num_rows
            self._return_if_unused(lease)

    def reclaim(self, writer: str, live_rows: Mapping[int, int]) -> None:
        """The writer is dead. Keep what others still need of its rows, by lease, and take back the
        rest: also what it wrote and never announced.
        """
        for lease, state in list(self._leases.items()):
            if state.writer == writer:
                state.num_rows = state.num_freed + live_rows.get(lease, 0)
                self._return_if_unused(lease)

    def holds(self, lease: int) -> bool:
        return lease in self._leases

    def describe(self) -> str:
        """One line: what is leased, to how many, and why it does not come back."""
        states = self._leases.values()
        sealed = [state for state in states if state.num_rows is not None]
        rows = sum((state.num_rows or 0) - state.num_freed for state in sealed)
        return (
            f"{self.bytes_leased} of {self.capacity_bytes} bytes leased in {len(states)} pieces: "
            f"{len(sealed)} full ones with {rows} rows that are still needed, and "
            f"{len(states) - len(sealed)} being written by "
            f"{len({state.writer for state in states if state.num_rows is None})} writers; the "
            f"largest gap has {max((size for _, size in self._gaps), default=0)} bytes"
        )

    def close(self) -> None:
        """Nobody can map it any more; what others have mapped stays valid."""
        self._memory.close()

    def _take_gap(self, size: int) -> int | None:
        # First fit: the lowest pages are used again and again, and stay in the caches.
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
    """A writer's side: fills the lease it has, one block after another.

    A lease that is full is replaced by `start` and waits among `take_seals` to be reported.
    """

    def __init__(self, arena: Bytes) -> None:
        self._arena = arena
        self._lease: Lease | None = None
        self._used = 0  # bytes
        self._num_rows = 0
        self._seals: list[tuple[int, int]] = []

    def write(self, layout: BlockLayout, columns: Columns) -> BlockRef | None:
        """None if the lease has no room: get another of at least `layout.num_bytes` first."""
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
        """Time to think of the next lease."""
        return self._lease is not None and 2 * self._used > self._lease.num_bytes

    def start(self, lease: Lease) -> None:
        self.seal()
        self._lease, self._used, self._num_rows = lease, 0, 0

    def seal(self) -> None:
        """Write no more into the lease."""
        if self._lease is not None:
            self._seals.append((self._lease.lease, self._num_rows))
        self._lease = None

    def take_seals(self) -> list[tuple[int, int]]:
        """(lease, rows in it) of each lease that was filled; to be told to the arena."""
        seals, self._seals = self._seals, []
        return seals


def map_arena(path: str, shard: str) -> Bytes:
    """The bytes of an arena on this node, shared with everyone who maps it. Raises MemoryGone if
    its owner is dead or has closed it.
    """
    descriptor = open_shared(path, _name(shard), writable=True)
    try:
        return map_shared(descriptor)
    finally:
        os.close(descriptor)


def has_owner(path: str, shard: str) -> bool:
    """Whether an arena on this node is still read by anyone: what is written to one whose owner is
    dead is lost.
    """
    return is_there(path, _name(shard))


def read_only(arena: Bytes) -> Bytes:
    """The same bytes, and views of them that cannot be written to."""
    view = arena.view()
    view.flags.writeable = False
    return view


def _name(shard: str) -> str:
    return f"rlsys-{shard}"


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
