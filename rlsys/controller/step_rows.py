"""The rows of the step that is being assembled, and their columns.

    store ─► take (group by group) ─► rows for a worker: any groups, any columns
    step stages ─► add (all rows of the step at once)

The results of step stages are never in the store. If a group of the step is lost or the trainer
dies, they are computed again. Their bytes are kept until the step is done.
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

    cells: dict[str, Sequence[ColumnRef]]  # columns of one writer share their list
    scalars: dict[str, Sequence[float]]
    implicit: dict[str, Sequence[float]]
    num_trained_tokens: Callable[[Sequence[int] | None], int]  # by seats
    is_recorded: bool  # in rollouts.jsonl
    kept: list[ColumnRef] = field(default_factory=list)


class StepRows:
    """The columns of groups that were taken from the store and are not trained yet."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store
        self._groups: dict[int, GroupColumns] = {}

    def take(self, batch: RowBatch, rows: slice, group: RunningGroup) -> None:
        """Record the columns of a group, which has the rows `rows` of the batch."""
        lists: dict[int, Sequence[ColumnRef]] = {}
        cells = {
            name: lists.setdefault(id(of_column), of_column[rows])
            for name, of_column in batch.cells.items()
        }
        # Including columns that the step does not read, for the observer.
        scalars: dict[str, Sequence[float]] = dict(self._store.scalars(batch.rows[rows]))
        self._groups[group.group_id] = GroupColumns(
            cells=cells,
            scalars=scalars,
            implicit={
                name: [value(note) for note in group.rollouts]
                for name, value in IMPLICIT_COLUMNS.items()
            },
            num_trained_tokens=group.num_trained_tokens,
            is_recorded=any(note.text is not None for note in group.rollouts),
        )

    def forget(self, group_id: int) -> None:
        """Release the bytes that step stages wrote of a group, and forget it."""
        self._store.release_kept(self._groups.pop(group_id).kept)

    def rows(self, groups: Iterable[ReadyGroup], columns: Iterable[str]) -> StepRowsRef:
        """Return all rows of these groups, with these columns."""
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
        """Return single rows, given by their groups and places in them.

        `seats`: seats whose tokens are trained on; None for all sampled tokens.
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
                    scalars[name] = [group.implicit[name][place] for _, group, place in chosen]
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
            recorded_as=[place if group.is_recorded else None for _, group, place in chosen],
        )

    def add(self, groups: Sequence[ReadyGroup], written: Written) -> None:
        """Add the columns that a step stage has written of all rows of these groups."""
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
        """Release the bytes that step stages wrote of these groups."""
        for ready in groups:
            group = self._groups[ready.group_id]
            self._store.release_kept(group.kept)
            group.kept = []

    def scalars(self, group_id: int) -> dict[str, Sequence[float]]:
        """Return the columns of a group with a value per row that stages have written."""
        return self._groups[group_id].scalars
