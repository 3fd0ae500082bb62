"""The tensor bytes of the store: how many are reserved and live, and what goes back to the shards.

A row reserves the most it can need; once all of its tensors are written it keeps what they take.

    reserve ──► fill (per write) ──► settle (last write) ──► free ──► on_free(shard, lease, rows)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from rlsys.dataflow.blocks import BlockRef
from rlsys.dataflow.signal import Signal

# Shard -> lease -> how many rows written under that lease nobody needs any more.
FreedRows = Mapping[str, Mapping[int, int]]


class Memory:
    """bytes_live <= bytes_reserved <= max_bytes at any time."""

    def __init__(
        self, *, max_bytes: int, max_row_bytes: int, on_free: Callable[[FreedRows], None]
    ) -> None:
        self.max_bytes = max_bytes
        self.max_row_bytes = max_row_bytes
        self.bytes_live = 0
        self.bytes_reserved = 0
        self.lost_shards: set[str] = set()
        self._on_free = on_free
        self._live_rows: dict[str, Counter[int]] = {}  # shard -> lease -> rows
        self._kept: dict[str, Counter[int]] = {}  # the same, of what belongs to no row
        self._more_room = Signal()

    def has_room(self, num_rows: int) -> bool:
        return self.bytes_reserved + num_rows * self.max_row_bytes <= self.max_bytes

    async def wait_for_room(self, num_rows: int) -> None:
        await self._more_room.until(lambda: self.has_room(num_rows))

    def reserve(self, num_rows: int) -> None:
        self.bytes_reserved += num_rows * self.max_row_bytes

    def fill(self, block: BlockRef, num_rows: int, num_bytes: int) -> None:
        """Rows of a block, `num_bytes` together, were written."""
        self.bytes_live += num_bytes
        self._live_rows.setdefault(block.shard, Counter())[block.lease] += num_rows

    def settle(self, num_bytes: int) -> None:
        """A row has all of its tensors, `num_bytes`: the rest of its reservation is given back."""
        self.bytes_reserved -= self.max_row_bytes - num_bytes
        self._more_room.notify()

    def free(self, num_bytes: int, *, settled: bool) -> None:
        """A row ends that has `num_bytes`; its blocks go back with `hand_back`."""
        self.bytes_live -= num_bytes
        self.bytes_reserved -= num_bytes if settled else self.max_row_bytes
        self._more_room.notify()

    def hand_back(self, blocks: Iterable[BlockRef]) -> None:
        """Tell the shards, in one call, of rows that ended; one entry per row and block."""
        freed: dict[str, Counter[int]] = {}
        for block in blocks:
            if block.shard not in self.lost_shards:
                freed.setdefault(block.shard, Counter())[block.lease] += 1
        for shard, leases in freed.items():
            live = self._live_rows[shard]
            for lease, num_rows in leases.items():
                live[lease] -= num_rows
                if live[lease] == 0:
                    del live[lease]
        if freed:
            self._on_free(freed)

    def discard(self, block: BlockRef, num_rows: int) -> None:
        """Rows of a block that never came into the store."""
        if block.shard not in self.lost_shards:
            self._on_free({block.shard: {block.lease: num_rows}})

    def keep(self, block: BlockRef) -> None:
        """One more row of a block is needed, though it is no row of the store."""
        if block.shard not in self.lost_shards:
            self._kept.setdefault(block.shard, Counter())[block.lease] += 1

    def let_go(self, blocks: Iterable[BlockRef]) -> None:
        """One entry per row that was kept."""
        freed: dict[str, Counter[int]] = {}
        for block in blocks:
            if block.shard not in self.lost_shards:
                freed.setdefault(block.shard, Counter())[block.lease] += 1
        for shard, leases in freed.items():
            self._kept[shard].subtract(leases)
            self._kept[shard] = +self._kept[shard]
        if freed:
            self._on_free(freed)

    def lose(self, shard: str) -> None:
        self.lost_shards.add(shard)
        self._live_rows.pop(shard, None)
        self._kept.pop(shard, None)

    def live_rows(self, shard: str) -> dict[int, int]:
        """Lease -> rows that are still needed."""
        in_rows = self._live_rows.get(shard, Counter[int]())
        return dict(in_rows + self._kept.get(shard, Counter[int]()))
