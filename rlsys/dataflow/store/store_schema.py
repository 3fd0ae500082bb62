"""The stages around the store, and which columns they read and write.

In: columns and stages by name. Out: who writes a column, who reads what; or a ValueError that names
what could never work, before anything runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from rlsys.config import require

MAX_STAGES = 64  # a bit each in the masks of a row


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage as the store sees it. One that reads nothing is a source: it makes the rows."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A stage in the numbers that the store computes with."""

    name: str
    bit: int  # this stage in a bit mask over stages
    needs: int  # mask of the stages that write what this one reads; 0: a source
    tensor_writes: frozenset[str]
    scalar_writes: frozenset[str]
    block_slot: int  # number of this stage among those that write tensors; -1: it writes none
    tensor_reads: Mapping[int, tuple[str, ...]]  # block_slot of the writer -> columns read
    scalar_reads: tuple[str, ...]


class Schema:
    """Checked columns and stages.

    tensors: columns whose bytes lie in a shared-memory arena, one array of any length per row.
    scalars: columns that hold one float per row and travel with the row's metadata.
    """

    def __init__(
        self, *, tensors: Collection[str], scalars: Collection[str], stages: Iterable[StageSpec]
    ) -> None:
        self.stages: Mapping[str, StageSpec] = _by_name(stages)
        self.tensors = frozenset(tensors)
        require(bool(self.tensors), "tensors=() leaves nothing to store; declare a tensor column.")
        self.scalars = tuple(dict.fromkeys(scalars))
        declared = self.tensors.union(self.scalars)
        both = sorted(self.tensors.intersection(self.scalars))
        require(not both, f"columns {both} are both tensors and scalars; declare each once.")
        for stage in self.stages.values():
            for column in (*stage.reads, *stage.writes):
                require(
                    column in declared,
                    f"stage {stage.name!r} names column {column!r}, which is not declared "
                    f"(tensors {sorted(self.tensors)}, scalars {sorted(self.scalars)}).",
                )
        require(
            len(self.stages) <= MAX_STAGES,
            f"{len(self.stages)} stages; the store tells at most {MAX_STAGES} apart.",
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
        """The stages that write what `stage` reads."""
        return tuple(dict.fromkeys(self.writer[column] for column in self.stages[stage].reads))

    def ancestors(self, stage: str) -> set[str]:
        """Every stage that must have written a row before `stage` can read it."""
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
                    f"stage {stage.name!r} reads column {column!r}, which no stage writes; it "
                    "would wait for ever. Add the stage that writes it.",
                )
                readers[column] = stage.name
        for column in (*sorted(self.tensors), *self.scalars):
            writer = self.writer.get(column)
            # What a stage writes beside a column that is read is written before the row can end.
            beside = self.stages[writer].writes if writer and column in self.scalars else (column,)
            require(
                not readers.keys().isdisjoint(beside),
                f"column {column!r} (written by {writer!r}) is read by no stage: "
                "a row ends with its last reader, so it may be gone before this column is "
                "written. Drop the column, or let a stage read it.",
            )

    def _check_acyclic(self) -> None:
        try:
            TopologicalSorter({name: self.upstream(name) for name in self.stages}).prepare()
        except CycleError as error:
            cycle = " -> ".join(reversed(error.args[1]))
            raise ValueError(
                f"the stages wait for each other in a circle: {cycle}; no row could ever be "
                "complete. Let one of them read a column from outside the circle."
            ) from None


def _by_name(stages: Iterable[StageSpec]) -> dict[str, StageSpec]:
    by_name: dict[str, StageSpec] = {}
    for stage in stages:
        require(
            stage.name not in by_name, f"stage {stage.name!r} is stated twice; rename one of them."
        )
        by_name[stage.name] = stage
    return by_name


def _writers(stages: Iterable[StageSpec]) -> dict[str, str]:
    writer: dict[str, str] = {}
    for stage in stages:
        for column in stage.writes:
            require(
                column not in writer,
                f"stages {writer.get(column)!r} and {stage.name!r} both write column {column!r}; "
                "a column has one writer, rename one.",
            )
            writer[column] = stage.name
    return writer
