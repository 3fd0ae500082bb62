"""Plan of a parameter reallocation, from any layout of a model to any other.

    sources: by rank, the boxes that it holds ─┐
                                               ├─► plan ─► sources stage segments of their boxes,
    targets: by rank, the boxes that it wants ─┘           nodes import segments of other nodes,
                                                           targets read boxes of segments

The ranks of a node share memory: all targets on a node read what any of its ranks stages. No two
ranks of a node stage the same element, and no rank stages an element that no target lacks. A target
does not read what it holds. If no rank of a node holds an element, the node imports it from a rank
of another node, once for all targets there. Ranks that hold the same share the work evenly.

A plan uses shapes, not values. It depends on its arguments only: ranks that plan with the same
arguments get the same plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from rlsys.reallocation.assignment import StagedBox, find_parts
from rlsys.reallocation.balance import Run
from rlsys.reallocation.box_grid import IntArray
from rlsys.reallocation.shards import Box, Holder, TensorShard
from rlsys.reallocation.tensor_groups import RankSet, TensorGroup, grouped
from rlsys.reallocation.traffic import Traffic, table, without

ALIGNMENT = 64
# Smallest piece, in bytes, when ranks that hold the same share the work.
FINEST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a tensor in a buffer, in row-major order."""

    buffer: str  # the rank that stages it, or the node that imports it
    offset: int  # in bytes, a multiple of ALIGNMENT
    name: str
    dtype: torch.dtype  # wanted precision; the staging rank converts
    box: Box
    nodes: tuple[str, ...] = ()  # nodes that the rank sends it to

    @property
    def num_bytes(self) -> int:
        """Bytes without alignment."""
        return self.box.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Import:
    """A segment that a node imports from a rank of another node."""

    there: Segment  # in the sender's buffer
    here: Segment  # in the node's buffer


@dataclass(frozen=True, slots=True)
class Read:
    """A part of one of a target's shards, and its origin."""

    want: int  # index of the shard in the target's `holdings`
    box: Box  # part of the whole tensor, within the shard's box
    origin: Segment | TensorShard
    """A segment in a buffer of the target's node, or a shard that the target holds as a source."""


@lru_cache(maxsize=4)
def plan(
    sources: tuple[Holder, ...], targets: tuple[Holder, ...], *, finest_bytes: int = FINEST_BYTES
) -> ReallocationPlan:
    """Return a plan that gives each target its boxes.

    A rank of the same name on both sides is one rank, and does not need what it holds. The last
    plans are cached.

    Raises InvalidValue if the sides do not belong to the same model (missing tensors, other shapes
    or types), and for elements that no source holds.
    """
    ranks = RankSet.of(sources, targets)
    groups = grouped(sources, targets, ranks)
    return ReallocationPlan(
        sources, targets, ranks, groups, find_parts(groups, ranks, finest_bytes=finest_bytes)
    )


class _Buffer(NamedTuple):
    """Layout of the buffer of a rank or a node."""

    segments: IntArray  # [segments, 2], by offset: index of a part, index of a tensor in its group
    offsets: Mapping[int, IntArray]  # by part, the offset of each of its tensors


