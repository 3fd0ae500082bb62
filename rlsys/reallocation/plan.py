"""Parameter reallocation: what moves where, from any layout of a model to any other.

    sources: by rank, the boxes that it has ──┐
                                              ├─► plan ─► each source stages segments of its boxes,
    targets: by rank, the boxes that it wants ┘           each node imports segments of other nodes,
                                                          each target reads boxes of its segments

The ranks of a node share memory: what one of them stages, all targets there read. No element is
staged by two ranks of a node, none that no target lacks; what a target has it does not read. What
no rank of a node has comes in from one of another node, once for all targets there. Where several
ranks have the same, they share the work evenly.

A plan knows shapes and no numbers. It follows from its arguments alone: ranks that plan with the
same arguments find the same plan.
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
# What several ranks have is cut into pieces of at least so many bytes to share the work.
FINEST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a tensor in a buffer, row by row."""

    buffer: str  # of the rank that stages it, or of the node that imports it
    offset: int  # in bytes, a multiple of ALIGNMENT
    name: str
    dtype: torch.dtype  # as it is wanted: who stages it converts it
    box: Box
    nodes: tuple[str, ...] = ()  # to which the rank sends it

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Import:
    """A segment that comes in from a rank of another node."""

    there: Segment
    here: Segment


@dataclass(frozen=True, slots=True)
class Read:
    """A part of what a target is to have."""

    want: int  # its place among what the target is to have
    box: Box  # of the whole tensor, within that holding's
    origin: Segment | TensorShard
    """In a buffer of the target's node, or what the target itself has as a source."""


@lru_cache(maxsize=4)
def plan(
    sources: tuple[Holder, ...], targets: tuple[Holder, ...], *, finest_bytes: int = FINEST_BYTES
) -> ReallocationPlan:
    """What moves where so that each target has what it is to have.

    A rank of the same name on both sides is one rank: what it has, it does not lack. The last plans
    are kept, so that it costs little to ask for one again.

    Raises ValueError where the sides do not belong to the same model (a tensor that one of them
    lacks, other shapes or kinds of numbers), and for elements that no source has.
    """
    ranks = RankSet.of(sources, targets)
    groups = grouped(sources, targets, ranks)
    return ReallocationPlan(
        sources, targets, ranks, groups, find_parts(groups, ranks, finest_bytes=finest_bytes)
    )


class _Buffer(NamedTuple):
    """Where what a rank stages, or a node imports, lies in its buffer."""

    segments: IntArray  # [segments, 2], by offset: number of a part, place of a tensor in its group
    offsets: Mapping[int, IntArray]  # by part, of each of its tensors


