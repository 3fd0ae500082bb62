"""The rows of the step that is being put together, and their columns.

    store ─► take (group by group) ─► Rows for a worker: any groups, any columns
    step stages ─► add (all rows of the step at once)

What step stages make of a step is never in the store: when a group of the step is lost, or the
learner dies, they make it anew. Bytes of theirs are kept until the step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rlsys.controller.state import IMPLICIT_COLUMNS, RunningGroup
from rlsys.controller.worker_protocols import StepRowsRef, Written
from rlsys.dataflow.scheduling.batching import ReadyGroup
from rlsys.dataflow.store.blocks import ColumnRef
from rlsys.dataflow.store.stream_store import RowBatch, StreamStore


@dataclass(kw_only=True)
class GroupColumns:
    """Columns of one group's rows, in their order."""

    cells: dict[str, Sequence[ColumnRef]]  # those of one writer are the same list
    scalars: dict[str, Sequence[float]]
    facts: dict[str, Sequence[float]]
    num_trained_tokens: Callable[[Sequence[int] | None], int]  # of these seats
    kept: list[ColumnRef] = field(default_factory=list)


class StepRows:
    """Of groups that were taken from the store and are not trained yet."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store
        self._groups: dict[int, GroupColumns] = {}

    def take(self, batch: RowBatch, rows: slice, group: RunningGroup) -> None:
        lists: dict[int, Sequence[ColumnRef]] = {}
        cells = {
            name: lists.setdefault(id(of_column), of_column[rows])
            for name, of_column in batch.cells.items()
        }
        # Also those that the step does not read: the observer is told of them.
        scalars: dict[str, Sequence[float]] = dict(self._store.scalars(batch.rows[rows]))
        self._groups[group.group_id] = GroupColumns(
            cells=cells,
            scalars=scalars,
            facts={
                name: [fact(note) for note in group.rollouts]
                for name, fact in IMPLICIT_COLUMNS.items()
            },
            num_trained_tokens=group.num_trained_tokens,
        )

    def forget(self, group_id: int) -> None:
        self._store.release_kept(self._groups.pop(group_id).kept)

    def rows(self, groups: Iterable[ReadyGroup], columns: Iterable[str]) -> StepRowsRef:
        """All rows of these groups, with these of their columns."""
        return self.some(
            [(ready, place) for ready in groups for place in range(len(ready.row_ids))], columns
        )

    def some(
        self,
        places: Sequence[tuple[ReadyGroup, int]],
        columns: Iterable[str],
        *,
        seats: tuple[int, ...] | None = None,
    ) -> StepRowsRef:
        """Rows by their groups and their places there; `seats`: whose tokens are trained on, where
        not all that were sampled are.
        """
        chosen = [(ready, self._groups[ready.group_id], place) for ready, place in places]
        cells: dict[str, Sequence[ColumnRef]] = {}
        scalars: dict[str, Sequence[float]] = {}
        if chosen:
            first = chosen[0][1]
            joined: dict[int, Sequence[ColumnRef]] = {}
            for name in columns:
                if name in first.scalars:
                    scalars[name] = [group.scalars[name][place] for _, group, place in chosen]
                    continue
                if name not in first.cells:
                    scalars[name] = [group.facts[name][place] for _, group, place in chosen]
                    continue
                writer = id(first.cells[name])
                if writer not in joined:
                    joined[writer] = [group.cells[name][place] for _, group, place in chosen]
                cells[name] = joined[writer]
        return StepRowsRef(
            cells=cells,
            scalars=scalars,
            group_ids=[ready.group_id for ready, _, _ in chosen],
            group_sizes=[len(ready.row_ids) for ready, _, _ in chosen],
            group_num_tokens=[group.num_trained_tokens(seats) for _, group, _ in chosen],
            seats=seats,
        )

    def add(self, groups: Sequence[ReadyGroup], written: Written) -> None:
        """What a step stage has made of all rows of these groups."""
        start = 0
        for ready in groups:
            group = self._groups.get(ready.group_id)
            places = range(start, start + len(ready.row_ids))
            start = places.stop
            if written.block is not None:
                cells = [(written.block, place) for place in places]
                if group is None:  # lost meanwhile
                    self._store.discard(written.block, places)
                    continue
                for cell in cells:
                    self._store.keep(cell)
                group.kept += cells
                group.cells |= dict.fromkeys(written.block.layout.columns, cells)
            if group is not None:
                group.scalars |= {
                    name: values[places.start : places.stop]
                    for name, values in written.scalars.items()
                }

    def discard_computed(self, groups: Iterable[ReadyGroup]) -> None:
        """What step stages made of these groups is made again."""
        for ready in groups:
            group = self._groups[ready.group_id]
            self._store.release_kept(group.kept)
            group.kept = []

    def scalars(self, group_id: int) -> dict[str, Sequence[float]]:
        """Columns with a value per row that stages have written."""
        return self._groups[group_id].scalars