class ReallocationPlan:
    """The work of every rank and node. Created by `plan`."""

    def __init__(
        self,
        sources: Sequence[Holder],
        targets: Sequence[Holder],
        ranks: RankSet,
        groups: Sequence[TensorGroup],
        parts: Sequence[StagedBox],
    ) -> None:
        self._sources = {holder.rank: holder for holder in sources}
        self._targets = {holder.rank: holder for holder in targets}
        self._ranks = ranks
        self._groups = groups
        self._parts = parts
        self._node_of = {name: ranks.nodes[number] for number, name in enumerate(ranks.names)}
        # Indices of parts, by the rank or node that has the buffer, and by node and group.
        owners = (*ranks.names, *ranks.node_names)
        self._buffered: dict[str, list[int]] = {name: [] for name in owners}
        self._readable: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, part in enumerate(parts):
            self._buffered[ranks.names[part.rank]].append(number)
            for node in part.far:
                self._buffered[ranks.node_names[node]].append(number)
            for node in (*part.far, *([ranks.nodes[part.rank]] if part.near else [])):
                self._readable[node, part.run.group].append(number)
        self._buffers: dict[str, _Buffer] = {}
        self._importing: dict[int, tuple[str, ...]] = {}

    def staged(self, rank: str) -> list[Segment]:
        """Return the segments that a source stages, by offset, in the order of its tensors."""
        assert rank in self._sources, f"{rank} is not a source"
        segments = self._buffer(rank).segments.tolist()
        return [self._segment(rank, number, index) for number, index in segments]

    def imports(self, node: str) -> list[Import]:
        """Return the segments that a node imports, by offset there.

        They are sorted by sender and by the order of the sender's buffer, so that neighbours can be
        sent together.
        """
        senders = [self._ranks.names[part.rank] for part in self._parts]
        return [
            Import(
                there=self._segment(senders[number], number, index),
                here=self._segment(node, number, index),
            )
            for number, index in self._buffer(node).segments.tolist()
        ]

    def reads(self, rank: str) -> list[Read]:
        """Return the origin of each element of a target's boxes, each element once."""
        own: dict[str, list[TensorShard]] = defaultdict(list)
        if rank in self._sources:
            for one in self._sources[rank].holdings:
                own[one.name].append(one)
        # Tensors of a group have the same parts, so overlaps are computed once per group and box.
        overlaps: dict[tuple[int, Box], list[tuple[int, Box]]] = {}
        node = self._node_of[rank]
        found = []
        for number, want in enumerate(self._targets[rank].holdings):
            left = [want.box] if want.box.num_elements else []
            for one in own[want.name]:
                shared = (piece.overlap(one.box) for piece in left)
                found += [Read(number, box, one) for box in shared if box is not None]
                left = without(left, [one.box])
            if not left:
                continue
            group, index = self._places[want.name, want.dtype]
            if (group, want.box) not in overlaps:
                overlaps[group, want.box] = self._overlaps(node, group, left)
            for part, box in overlaps[group, want.box]:
                if self._parts[part].run.first <= index < self._parts[part].run.stop:
                    segment = self._segment(self._owner(node, part), part, index)
                    found.append(Read(number, box, segment))
        return found

    def _overlaps(self, node: int, group: int, boxes: Sequence[Box]) -> list[tuple[int, Box]]:
        """Return the overlaps of boxes with the buffers of a node, by index of the part."""
        return [
            (number, shared)
            for number in self._readable[node, group]
            for box in boxes
            if (shared := self._parts[number].run.box.overlap(box)) is not None
        ]

    def _owner(self, node: int, number: int) -> str:
        """Return the buffer in which the ranks of a node find a part."""
        rank = self._parts[number].rank
        is_near = self._ranks.nodes[rank] == node
        return self._ranks.names[rank] if is_near else self._ranks.node_names[node]

    def _segment(self, owner: str, number: int, index: int) -> Segment:
        """Return the segment of a part in a buffer, for one tensor of its group."""
        part = self._parts[number]
        run, group = part.run, self._groups[part.run.group]
        is_staged = owner == self._ranks.names[part.rank]
        return Segment(
            buffer=owner,
            offset=int(self._buffer(owner).offsets[number][index - run.first]),
            name=group.names[index],
            dtype=group.dtype,
            box=run.box,
            nodes=self._nodes(number) if is_staged else (),
        )

    def _nodes(self, number: int) -> tuple[str, ...]:
        """Return the nodes that import a part."""
        if number not in self._importing:
            far = sorted(self._parts[number].far)
            self._importing[number] = tuple(self._ranks.node_names[node] for node in far)
        return self._importing[number]

    def _buffer(self, owner: str) -> _Buffer:
        if owner not in self._buffers:
            self._buffers[owner] = self._lay_out(self._buffered[owner])
        return self._buffers[owner]

    def _lay_out(self, numbers: Sequence[int]) -> _Buffer:
        """Lay out parts [P] in a buffer, sorted by rank, tensor and position in the tensor."""
        if not numbers:
            return _Buffer(np.empty((0, 2), np.int64), {})
        parts = sorted(((self._parts[number], number) for number in numbers), key=_by_place)
        runs = [part.run for part, _ in parts]
        counts = [run.stop - run.first for run in runs]  # [P]
        which = np.repeat(np.arange(len(parts)), counts)  # [segments], like the following arrays
        tensors = np.concatenate([np.arange(run.first, run.stop) for run in runs])
        order = np.concatenate([self._order[run.group][run.first : run.stop] for run in runs])
        ranks = np.array([part.rank for part, _ in parts])[which]
        sizes = np.array([-(-run.bytes_each // ALIGNMENT) * ALIGNMENT for run in runs])[which]
        by_offset = np.lexsort((which, order, ranks))
        offsets = np.empty_like(sizes)
        offsets[by_offset] = np.cumsum(sizes[by_offset]) - sizes[by_offset]
        of_part = np.split(offsets, np.cumsum(counts)[:-1])
        sorted_numbers = np.array([number for _, number in parts])
        segments = np.stack([sorted_numbers[which], tensors], axis=1)[by_offset]
        return _Buffer(segments, dict(zip(sorted_numbers.tolist(), of_part, strict=True)))

    @cached_property
    def _places(self) -> dict[tuple[str, torch.dtype], tuple[int, int]]:
        """Group, and index in the group, of each tensor in each precision."""
        return {
            (name, group.dtype): (number, index)
            for number, group in enumerate(self._groups)
            for index, name in enumerate(group.names)
        }

    @cached_property
    def _order(self) -> list[IntArray]:
        """Positions of each group's tensors in the sources' order, by group."""
        names = (one.name for holder in self._sources.values() for one in holder.holdings)
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return [np.array([places[name] for name in group.names]) for group in self._groups]

    @cached_property
    def put(self) -> Mapping[tuple[str, str], int]:
        """Bytes that a rank writes into a node's memory, by (rank, node), without alignment.

        It stages for its own node and sends to others.
        """
        found: dict[tuple[str, str], int] = defaultdict(int)
        for part in self._parts:
            own_node = [self._ranks.nodes[part.rank]] if part.near else []
            for node in (*part.far, *own_node):
                link = self._ranks.names[part.rank], self._ranks.node_names[node]
                found[link] += part.run.num_bytes
        return dict(found)

    @cached_property
    def bytes_per_link(self) -> Traffic:
        """Bytes that the plan moves over each link."""
        staged: dict[str, int] = defaultdict(int)
        imported: dict[str, int] = defaultdict(int)
        for (rank, node), num_bytes in self.put.items():
            is_near = self._ranks.node_names[self._node_of[rank]] == node
            (staged if is_near else imported)[node] += num_bytes
        return Traffic(staged=dict(staged), imported=dict(imported), read=self._bytes_read())

    def _bytes_read(self) -> dict[str, int]:
        """Return the bytes that each target reads."""
        found: dict[str, int] = defaultdict(int)
        for number, group in enumerate(self._groups):
            parts: dict[int, tuple[IntArray, IntArray]] = {}  # by node
            for box, wanting in group.wanted.items():
                of_box: dict[int, int] = {}  # by node, for ranks that hold nothing of the box
                for rank in wanting:
                    node, name = self._ranks.nodes[rank], self._ranks.names[rank]
                    if node not in parts:
                        runs = [self._parts[one].run for one in self._readable[node, number]]
                        parts[node] = _weighted(runs, len(group.shape))
                    own = group.held_by(rank) if name in self._sources else []
                    if own:
                        left = without([box], own)
                        found[name] += sum(_overlap_bytes(one, *parts[node]) for one in left)
                        continue
                    if node not in of_box:
                        of_box[node] = _overlap_bytes(box, *parts[node])
                    found[name] += of_box[node]
        return {name: num_bytes for name, num_bytes in found.items() if num_bytes}

    def describe(self) -> str:
        """Return a short table of the bytes between nodes and those that targets read."""
        nodes = {name: self._ranks.node_names[node] for name, node in self._node_of.items()}
        return table(self.put, self.bytes_per_link.read, nodes)


def _by_place(numbered: tuple[StagedBox, int]) -> tuple[Any, ...]:
    part, number = numbered
    return part.run.box.bounds, number


def _weighted(runs: Sequence[Run], num_dims: int) -> tuple[IntArray, IntArray]:
    """Return the runs' bounds [runs, D, 2] and bytes per element over all their tensors [runs]."""
    bounds = np.array([run.box.bounds for run in runs], np.int64)
    weights = np.array([(run.stop - run.first) * run.itemsize for run in runs], np.int64)
    return bounds.reshape(len(runs), num_dims, 2), weights


def _overlap_bytes(box: Box, bounds: IntArray, weights: IntArray) -> int:
    own = np.array(box.bounds, np.int64).reshape(-1, 2)  # [D, 2]
    lengths = np.minimum(bounds[..., 1], own[:, 1]) - np.maximum(bounds[..., 0], own[:, 0])
    return int(np.maximum(lengths, 0).prod(axis=1) @ weights)
