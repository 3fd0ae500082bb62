"""Assignment of boxes to the ranks that stage them, so that targets find all elements they lack.

boxes that ranks hold and want
  ──► demands: elements with the same holders, lacked on the same nodes
  ──► for each demand, the boxes that each holder stages: first those that are sent to other
      nodes, then those that only targets on the holders' own nodes read
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlsys.errors import InvalidValue
from rlsys.reallocation.balance import Line, Run, spread
from rlsys.reallocation.box_grid import Grid, IntArray
from rlsys.reallocation.shards import Box
from rlsys.reallocation.tensor_groups import RankSet, TensorGroup


class StagedBox(NamedTuple):
    """The part of some grouped tensors that one rank stages."""

    rank: int
    run: Run
    near: bool  # targets on the rank's own node read it
    far: frozenset[int] = frozenset()  # nodes that import it


class _Demand(NamedTuple):
    """Key of elements that have the same holders and are lacked on the same nodes."""

    holders: frozenset[int]  # ranks
    near: frozenset[int]  # nodes with targets that lack them and a rank that has them
    far: frozenset[int]  # nodes with targets that lack them and no rank that has them


def find_parts(
    groups: Sequence[TensorGroup], ranks: RankSet, *, finest_bytes: int
) -> list[StagedBox]:
    """Return the boxes that each rank stages.

    Parts on one node never overlap. Each element that a target lacks is staged on its node or
    imported by its node. Raises InvalidValue for elements that no source holds.
    """
    runs: dict[_Demand, list[Run]] = defaultdict(list)
    for number, group in enumerate(groups):
        for demand, box in _demands(group, ranks):
            runs[demand].append(Run(number, 0, len(group.names), box, group.dtype.itemsize))
    return _assign(runs, ranks, finest_bytes)


def _demands(group: TensorGroup, ranks: RankSet) -> Iterator[tuple[_Demand, Box]]:
    """Yield boxes of all elements that some target lacks; they do not overlap."""
    if not group.wanted:
        return
    held, wanted = list(group.held.items()), list(group.wanted.items())
    grid = Grid([box for box, _ in (*held, *wanted)])
    cells: dict[_Demand, list[IntArray]] = defaultdict(list)
    wanting: dict[tuple[int, ...], frozenset[int]] = {}  # ranks, by numbers of wanted boxes
    for covering, of_class in grid.classes():
        holders = frozenset(r for box in covering if box < len(held) for r in held[box][1])
        wants = tuple(box - len(held) for box in covering if box >= len(held))
        if wants not in wanting:
            wanting[wants] = frozenset(r for box in wants for r in wanted[box][1])
        lacking = wanting[wants]
        if not holders.isdisjoint(lacking):
            lacking -= holders
        if not lacking:
            continue
        if not holders:
            raise InvalidValue(
                f"tensor {group.names[0]}",
                rule=f"no source holds {grid.boxes(of_class)[0]} of its shape {group.shape}, which "
                f"{ranks.names[min(lacking)]} needs",
                fix="Give all ranks of the sources: a shard or a pipeline stage is missing.",
            )
        nodes, held_on = ranks.nodes_of(lacking), ranks.nodes_of(holders)
        if nodes <= held_on:  # holders on other nodes have nothing to do
            holders = frozenset(rank for rank in holders if ranks.nodes[rank] in nodes)
        cells[_Demand(holders, nodes & held_on, nodes - held_on)].append(of_class)
    for demand, found in cells.items():
        for box in grid.boxes(np.concatenate(found)):
            yield demand, box


def _assign(
    runs: Mapping[_Demand, list[Run]], ranks: RankSet, finest_bytes: int
) -> list[StagedBox]:
    parts: list[StagedBox] = []
    near: dict[tuple[int, ...], list[Run]] = defaultdict(list)  # by the ranks that could stage it

    def stage_on(node: int, demand: _Demand, some: Iterable[Run]) -> None:
        candidates = sorted(rank for rank in demand.holders if ranks.nodes[rank] == node)
        near[tuple(candidates)].extend(some)

    far = [demand for demand in runs if demand.far]
    lines = [Line(tuple(sorted(one.holders)), runs[one], times=len(one.far)) for one in far]
    staged = np.zeros(len(ranks.names))
    assigned = spread(lines, np.zeros(len(ranks.names)), finest_bytes=finest_bytes)
    for demand, some in zip(far, assigned, strict=True):
        for rank, run in some:
            own_node = ranks.nodes[rank]
            parts.append(StagedBox(rank, run, near=own_node in demand.near, far=demand.far))
            staged[rank] += run.num_bytes
            for node in sorted(demand.near - {own_node}):
                stage_on(node, demand, [run])
    for demand, whole in runs.items():
        if not demand.far:
            for node in sorted(demand.near):
                stage_on(node, demand, whole)
    lines = [Line(candidates, some) for candidates, some in near.items()]
    for some in spread(lines, staged, finest_bytes=finest_bytes):
        parts += [StagedBox(rank, run, near=True) for rank, run in some]
    return parts
