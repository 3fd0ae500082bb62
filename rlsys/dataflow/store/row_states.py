"""The states of rows, in flat arrays per group, because a million rows may be live.

The stages that have written, taken and released a row are bit masks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from rlsys.dataflow.store.blocks import BlockRef, ColumnRef
from rlsys.dataflow.store.tensor_memory import NodeBudget


class GroupRows:
    """The rows of one group. `order` is its number in the order of issue."""

    __slots__ = (
        "blocks",
        "group_id",
        "is_dropped",
        "max_versions",
        "min_versions",
        "nodes",
        "num_bytes",
        "num_live",
        "num_tokens",
        "order",
        "places",
        "released",
        "scalars",
        "taken",
        "written",
    )

    def __init__(
        self,
        group_id: int,
        order: int,
        node: NodeBudget | None,
        *,
        size: int,
        num_block_slots: int,
        num_scalars: int,
    ) -> None:
        self.group_id = group_id
        self.order = order
        self.is_dropped = False
        self.num_live = size  # rows that are not freed
        self.nodes = [node] * size  # node where a row's bytes are reserved; None if not placed
        zeros = bytes(8 * size)
        self.written = array("Q", zeros)  # [size] stages that wrote their columns
        self.taken = array("Q", zeros)  # [size] stages that took the row
        self.released = array("Q", zeros)  # [size] stages that have released the row
        self.num_bytes = array("q", zeros)  # [size] tensor bytes; -1 if the row is freed
        self.num_tokens = array("q", zeros)  # [size]
        self.min_versions = array("q", zeros)  # [size] policy_version of the oldest token
        self.max_versions = array("q", zeros)  # [size] and of the newest
        self.scalars = array("d", zeros * num_scalars)  # [num_scalars * size]
        # Per row and stage that writes tensors: the block, and the row's place in it.
        self.blocks: list[BlockRef | None] = [None] * (num_block_slots * size)
        self.places = array("i", bytes(4 * num_block_slots * size))

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.written)

    def is_freed(self, index: int) -> bool:
        """Return whether a row is freed."""
        return self.num_bytes[index] < 0

    def in_flight(self, index: int) -> bool:
        """Return whether a stage has taken a row and not released it, so may be reading it."""
        return bool(self.taken[index] & ~self.released[index])

    def cell(self, block_slot: int, index: int) -> ColumnRef:
        """Return the place of the bytes of one row that one stage wrote."""
        at = block_slot * self.size + index
        block = self.blocks[at]
        assert block is not None, f"row {index} of group {self.group_id} has no such bytes"
        return block, self.places[at]

    def free(self, index: int) -> list[BlockRef]:
        """Free a row; return the block of each write to it."""
        self.num_bytes[index] = -1
        self.num_live -= 1
        blocks = []
        for at in range(index, len(self.blocks), self.size):
            block = self.blocks[at]
            if block is not None:
                blocks.append(block)
                self.blocks[at] = None
        return blocks


class RowTable:
    """The rows of all groups.

    A row's id is order · group_size + index, so it is unique. A group that is dropped and added
    again has new rows, and late calls cannot affect them.
    """

    def __init__(self, *, group_size: int, num_block_slots: int, num_scalars: int) -> None:
        self.group_size = group_size
        self.num_added = 0
        self._shape = {"num_block_slots": num_block_slots, "num_scalars": num_scalars}
        self._groups: dict[int, GroupRows] = {}  # by order, until the last row is freed
        self._orders: dict[int, int] = {}  # by group id, without dropped groups

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupRows]:
        return iter(self._groups.values())

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._orders

    def add(self, group_id: int, node: NodeBudget | None) -> range:
        """Add a group and return the ids of its rows."""
        order = self.num_added
        self.num_added += 1
        self._orders[group_id] = order
        self._groups[order] = GroupRows(group_id, order, node, size=self.group_size, **self._shape)
        return range(order * self.group_size, (order + 1) * self.group_size)

    def find(self, row: int) -> tuple[GroupRows, int] | None:
        """Return the group and index of a row, which may be dropped; None if it is freed."""
        order, index = divmod(row, self.group_size)
        group = self._groups.get(order)
        return None if group is None or group.is_freed(index) else (group, index)

    def group(self, order: int) -> GroupRows | None:
        """Return the group with a number; None if all its rows are freed."""
        return self._groups.get(order)

    def of(self, group_id: int) -> GroupRows:
        """Return the rows of a group that is not dropped."""
        return self._groups[self._orders[group_id]]

    def drop(self, group_id: int) -> GroupRows:
        """Mark a group as dropped and return it."""
        group = self._groups[self._orders.pop(group_id)]
        group.is_dropped = True
        return group

    def forget_if_freed(self, group: GroupRows) -> None:
        """Remove a group whose rows are all freed."""
        if group.num_live == 0:
            del self._groups[group.order]
            if not group.is_dropped:
                del self._orders[group.group_id]
