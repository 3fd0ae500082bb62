"""StreamStore: the state of all rows and columns, and the queues of the stages. Metadata only.

    add_group ──► write (source stage) ──► take ──► release (each reading stage) ──► freed
                                            │
                                            └──► write (that stage's columns) ──► take ...

Rows are rollouts, columns are fields. The bytes of tensor columns are in the shards' arenas; the
store has references to them. A stage writes all of its columns of a row in one call. The row is
then ready for the stages whose columns are complete, and their waiting tasks wake up; nothing
polls. Every reading stage takes each row exactly once. When the last one has released it, its bytes
are freed.

Memory: a row is placed on the node where it will be sampled. It reserves its maximum size there,
and returns the unused rest when it is complete. So bytes_live <= bytes_reserved <= max_bytes at any
time on each node, and a row that was placed can always be completed.

Synchronous, without I/O, for one thread. Only waits are asynchronous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from rlsys.common.async_condition import AsyncCondition
from rlsys.dataflow.store.blocks import BlockRef, ColumnRef
from rlsys.dataflow.store.deadlock_check import check_progress
from rlsys.dataflow.store.row_states import GroupRows, RowTable
from rlsys.dataflow.store.selection import FIRST_COMPLETE, Selection
from rlsys.dataflow.store.store_schema import Schema, StagePlan, StageSpec
from rlsys.dataflow.store.subscription import RowBatch, Subscription
from rlsys.dataflow.store.tensor_memory import FreedRows, Memory, NodeBudget
from rlsys.dataflow.store.write_checks import StoreError, check_columns, check_source
from rlsys.errors import require

__all__ = ["FreedRows", "RowBatch", "StageSpec", "StoreError", "StreamStore", "Subscription"]

# A bit of GroupRows.taken besides those of the stages: a checkpoint reads the row's bytes.
PINNED = 1 << 63


class StreamStore:
    """All rows of a run that are not freed yet.

    Args:
        tensors: Columns with one array per row.
        scalars: Columns with one float per row.
        stages: The stages that write and read these columns.
        group_size: Rows per group.
        max_bytes: Maximum tensor bytes of the rows of each node. Incomplete rows count with their
            maximum size.
        max_row_bytes: Maximum bytes of all tensor columns of one row.
        on_free: Called with the rows that are freed, at most once per call of a method.

    Raises:
        InvalidValue: A group does not fit, or the columns and stages could never work together (see
            Schema).
    """

    def __init__(
        self,
        *,
        tensors: Collection[str],
        scalars: Collection[str],
        stages: Iterable[StageSpec],
        group_size: int,
        max_bytes: int,
        max_row_bytes: int,
        on_free: Callable[[FreedRows], None],
    ) -> None:
        require(
            0 < group_size * max_row_bytes <= max_bytes,
            "max_bytes",
            max_bytes,
            rule=f"a group of {group_size} rows with up to {max_row_bytes} bytes does not fit",
            fix="Raise max_bytes, or shorten the longest rollout.",
        )
        self.group_size = group_size
        self._schema = Schema(tensors=tensors, scalars=scalars, stages=stages)
        self._plans = self._schema.plan()
        self._all_readers = sum(plan.bit for plan in self._plans.values() if plan.needs)
        self._all_tensors = sum(plan.bit for plan in self._plans.values() if plan.tensor_writes)
        self._scalar_index = {name: i for i, name in enumerate(self._schema.scalars)}
        self._memory = Memory(max_bytes=max_bytes, max_row_bytes=max_row_bytes, on_free=on_free)
        self._table = RowTable(
            group_size=group_size,
            num_block_slots=len(self._schema.block_slots),
            num_scalars=len(self._schema.scalars),
        )
        self._subscriptions: dict[str, Subscription] = {}

    @property
    def bytes_live(self) -> int:
        """Tensor bytes that were written and not freed, on all nodes."""
        return sum(node.bytes_live for node in self._memory.nodes)

    @property
    def bytes_reserved(self) -> int:
        """Reserved bytes, on all nodes."""
        return sum(node.bytes_reserved for node in self._memory.nodes)

    @property
    def more_room(self) -> AsyncCondition:
        """Condition that is notified when there may be more room on a node."""
        return self._memory.more_room

    @property
    def max_groups(self) -> int:
        """Number of groups of the longest rows that fit, each on one node."""
        each = self._memory.max_bytes // (self.group_size * self._memory.max_row_bytes)
        return each * len(self.nodes)

    @property
    def num_rows(self) -> int:
        """Number of rows that were added and not freed."""
        return sum(group.num_live for group in self._table)

    def queue_depths(self) -> dict[str, int]:
        """Return the number of ready rows by stage."""
        return {name: stage.num_ready for name, stage in self._subscriptions.items()}

    def describe(self) -> str:
        """Return one line about the rows, the memory and the ready rows of each stage."""
        ready = ", ".join(f"{name} {depth}" for name, depth in self.queue_depths().items())
        nodes = [node.bytes_reserved for node in self._memory.nodes]
        return (
            f"{self.num_rows} rows of {len(self._table)} groups, {self.bytes_live} live bytes, "
            f"{nodes} reserved bytes by node, of {self._memory.max_bytes} each; ready rows: {ready}"
        )

    def subscribe(
        self,
        stage: str,
        *,
        at_most: int,
        at_least: int | None = None,
        selection: Selection = FIRST_COMPLETE,
    ) -> Subscription:
        """Subscribe a reading stage; each needs exactly one subscription before groups are added.

        Args:
            stage: Name of the stage.
            at_most: Maximum rows per take, a multiple of group_size for whole groups.
            at_least: Minimum rows per take; one row or group by default.
            selection: Order of the rows or groups.

        Raises:
            InvalidValue: The arguments are invalid, or the stages could deadlock.
        """
        plan = self._plan(stage)
        unit = self.group_size if selection.groups else 1
        least = unit if at_least is None else at_least
        require(plan.needs != 0, "stage", stage, rule="reads no column", fix="Use a reading stage.")
        require(
            stage not in self._subscriptions,
            "stage",
            stage,
            rule="has a subscription already",
            fix="Share that subscription.",
        )
        require(
            0 < least <= at_most and least % unit == at_most % unit == 0,
            f"stage {stage!r}: at_least, at_most",
            (least, at_most),
            rule=f"must be positive multiples of {unit}, in ascending order",
            fix=f"Use multiples of {unit}.",
        )
        subscription = Subscription(
            plan,
            self._table,
            scalar_index=self._scalar_index,
            selection=selection,
            at_least=least,
            at_most=at_most,
            describe=self.describe,
        )
        check_progress(
            self._schema,
            {**self._subscriptions, stage: subscription},
            # At least one node will be added, or there would be no run.
            max_groups=max(
                self.max_groups,
                self._memory.max_bytes // (self.group_size * self._memory.max_row_bytes),
            ),
        )
        self._subscriptions[stage] = subscription
        return subscription

    @property
    def nodes(self) -> list[str]:
        """Nodes on which rows may be placed."""
        return [node.name for node in self._memory.nodes if node.is_open]

    def add_node(self, node: str) -> None:
        """Allow rows to be placed on a node, which may have been removed before."""
        self._memory.add_node(node)

    def remove_node(self, node: str) -> None:
        """Place no more rows on a node. Its rows stay until they end."""
        self._memory.remove_node(node)

    def room(self, node: str) -> int:
        """Return the number of rows that can be placed on a node."""
        found = self._memory.node(node)
        return 0 if found is None else self._memory.room(found)

    def node_of(self, row: int) -> str | None:
        """Return the node of a row; None if it is not placed."""
        group, index = self._find("place", [row])[0]
        node = group.nodes[index]
        return None if node is None else node.name

    def room_without(self, groups: Iterable[int]) -> Iterator[dict[str, int]]:
        """Yield the room on each node after all dropped rows are freed, then without more groups.

        The n-th later value is the room if the first n of `groups` were dropped too.
        """
        memory = self._memory
        held = {node.name: node.bytes_reserved for node in memory.nodes if node.is_open}

        def subtract(group: GroupRows) -> None:
            for index, node in enumerate(group.nodes):
                if node is not None and node.is_open and not group.is_freed(index):
                    held[node.name] -= self._reserved(group, index)

        def room() -> dict[str, int]:
            free = {name: memory.max_bytes - num_bytes for name, num_bytes in held.items()}
            return {name: num_bytes // memory.max_row_bytes for name, num_bytes in free.items()}

        for group in self._table:
            if group.is_dropped:
                subtract(group)
        yield room()
        for group_id in groups:
            subtract(self._table.of(group_id))
            yield room()

    def add_group(self, group_id: int, *, node: str | None = None) -> range:
        """Add a group and return the ids of its rows.

        The rows are placed on `node`; if it is None, call `place` later. A dropped group may be
        added again, with new rows.
        """
        missing = [
            name
            for name, plan in self._plans.items()
            if plan.needs and name not in self._subscriptions
        ]
        if missing:
            raise StoreError(
                f"group {group_id}: the stages {missing} have no subscription, so its rows would "
                "never be freed. Subscribe first."
            )
        if group_id in self._table:
            raise StoreError(f"group {group_id} is in the store already. Drop it first.")
        found = None
        if node is not None:
            found = self._find_room(node, self.group_size, f"group {group_id}")
            self._memory.place(found, self.group_size)
        return self._table.add(group_id, found)

    def place(self, rows: Sequence[int], node: str) -> None:
        """Place rows on a node. Raises StoreError if they are placed already or do not fit."""
        found = self._find("place", rows)
        for row, (group, index) in zip(rows, found, strict=True):
            if (now := group.nodes[index]) is not None:
                self._refuse("place", row, f"is placed on node {now.name!r}. Withdraw it first")
        target = self._find_room(node, len(rows), f"{len(rows)} rows")
        self._memory.place(target, len(rows))
        for group, index in found:
            group.nodes[index] = target

    def withdraw(self, rows: Sequence[int]) -> None:
        """Cancel the reservations of rows that are not sampled any more, until they are placed.

        Raises StoreError for rows that have tensors or are not placed.
        """
        found = self._find("withdraw", rows)
        for row, (group, index) in zip(rows, found, strict=True):
            if group.nodes[index] is None or group.written[index]:
                self._refuse("withdraw", row, "is not placed, or was written")
        for group, index in found:
            node, group.nodes[index] = group.nodes[index], None
            assert node is not None
            self._memory.withdraw(node)
        self._memory.more_room.notify()

    def is_live(self, row: int) -> bool:
        """Return whether a row is neither dropped nor freed."""
        found = self._table.find(row)
        return found is not None and not found[0].is_dropped

    def is_lost(self, shard: str) -> bool:
        """Return whether a shard was reported as lost."""
        return shard in self._memory.lost_shards

    def write(
        self,
        stage: str,
        rows: Sequence[int],
        *,
        block: BlockRef | None = None,
        places: Sequence[int] | None = None,
        scalars: Mapping[str, Sequence[float]] | None = None,
        versions: Sequence[tuple[int, int]] | None = None,
        num_tokens: Sequence[int] | None = None,
    ) -> None:
        """Write all columns of a stage for these rows.

        Args:
            stage: Name of the stage.
            rows: Ids of the rows.
            block: All tensor columns of the stage; rows[k] has places[k] in it.
            places: Places in the block; all of them by default. Each place must be written or
                discarded once.
            scalars: All scalar columns of the stage.
            versions: For sources only: policy_version of each row's oldest and newest token.
            num_tokens: For sources only: length of each row.

        Raises:
            StoreError: Rows are unknown, freed, dropped, not taken by the stage, written by it
                before, or larger than max_row_bytes; columns are not those of the stage; or the
                block is in a lost shard. Nothing has changed.
        """
        plan = self._plan(stage)
        scalars = scalars or {}
        if places is None:
            places = range(block.layout.num_rows if block else len(rows))
        check_columns(plan, rows, block, places, scalars)
        check_source(plan, rows, versions, num_tokens)
        found = self._find(stage, rows)
        for row, (group, index) in zip(rows, found, strict=True):
            if group.is_dropped:
                self._refuse(stage, row, "belongs to a dropped group")
            if group.written[index] & plan.bit:
                columns = sorted(plan.tensor_writes | plan.scalar_writes)
                self._refuse(stage, row, f"has its columns {columns} already, which are final")
            if plan.needs and not group.taken[index] & plan.bit:
                self._refuse(stage, row, "was not taken by the stage")
            if block is not None and group.nodes[index] is None:
                self._refuse(stage, row, "is not placed on a node")
        if block is not None:
            self._write_block(plan, rows, found, block, places)
        for name, values in scalars.items():
            start = self._scalar_index[name] * self.group_size
            for (group, index), value in zip(found, values, strict=True):
                group.scalars[start + index] = value
        if versions is not None and num_tokens is not None:
            for (group, index), span, length in zip(found, versions, num_tokens, strict=True):
                group.min_versions[index], group.max_versions[index] = span
                group.num_tokens[index] = length
        settle, all_tensors = self._memory.settle, self._all_tensors
        for group, index in found:
            group.written[index] |= plan.bit
            if plan.tensor_writes and not all_tensors & ~group.written[index]:
                settle(_budget_of(group, index), group.num_bytes[index])
        if plan.tensor_writes:
            self._memory.more_room.notify()
        for subscription in self._subscriptions.values():
            if subscription.needs & plan.bit:
                subscription.offer(found)

    def discard(self, block: BlockRef, places: Collection[int] | None = None) -> None:
        """Free bytes of a block, all or those at `places`, for rows that have ended meanwhile."""
        self._memory.discard(block, block.layout.num_rows if places is None else len(places))

    def keep(self, cell: ColumnRef) -> None:
        """Keep bytes that belong to no row, such as parts of running requests.

        They stay until `release_kept`. On a lost shard nothing is kept.
        """
        self._memory.keep(cell[0])

    def release_kept(self, cells: Iterable[ColumnRef]) -> None:
        """Free bytes that were kept."""
        self._memory.release_kept([block for block, _ in cells])

    def has_written(self, stage: str, rows: Sequence[int]) -> bool:
        """Return whether the stage has written its columns of all these rows."""
        bit = self._plan(stage).bit
        return all(group.written[index] & bit for group, index in self._find(stage, rows))

    def scalars(self, rows: Sequence[int]) -> dict[str, list[float]]:
        """Return all columns with a value per row, of rows that have them."""
        found = self._find("scalars", rows)
        return {
            name: [group.scalars[number * self.group_size + index] for group, index in found]
            for name, number in self._scalar_index.items()
        }

    def pin(self, rows: Sequence[int]) -> None:
        """Keep the bytes of these rows until `unpin`, even if they are dropped or released."""
        for group, index in self._find("pin", rows):
            group.taken[index] |= PINNED
            group.released[index] &= ~PINNED

    def unpin(self, rows: Sequence[int]) -> None:
        """Undo `pin`."""
        found = self._find("unpin", rows)
        for group, index in found:
            group.taken[index] &= ~PINNED
        self._free_unneeded(found)

    def release(self, stage: str, rows: Sequence[int]) -> None:
        """Release rows that the stage took and does not read any more.

        Raises StoreError for rows that it has not taken, or has released.
        """
        plan = self._plan(stage)
        found = self._find_taken(plan, rows)
        for group, index in found:
            group.released[index] |= plan.bit
        self._free_unneeded(found)

    def requeue(self, stage: str, rows: Sequence[int]) -> None:
        """Requeue rows that the stage took and did not write, before all others.

        Rows that were dropped meanwhile are released. Whole groups must be requeued completely.

        Raises:
            StoreError: The stage has not taken a row, has released it or has written it.
        """
        plan = self._plan(stage)
        found = self._find_taken(plan, rows)
        subscription = self._subscriptions[stage]
        for row, (group, index) in zip(rows, found, strict=True):
            if group.written[index] & plan.bit:
                self._refuse(stage, row, "has its columns already. Release it instead")
        if subscription.selection.groups:
            counts = Counter(group.group_id for group, _ in found)
            parts = {group_id: n for group_id, n in counts.items() if n != self.group_size}
            if parts:
                raise StoreError(
                    f"stage {stage!r} takes groups of {self.group_size} rows and requeues parts of "
                    f"them (rows by group: {parts})."
                )
        for group, index in found:
            if group.is_dropped:
                group.released[index] |= plan.bit
            else:
                group.taken[index] &= ~plan.bit
        subscription.offer([at for at in found if not at[0].is_dropped], requeued=True)
        self._free_unneeded([at for at in found if at[0].is_dropped])

    def drop_group(self, group_id: int) -> None:
        """Drop a group, so that no stage takes its rows any more.

        Rows are freed at once, or when the stages that have taken them release them.
        """
        if group_id not in self._table:
            raise StoreError(f"group {group_id} is not in the store.")
        group = self._table.drop(group_id)
        for subscription in self._subscriptions.values():
            subscription.forget(group)
        rows = range(self.group_size)
        self._free_unneeded([(group, i) for i in rows if not group.is_freed(i)])

    def lost(self, shard: str) -> list[int]:
        """Drop the groups with bytes in a shard that died, and return their ids.

        Blocks in that shard are rejected from now on.
        """
        self._memory.lose(shard)
        lost = [
            group.group_id
            for group in self._table
            if not group.is_dropped
            and any(block is not None and block.shard == shard for block in group.blocks)
        ]
        for group_id in lost:
            self.drop_group(group_id)
        return lost

    def live_rows(self, shard: str) -> dict[int, int]:
        """Return the number of needed rows by lease, which the shard of a dead writer must keep.

        First write or discard all rows that the writer has reported.
        """
        return self._memory.live_rows(shard)

    def _write_block(
        self,
        plan: StagePlan,
        rows: Sequence[int],
        found: Sequence[tuple[GroupRows, int]],
        block: BlockRef,
        places: Sequence[int],
    ) -> None:
        memory = self._memory
        if block.shard in memory.lost_shards:
            raise StoreError(
                f"stage {plan.name!r}: the block of rows {list(rows)} is in shard {block.shard!r}, "
                "which is lost. Drop their groups."
            )
        of_block = block.layout.row_bytes()
        row_bytes = [of_block[place] for place in places]
        for row, (group, index), num_bytes in zip(rows, found, row_bytes, strict=True):
            if group.num_bytes[index] + num_bytes > memory.max_row_bytes:
                self._refuse(
                    plan.name,
                    row,
                    f"would have {group.num_bytes[index] + num_bytes} bytes with columns "
                    f"{sorted(plan.tensor_writes)}, max_row_bytes={memory.max_row_bytes}",
                )
        memory.fill(block, len(rows))
        slot = plan.block_slot * self.group_size
        for (group, index), place, num_bytes in zip(found, places, row_bytes, strict=True):
            group.num_bytes[index] += num_bytes
            _budget_of(group, index).bytes_live += num_bytes
            group.blocks[slot + index] = block
            group.places[slot + index] = place

    def _free_unneeded(self, rows: Iterable[tuple[GroupRows, int]]) -> None:
        """Free those of the rows that no stage will read."""
        memory = self._memory
        blocks: list[BlockRef] = []
        has_freed = False
        for group, index in rows:
            if group.is_dropped:
                needed = group.in_flight(index)
            else:
                needed = group.released[index] != self._all_readers or group.in_flight(index)
            if not needed:
                has_freed = True
                if (node := group.nodes[index]) is not None:
                    is_settled = not self._all_tensors & ~group.written[index]
                    memory.free(node, group.num_bytes[index], settled=is_settled)
                blocks += group.free(index)
                self._table.forget_if_freed(group)
        if has_freed:
            memory.more_room.notify()
        memory.report_freed(blocks)

    def _reserved(self, group: GroupRows, index: int) -> int:
        """Return the reserved bytes of a row that is placed."""
        is_settled = not self._all_tensors & ~group.written[index]
        return group.num_bytes[index] if is_settled else self._memory.max_row_bytes

    def _find_room(self, node: str, num_rows: int, what: str) -> NodeBudget:
        found = self._memory.node(node)
        if found is None:
            raise StoreError(f"{what}: node {node!r} is none of the nodes {self.nodes}.")
        if self._memory.room(found) < num_rows:
            raise StoreError(f"{what}: no room on node {node!r} ({self.describe()}).")
        return found

    def _plan(self, stage: str) -> StagePlan:
        plan = self._plans.get(stage)
        if plan is None:
            raise StoreError(f"stage {stage!r} is none of the stages {list(self._plans)}.")
        return plan

    def _find(self, stage: str, rows: Sequence[int]) -> list[tuple[GroupRows, int]]:
        if len(set(rows)) != len(rows):
            raise StoreError(f"stage {stage!r}: a row occurs twice in {list(rows)}.")
        found = []
        for row in rows:
            at = self._table.find(row)
            if at is None:
                self._refuse(stage, row, self._why_unknown(row))
            found.append(at)
        return found

    def _find_taken(self, plan: StagePlan, rows: Sequence[int]) -> list[tuple[GroupRows, int]]:
        found = self._find(plan.name, rows)
        for row, (group, index) in zip(rows, found, strict=True):
            if not group.taken[index] & ~group.released[index] & plan.bit:
                self._refuse(plan.name, row, "was not taken by the stage, or is released already")
        return found

    def _why_unknown(self, row: int) -> str:
        if 0 <= row < self._table.num_added * self.group_size:
            return "is freed: its last reader released it, or its group was dropped"
        return "was never added"

    def _refuse(self, stage: str, row: int, rule: str) -> NoReturn:
        found = self._table.find(row)
        where = f" (group {found[0].group_id}, index {found[1]})" if found else ""
        raise StoreError(f"stage {stage!r}: row {row}{where} {rule}.")


def _budget_of(group: GroupRows, index: int) -> NodeBudget:
    node = group.nodes[index]
    assert node is not None, f"row {index} of group {group.group_id} has tensors and no node"
    return node
