"""The stages of a store and the columns that they read and write.

In: columns and stages by name. Out: the writer of each column, and the readers. Raises InvalidValue
for stages that could never work together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from rlsys.errors import InvalidValue, require

MAX_STAGES = 64  # one bit each in the masks of a row


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage of the store. One that reads nothing is a source, which makes the rows."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The masks and numbers of a stage."""

    name: str
    bit: int  # this stage in a bit mask over stages
    needs: int  # mask of the stages that write its columns; 0 for a source
    tensor_writes: frozenset[str]
    scalar_writes: frozenset[str]
    block_slot: int  # number of this stage among those that write tensors; -1 if it writes none
    tensor_reads: Mapping[int, tuple[str, ...]]  # block_slot of the writer -> columns read
    scalar_reads: tuple[str, ...]


class Schema:
    """Checked columns and stages.

    Args:
        tensors: Columns in a shared-memory arena, with one array of any length per row.
        scalars: Columns with one float per row, which travel with the row's metadata.
        stages: The stages.
    """

    def __init__(
        self, *, tensors: Collection[str], scalars: Collection[str], stages: Iterable[StageSpec]
    ) -> None:
        self.stages: Mapping[str, StageSpec] = _by_name(stages)
        self.tensors = frozenset(tensors)
        fix = "Declare a tensor column."
        require(bool(self.tensors), "tensors", [], rule="must not be empty", fix=fix)
        self.scalars = tuple(dict.fromkeys(scalars))
        declared = self.tensors.union(self.scalars)
        both = sorted(self.tensors.intersection(self.scalars))
        rule = "these columns are tensors too"
        require(not both, "scalars", both, rule=rule, fix="Declare each column once.")
        for stage in self.stages.values():
            for column in (*stage.reads, *stage.writes):
                require(
                    column in declared,
                    f"stage {stage.name!r}",
                    column,
                    rule=f"this column is not declared (tensors {sorted(self.tensors)}, scalars "
                    f"{sorted(self.scalars)})",
                    fix="Declare it, or leave it out.",
                )
        require(
            len(self.stages) <= MAX_STAGES,
            "number of stages",
            len(self.stages),
            rule=f"must be at most {MAX_STAGES}",
            fix="Combine stages.",
        )
        self.writer: Mapping[str, str] = _writers(self.stages.values())
        self._check_every_column_is_written_and_read()
        self._check_acyclic()
        self.block_slots: Mapping[str, int] = {
            name: slot
            for slot, name in enumerate(
                spec.name for spec in self.stages.values() if self.tensors.intersection(spec.writes)
            )
        }

    def plan(self) -> dict[str, StagePlan]:
        """Return the plan of each stage."""
        bits = {name: 1 << number for number, name in enumerate(self.stages)}
        return {name: self._plan(spec, bits) for name, spec in self.stages.items()}

    def _plan(self, spec: StageSpec, bits: Mapping[str, int]) -> StagePlan:
        tensor_reads: dict[int, tuple[str, ...]] = {}
        for column in spec.reads:
            if column in self.tensors:
                slot = self.block_slots[self.writer[column]]
                tensor_reads[slot] = (*tensor_reads.get(slot, ()), column)
        return StagePlan(
            name=spec.name,
            bit=bits[spec.name],
            needs=sum(bits[name] for name in self.upstream(spec.name)),
            tensor_writes=self.tensors.intersection(spec.writes),
            scalar_writes=frozenset(spec.writes).intersection(self.scalars),
            block_slot=self.block_slots.get(spec.name, -1),
            tensor_reads=tensor_reads,
            scalar_reads=tuple(column for column in spec.reads if column not in self.tensors),
        )

    def upstream(self, stage: str) -> tuple[str, ...]:
        """Return the stages that write the columns that `stage` reads."""
        return tuple(dict.fromkeys(self.writer[column] for column in self.stages[stage].reads))

    def ancestors(self, stage: str) -> set[str]:
        """Return all stages that must have written a row before `stage` can read it."""
        found: set[str] = set()
        frontier: Sequence[str] = (stage,)
        while frontier:
            frontier = [up for name in frontier for up in self.upstream(name) if up not in found]
            found.update(frontier)
        return found

    def _check_every_column_is_written_and_read(self) -> None:
        readers: dict[str, str] = {}
        for stage in self.stages.values():
            for column in stage.reads:
                require(
                    column in self.writer,
                    f"stage {stage.name!r}",
                    column,
                    rule="no stage writes this column, so the stage would wait for ever",
                    fix="Add the stage that writes it.",
                )
                readers[column] = stage.name
        for column in (*sorted(self.tensors), *self.scalars):
            writer = self.writer.get(column)
            # A scalar needs no reader if another column of the same write has one: the write then
            # comes before the row can end.
            columns = self.stages[writer].writes if writer and column in self.scalars else (column,)
            require(
                not readers.keys().isdisjoint(columns),
                "columns",
                column,
                rule=f"no stage reads this column of stage {writer!r}, and a row may end with its "
                "last reader before the column is written",
                fix="Leave the column out, or let a stage read it.",
            )

    def _check_acyclic(self) -> None:
        try:
            TopologicalSorter({name: self.upstream(name) for name in self.stages}).prepare()
        except CycleError as error:
            names = list(reversed(error.args[1]))[1:]
            first = names.index(min(names))
            cycle = " -> ".join([*names[first:], *names[:first], names[first]])
            raise InvalidValue(
                "stages",
                cycle,
                rule="each of these stages waits for the next one, in a circle",
                fix="Let one of them read a column from outside the circle.",
            ) from None


def _by_name(stages: Iterable[StageSpec]) -> dict[str, StageSpec]:
    by_name: dict[str, StageSpec] = {}
    for stage in stages:
        rule = "two stages have this name"
        fix = "Rename one of them."
        require(stage.name not in by_name, "stages", stage.name, rule=rule, fix=fix)
        by_name[stage.name] = stage
    return by_name


def _writers(stages: Iterable[StageSpec]) -> dict[str, str]:
    writer: dict[str, str] = {}
    for stage in stages:
        for column in stage.writes:
            require(
                column not in writer,
                f"stage {stage.name!r}",
                column,
                rule=f"stage {writer.get(column)!r} writes this column already",
                fix="Rename one of the two columns.",
            )
            writer[column] = stage.name
    return writer
