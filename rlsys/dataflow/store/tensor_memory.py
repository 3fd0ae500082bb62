"""The tensor bytes of the store: how many are reserved and live, and what goes back to the shards.

    place ──► fill (per write) ──► settle (last write) ──► free ──► on_free(shard, lease, rows)

Bytes lie in nodes: a node is the memory of one node, and of the replicas that run there. A row is
placed in the node where it is going to be sampled and reserves the most it can need there; once all
of its tensors are written it keeps what they take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from rlsys.common.async_condition import AsyncCondition
from rlsys.dataflow.store.blocks import BlockRef

# Shard -> lease -> how many rows written under that lease nobody needs any more.
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
    """bytes_live <= bytes_reserved <= max_bytes at any time, in each node."""

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
        self._kept: dict[str, Counter[int]] = {}  # the same, of what belongs to no row

    @property
    def nodes(self) -> list[NodeBudget]:
        """Those where rows may be placed, and those that still have some."""
        return list(self._nodes.values())

    def add_node(self, name: str) -> None:
        """Rows may be placed there from now on."""
        self._nodes.setdefault(name, NodeBudget(name)).is_open = True
        self.more_room.notify()

    def remove_node(self, name: str) -> None:
        """No more rows are placed there; it is forgotten with the last that it has."""
        if (node := self._nodes.get(name)) is not None:
            node.is_open = False
            self._forget_if_empty(node)

    def node(self, name: str) -> NodeBudget | None:
        """One where rows may be placed."""
        node = self._nodes.get(name)
        return node if node is not None and node.is_open else None

    def room(self, node: NodeBudget) -> int:
        """How many rows of the largest size fit."""
        return (self.max_bytes - node.bytes_reserved) // self.max_row_bytes

    def place(self, node: NodeBudget, num_rows: int) -> None:
        node.bytes_reserved += num_rows * self.max_row_bytes

    def withdraw(self, node: NodeBudget) -> None:
        """A row that has nothing yet is going to be sampled elsewhere."""
        self.free(node, 0, settled=False)

    def fill(self, block: BlockRef, num_rows: int) -> None:
        """Rows of a block were written."""
        self._live_rows.setdefault(block.shard, Counter())[block.lease] += num_rows

    def settle(self, node: NodeBudget, num_bytes: int) -> None:
        """A row has all of its tensors, `num_bytes`: the rest of its reservation is given back."""
        node.bytes_reserved -= self.max_row_bytes - num_bytes

    def free(self, node: NodeBudget, num_bytes: int, *, settled: bool) -> None:
        """A row ends that has `num_bytes`; its blocks go back with `report_freed`."""
        node.bytes_live -= num_bytes
        node.bytes_reserved -= num_bytes if settled else self.max_row_bytes
        self._forget_if_empty(node)

    def _forget_if_empty(self, node: NodeBudget) -> None:
        is_empty = not node.is_open and node.bytes_reserved == 0
        if is_empty and self._nodes.get(node.name) is node:
            del self._nodes[node.name]

    def report_freed(self, blocks: Iterable[BlockRef]) -> None:
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

    def release_kept(self, blocks: Iterable[BlockRef]) -> None:
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
