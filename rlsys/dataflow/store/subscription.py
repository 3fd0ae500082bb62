"""The subscription of a stage: rows that are ready for it, each taken once.

In: rows whose columns were written (`offer`), groups that end (`forget`). Out: RowBatches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlsys.common.async_condition import AsyncCondition
from rlsys.dataflow.store.blocks import ColumnRef
from rlsys.dataflow.store.ready_rows import ReadyQueue
from rlsys.dataflow.store.row_states import GroupRows, RowTable
from rlsys.dataflow.store.selection import Candidate, Selection
from rlsys.dataflow.store.store_schema import StagePlan
from rlsys.errors import require


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """N rows that a stage has taken; all sequences are parallel to `rows`."""

    stage: str
    rows: list[int]  # ids, unique over the run
    group_ids: list[int]
    indices: list[int]  # 0 .. group_size - 1
    min_versions: list[int]  # policy_version of the oldest token
    max_versions: list[int]
    num_tokens: list[int]
    scalars: Mapping[str, list[float]]  # scalar columns that the stage reads
    cells: Mapping[str, list[ColumnRef]]  # places of the tensor columns that the stage reads

    def __len__(self) -> int:
        return len(self.rows)


class Subscription:
    """The ready rows or groups of one stage.

    `at_least` and `at_most` are rows per take, multiples of group_size for whole groups.
    """

    def __init__(
        self,
        plan: StagePlan,
        table: RowTable,
        *,
        scalar_index: Mapping[str, int],
        selection: Selection,
        at_least: int,
        at_most: int,
        describe: Callable[[], str],
    ) -> None:
        self.stage = plan.name
        self.needs = plan.needs
        self.selection = selection
        self.at_least = at_least
        self.at_most = at_most
        self._plan = plan
        self._table = table
        self._scalar_index = scalar_index
        self._describe = describe
        self._rows_each = table.group_size if selection.groups else 1
        self._num_arrived = 0
        self.offered = AsyncCondition()  # notified when rows may have become ready
        self._queue = ReadyQueue(selection, num_tokens=self._num_tokens, is_open=self._is_open)

    @property
    def num_ready(self) -> int:
        """Number of ready rows. The order of the selection may still delay some."""
        return len(self._queue) * self._rows_each

    @property
    def least_candidates(self) -> int:
        """Number of rows or groups that must be ready before any is taken."""
        return self.at_least // self._rows_each

    async def take(self, *, timeout_s: float | None, at_least: int | None = None) -> RowBatch:
        """Wait until at least `at_least` rows are ready, and take them.

        `at_least` is that of the subscription by default. Use `timeout_s=None` only if other code
        limits the wait.

        Raises:
            TimeoutError: The message describes the rows of the store.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (batch := self.take_now(at_least=at_least)) is None:
                    await self.offered.next()
                return batch
        except TimeoutError:
            wanted = self.at_least if at_least is None else at_least
            raise TimeoutError(
                f"stage {self.stage!r} waited {timeout_s} s for {wanted} complete rows; "
                f"{self.num_ready} are ready. The store has {self._describe()}."
            ) from None

    def take_now(self, *, at_least: int | None = None) -> RowBatch | None:
        """Take at most `at_most` rows; return None if fewer than `at_least` are ready.

        A lower `at_least` flushes the last rows of a run.
        """
        require(
            at_least is None or 0 < at_least <= self.at_least,
            f"stage {self.stage!r}: at_least",
            at_least,
            rule=f"must be from 1 to {self.at_least}, the rows of the subscription",
            fix=f"Use at most {self.at_least}.",
        )
        least = self.least_candidates if at_least is None else -(-at_least // self._rows_each)
        numbers = self._queue.pop(least, self.at_most // self._rows_each)
        return self._take(numbers) if numbers else None

    def offer(self, rows: Iterable[tuple[GroupRows, int]], *, requeued: bool = False) -> None:
        """Add rows that got a column which this stage reads, or rows that it requeues."""
        needs = self.needs
        if self.selection.groups:
            for group in {id(group): group for group, _ in rows}.values():
                if all(written & needs == needs for written in group.written):
                    self._push(group.order, group, range(group.size), requeued)
        else:
            for group, index in rows:
                if group.written[index] & needs == needs:
                    number = group.order * group.size + index
                    self._push(number, group, (index,), requeued)
        self.offered.notify()

    def forget(self, group: GroupRows) -> None:
        """Remove a group that was dropped."""
        per_group = 1 if self.selection.groups else group.size
        for number in range(group.order * per_group, (group.order + 1) * per_group):
            self._queue.discard(number)
        self.offered.notify()  # a selection in issue order may wait for this group

    def _push(self, number: int, group: GroupRows, indices: Sequence[int], requeued: bool) -> None:
        if not requeued:
            self._num_arrived += 1
        candidate = Candidate(
            issued=number,
            arrival=0 if requeued else self._num_arrived,
            min_version=min(group.min_versions[i] for i in indices),
            num_tokens=sum(group.num_tokens[i] for i in indices),
        )
        self._queue.push(candidate)

    def _take(self, numbers: Sequence[int]) -> RowBatch:
        size, each = self._table.group_size, self._rows_each
        rows = [row for number in numbers for row in range(number * each, (number + 1) * each)]
        found = []
        for row in rows:
            group = self._table.group(row // size)
            assert group is not None, f"row {row} was ready and is freed"
            group.taken[row % size] |= self._plan.bit
            found.append((group, row % size))
        cells: dict[str, list[ColumnRef]] = {}
        for slot, columns in self._plan.tensor_reads.items():
            of_slot = [group.cell(slot, i) for group, i in found]
            cells |= dict.fromkeys(columns, of_slot)
        starts = {name: self._scalar_index[name] * size for name in self._plan.scalar_reads}
        return RowBatch(
            stage=self.stage,
            rows=rows,
            group_ids=[group.group_id for group, _ in found],
            indices=[i for _, i in found],
            min_versions=[group.min_versions[i] for group, i in found],
            max_versions=[group.max_versions[i] for group, i in found],
            num_tokens=[group.num_tokens[i] for group, i in found],
            scalars={
                name: [group.scalars[start + i] for group, i in found]
                for name, start in starts.items()
            },
            cells=cells,
        )

    def _num_tokens(self, number: int) -> int:
        size, each = self._table.group_size, self._rows_each
        total = 0
        for row in range(number * each, (number + 1) * each):
            group = self._table.group(row // size)
            total += group.num_tokens[row % size] if group else 0
        return total

    def _is_open(self, number: int) -> bool:
        order, index = divmod(number * self._rows_each, self._table.group_size)
        if order >= self._table.num_added:
            return True
        group = self._table.group(order)
        return (
            group is not None and not group.is_dropped and not group.taken[index] & self._plan.bit
        )
