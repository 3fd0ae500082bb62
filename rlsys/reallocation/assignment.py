"""Which rank stages which boxes, so that targets find all that they lack.

boxes that ranks have and want ──► demands: elements with the same holders, lacked on the same
nodes ──► of each demand, who of its holders stages what: first what is sent to other nodes,
then what only targets of the holders' own nodes read
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlsys.reallocation.balance import Line, Run, spread
from rlsys.reallocation.box_grid import Grid, IntArray
from rlsys.reallocation.shards import Box
from rlsys.reallocation.tensor_groups import RankSet, TensorGroup


class StagedBox(NamedTuple):
    """What one rank stages of some tensors that lie alike."""

    rank: int
    run: Run
    near: bool  # whether targets of its own node read it
    far: frozenset[int] = frozenset()  # nodes that import it


class _Demand(NamedTuple):
    """Of elements that are treated alike."""

    holders: frozenset[int]  # ranks
    near: frozenset[int]  # nodes where targets lack them and a rank has them
    far: frozenset[int]  # nodes where targets lack them and no rank has them


def find_parts(
    groups: Sequence[TensorGroup], ranks: RankSet, *, finest_bytes: int
) -> list[StagedBox]:
    """On no node two parts overlap; all that a target lacks is near it, or is imported by its node.

    Raises ValueError for elements that no source holds.
    """
    runs: dict[_Demand, list[Run]] = defaultdict(list)
    for number, group in enumerate(groups):
        for demand, box in _demands(group, ranks):
            runs[demand].append(Run(number, 0, len(group.names), box, group.dtype.itemsize))
    return _shared_out(runs, ranks, finest_bytes)


def _demands(group: TensorGroup, ranks: RankSet) -> Iterator[tuple[_Demand, Box]]:
    """Boxes that do not overlap, of all that some target lacks."""
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
            raise ValueError(
                f"no source holds {grid.boxes(of_class)[0]} of {group.names[0]} {group.shape}, "
                f"which {ranks.names[min(lacking)]} is to have; give all ranks of the sources: a "
                "shard or a stage of a pipeline is missing."
            )
        nodes, here = ranks.nodes_of(lacking), ranks.nodes_of(holders)
        if nodes <= here:  # who has it on other nodes plays no part
            holders = frozenset(rank for rank in holders if ranks.nodes[rank] in nodes)
        cells[_Demand(holders, nodes & here, nodes - here)].append(of_class)
    for demand, found in cells.items():
        for box in grid.boxes(np.concatenate(found)):
            yield demand, box


def _shared_out(
    runs: Mapping[_Demand, list[Run]], ranks: RankSet, finest_bytes: int
) -> list[StagedBox]:
    parts: list[StagedBox] = []
    near: dict[tuple[int, ...], list[Run]] = defaultdict(list)  # by the ranks that could stage it

    def stay(node: int, demand: _Demand, some: Iterable[Run]) -> None:
        here = sorted(rank for rank in demand.holders if ranks.nodes[rank] == node)
        near[tuple(here)].extend(some)

    far = [demand for demand in runs if demand.far]
    lines = [Line(tuple(sorted(one.holders)), runs[one], times=len(one.far)) for one in far]
    staged = np.zeros(len(ranks.names))
    taken = spread(lines, np.zeros(len(ranks.names)), finest_bytes=finest_bytes)
    for demand, some in zip(far, taken, strict=True):
        for rank, run in some:
            home = ranks.nodes[rank]
            parts.append(StagedBox(rank, run, near=home in demand.near, far=demand.far))
            staged[rank] += run.num_bytes
            for node in sorted(demand.near - {home}):
                stay(node, demand, [run])
    for demand, whole in runs.items():
        if not demand.far:
            for node in sorted(demand.near):
                stay(node, demand, whole)
    lines = [Line(here, some) for here, some in near.items()]
    for some in spread(lines, staged, finest_bytes=finest_bytes):
        parts += [StagedBox(rank, run, near=True) for rank, run in some]
    return parts