class ReallocationPlan:
    """What every rank and node has to do. Made by `plan`."""

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
        # Numbers of parts: by the rank or node in whose buffer they lie; by node and group.
        self._lying: dict[str, list[int]] = {name: [] for name in (*ranks.names, *ranks.node_names)}
        self._readable: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, part in enumerate(parts):
            self._lying[ranks.names[part.rank]].append(number)
            for node in part.far:
                self._lying[ranks.node_names[node]].append(number)
            for node in (*part.far, *([ranks.nodes[part.rank]] if part.near else [])):
                self._readable[node, part.run.group].append(number)
        self._buffers: dict[str, _Buffer] = {}
        self._importing: dict[int, tuple[str, ...]] = {}

    def staged(self, rank: str) -> list[Segment]:
        """What a source puts into its buffer, by offset: tensors in the sources' order."""
        assert rank in self._sources, f"{rank} is no source"
        segments = self._buffer(rank).segments.tolist()
        return [self._segment(rank, number, index) for number, index in segments]

    def imports(self, node: str) -> list[Import]:
        """What comes into a node, by its offset there: sender after sender, each in the order of
        its own buffer, so that neighbours can travel as one.
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
        """Where a target finds what it is to have: each element of each of its boxes once."""
        own: dict[str, list[TensorShard]] = defaultdict(list)
        if rank in self._sources:
            for one in self._sources[rank].holdings:
                own[one.name].append(one)
        # Of tensors that lie alike a rank lacks the same, and finds it in the same parts.
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
        """What of some boxes lies in the buffers of a node, by numbers of parts."""
        return [
            (number, shared)
            for number in self._readable[node, group]
            for box in boxes
            if (shared := self._parts[number].run.box.overlap(box)) is not None
        ]

    def _owner(self, node: int, number: int) -> str:
        """Of the buffer in which the ranks of a node find a part."""
        rank = self._parts[number].rank
        is_near = self._ranks.nodes[rank] == node
        return self._ranks.names[rank] if is_near else self._ranks.node_names[node]

    def _segment(self, owner: str, number: int, index: int) -> Segment:
        """A part of a tensor, which is named by its place in its group, in a buffer."""
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
        """That import a part."""
        if number not in self._importing:
            far = sorted(self._parts[number].far)
            self._importing[number] = tuple(self._ranks.node_names[node] for node in far)
        return self._importing[number]

    def _buffer(self, owner: str) -> _Buffer:
        if owner not in self._buffers:
            self._buffers[owner] = self._laid_out(self._lying[owner])
        return self._buffers[owner]

    def _laid_out(self, numbers: Sequence[int]) -> _Buffer:
        """Parts [P] in a buffer: by rank, then by tensor, then by place in the tensor."""
        if not numbers:
            return _Buffer(np.empty((0, 2), np.int64), {})
        parts = sorted(((self._parts[number], number) for number in numbers), key=_by_place)
        runs = [part.run for part, _ in parts]
        counts = [run.stop - run.first for run in runs]  # [P]
        which = np.repeat(np.arange(len(parts)), counts)  # [segments], as the next ones
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
        """Of each tensor in each precision: its group, and its place there."""
        return {
            (name, group.dtype): (number, index)
            for number, group in enumerate(self._groups)
            for index, name in enumerate(group.names)
        }

    @cached_property
    def _order(self) -> list[IntArray]:
        """By group: of its tensors, their places among all, as the sources name them."""
        names = (one.name for holder in self._sources.values() for one in holder.holdings)
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return [np.array([places[name] for name in group.names]) for group in self._groups]

    @cached_property
    def put(self) -> Mapping[tuple[str, str], int]:
        """Bytes that a rank puts into a node's memory, by both: it stages for its own, it sends to
        others. Without the gaps that alignment leaves.
        """
        found: dict[tuple[str, str], int] = defaultdict(int)
        for part in self._parts:
            home = [self._ranks.nodes[part.rank]] if part.near else []
            for node in (*part.far, *home):
                link = self._ranks.names[part.rank], self._ranks.node_names[node]
                found[link] += part.run.num_bytes
        return dict(found)

    @cached_property
    def bytes_per_link(self) -> Traffic:
        staged: dict[str, int] = defaultdict(int)
        imported: dict[str, int] = defaultdict(int)
        for (rank, node), num_bytes in self.put.items():
            is_near = self._ranks.node_names[self._node_of[rank]] == node
            (staged if is_near else imported)[node] += num_bytes
        return Traffic(staged=dict(staged), imported=dict(imported), read=self._bytes_read())

    def _bytes_read(self) -> dict[str, int]:
        """By target."""
        found: dict[str, int] = defaultdict(int)
        for number, group in enumerate(self._groups):
            parts: dict[int, tuple[IntArray, IntArray]] = {}  # by node
            for box, wanting in group.wanted.items():
                of_box: dict[int, int] = {}  # by node, for ranks that have nothing of it
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
        """A short table: how much goes from which node to which, and what targets read."""
        nodes = {name: self._ranks.node_names[node] for name, node in self._node_of.items()}
        return table(self.put, self.bytes_per_link.read, nodes)


def _by_place(numbered: tuple[StagedBox, int]) -> tuple[Any, ...]:
    part, number = numbered
    return part.run.box.bounds, number


def _weighted(runs: Sequence[Run], num_dims: int) -> tuple[IntArray, IntArray]:
    """Their bounds, [runs, D, 2], and the bytes of an element of all tensors of each, [runs]."""
    bounds = np.array([run.box.bounds for run in runs], np.int64)
    weights = np.array([(run.stop - run.first) * run.itemsize for run in runs], np.int64)
    return bounds.reshape(len(runs), num_dims, 2), weights


def _overlap_bytes(box: Box, bounds: IntArray, weights: IntArray) -> int:
    own = np.array(box.bounds, np.int64).reshape(-1, 2)  # [D, 2]
    lengths = np.minimum(bounds[..., 1], own[:, 1]) - np.maximum(bounds[..., 0], own[:, 0])
    return int(np.maximum(lengths, 0).prod(axis=1) @ weights)
