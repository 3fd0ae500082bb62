"""The budget of the store's tensor bytes: reserved and live ones, by node and shard.

    place ──► fill (per write) ──► settle (last write) ──► free ──► on_free(shard, lease, rows)

A row is placed on the node where it will be sampled, and reserves its maximum size there. Once all
of its tensors are written, it keeps only the bytes that they take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from rlsys.common.async_condition import AsyncCondition
from rlsys.dataflow.store.blocks import BlockRef

# Shard -> lease -> number of its rows that are not needed any more.
FreedRows = Mapping[str, Mapping[int, int]]


class NodeBudget:
    """The budget of one node."""

    __slots__ = ("bytes_live", "bytes_reserved", "is_open", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes_live = 0
        self.bytes_reserved = 0
        self.is_open = True


class Memory:
    """The budgets of all nodes: bytes_live <= bytes_reserved <= max_bytes on each at any time."""

    def __init__(
        self, *, max_bytes: int, max_row_bytes: int, on_free: Callable[[FreedRows], None]
    ) -> None:
        self.max_bytes = max_bytes  # of each node
        self.max_row_bytes = max_row_bytes
        self.lost_shards: set[str] = set()
        self.more_room = AsyncCondition()
        self._nodes: dict[str, NodeBudget] = {}
        self._on_free = on_free
        self._live_rows: dict[str, Counter[int]] = {}  # shard -> lease -> rows
        self._kept: dict[str, Counter[int]] = {}  # the same, for bytes without a row of the store

    @property
    def nodes(self) -> list[NodeBudget]:
        """Nodes on which rows may be placed, and nodes that still have rows."""
        return list(self._nodes.values())

    def add_node(self, name: str) -> None:
        """Allow rows to be placed on a node."""
        self._nodes.setdefault(name, NodeBudget(name)).is_open = True
        self.more_room.notify()

    def remove_node(self, name: str) -> None:
        """Place no more rows on a node; forget it when its last row ends."""
        if (node := self._nodes.get(name)) is not None:
            node.is_open = False
            self._forget_if_empty(node)

    def node(self, name: str) -> NodeBudget | None:
        """Return a node if rows may be placed there, else None."""
        node = self._nodes.get(name)
        return node if node is not None and node.is_open else None

    def room(self, node: NodeBudget) -> int:
        """Return the number of rows of maximum size that fit."""
        return (self.max_bytes - node.bytes_reserved) // self.max_row_bytes

    def place(self, node: NodeBudget, num_rows: int) -> None:
        """Reserve the maximum size of rows."""
        node.bytes_reserved += num_rows * self.max_row_bytes

    def withdraw(self, node: NodeBudget) -> None:
        """Cancel the reservation of a row without tensors."""
        self.free(node, 0, settled=False)

    def fill(self, block: BlockRef, num_rows: int) -> None:
        """Count rows of a block that were written."""
        self._live_rows.setdefault(block.shard, Counter())[block.lease] += num_rows

    def settle(self, node: NodeBudget, num_bytes: int) -> None:
        """Reduce the reservation of a row to `num_bytes`, the size of its complete tensors."""
        node.bytes_reserved -= self.max_row_bytes - num_bytes

    def free(self, node: NodeBudget, num_bytes: int, *, settled: bool) -> None:
        """Cancel the reservation of a row that ends; `report_freed` frees its blocks."""
        node.bytes_live -= num_bytes
        node.bytes_reserved -= num_bytes if settled else self.max_row_bytes
        self._forget_if_empty(node)

    def _forget_if_empty(self, node: NodeBudget) -> None:
        is_empty = not node.is_open and node.bytes_reserved == 0
        if is_empty and self._nodes.get(node.name) is node:
            del self._nodes[node.name]

    def report_freed(self, blocks: Iterable[BlockRef]) -> None:
        """Report ended rows to their shards, in one call; one entry per row and block."""
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
        """Free rows of a block that were not written to the store."""
        if block.shard not in self.lost_shards:
            self._on_free({block.shard: {block.lease: num_rows}})

    def keep(self, block: BlockRef) -> None:
        """Keep bytes of a block that belong to no row of the store."""
        if block.shard not in self.lost_shards:
            self._kept.setdefault(block.shard, Counter())[block.lease] += 1

    def release_kept(self, blocks: Iterable[BlockRef]) -> None:
        """Free bytes that were kept; one entry per call of `keep`."""
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
        """Forget the bytes of a lost shard."""
        self.lost_shards.add(shard)
        self._live_rows.pop(shard, None)
        self._kept.pop(shard, None)

    def live_rows(self, shard: str) -> dict[int, int]:
        """Return the number of needed rows of a shard, by lease."""
        in_rows = self._live_rows.get(shard, Counter[int]())
        return dict(in_rows + self._kept.get(shard, Counter[int]()))
