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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from rlsys.layout.alike import Group, Ranks, grouped
from rlsys.layout.grid import IntArray
from rlsys.layout.holdings import Box, Holder, Holding
from rlsys.layout.link_bytes import LinkBytes, table, without
from rlsys.layout.parts import Part, find_parts

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
    origin: Segment | Holding
    """In a buffer of the target's node, or what the target itself has as a source."""


@lru_cache(maxsize=4)
def plan(
    sources: tuple[Holder, ...], targets: tuple[Holder, ...], *, finest_bytes: int = FINEST_BYTES
) -> Plan:
    """What moves where so that each target has what it is to have.

    A rank of the same name on both sides is one rank: what it has, it does not lack. The last plans
    are kept, so that it costs little to ask for one again.

    Raises ValueError where the sides do not belong to the same model (a tensor that one of them
    lacks, other shapes or kinds of numbers), and for elements that no source has.
    """
    ranks = Ranks.of(sources, targets)
    groups = grouped(sources, targets, ranks)
    return Plan(
        sources, targets, ranks, groups, find_parts(groups, ranks, finest_bytes=finest_bytes)
    )


# By tensor, precision and box, what lies in a buffer.
_Buffer = dict[tuple[str, torch.dtype, Box], tuple[Part, Segment]]


class Plan:
    """What every rank and node has to do. Made by `plan`."""

    def __init__(
        self,
        sources: Sequence[Holder],
        targets: Sequence[Holder],
        ranks: Ranks,
        groups: Sequence[Group],
        parts: Iterable[Part],
    ) -> None:
        self._sources = {holder.rank: holder for holder in sources}
        self._targets = {holder.rank: holder for holder in targets}
        self._ranks = ranks
        self._groups = groups
        self._node_of = {name: ranks.nodes[number] for number, name in enumerate(ranks.names)}
        self._staged: dict[str, list[Part]] = {rank: [] for rank in self._sources}
        self._imported: dict[str, list[Part]] = {node: [] for node in ranks.node_names}
        self._readable: dict[tuple[int, int], list[Part]] = defaultdict(list)  # by node and group
        for part in parts:
            self._staged[ranks.names[part.rank]].append(part)
            for node in part.far:
                self._imported[ranks.node_names[node]].append(part)
            for node in (*part.far, *([ranks.nodes[part.rank]] if part.near else [])):
                self._readable[node, part.run.group].append(part)
        self._buffers: dict[str, _Buffer] = {}

    def staged(self, rank: str) -> list[Segment]:
        """What a source puts into its buffer, by offset: tensors in the sources' order."""
        return [segment for _, segment in self._buffer(rank, self._staged[rank]).values()]

    def imports(self, node: str) -> list[Import]:
        """What comes into a node, by its offset there: sender after sender, each in the order of
        its own buffer, so that neighbours can travel as one."""
        return [
            Import(self._of_rank(part)[key][1], here)
            for key, (part, here) in self._buffer(node, self._imported[node]).items()
        ]

    def reads(self, rank: str) -> list[Read]:
        """Where a target finds what it is to have: each element of each of its boxes once."""
        own: dict[str, list[Holding]] = defaultdict(list)
        if rank in self._sources:
            for one in self._sources[rank].holdings:
                own[one.name].append(one)
        # Of tensors that lie alike a rank lacks the same, and finds it in the same parts.
        overlaps: dict[tuple[int, Box], list[tuple[Part, Box]]] = {}
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
                overlaps[group, want.box] = self._overlaps(self._node_of[rank], group, left)
            for part, box in overlaps[group, want.box]:
                if part.run.first <= index < part.run.stop:
                    found.append(Read(number, box, self._segment(self._node_of[rank], part, want)))
        return found

    def _overlaps(self, node: int, group: int, boxes: Sequence[Box]) -> list[tuple[Part, Box]]:
        """What of some boxes lies in the buffers of a node."""
        return [
            (part, shared)
            for part in self._readable[node, group]
            for box in boxes
            if (shared := part.run.box.overlap(box)) is not None
        ]

    def _segment(self, node: int, part: Part, want: Holding) -> Segment:
        """Of a part, as it lies on a node."""
        if self._ranks.nodes[part.rank] == node:
            buffer = self._of_rank(part)
        else:
            name = self._ranks.node_names[node]
            buffer = self._buffer(name, self._imported[name])
        return buffer[want.name, want.dtype, part.run.box][1]

    def _of_rank(self, part: Part) -> _Buffer:
        """Of the rank that stages a part."""
        name = self._ranks.names[part.rank]
        return self._buffer(name, self._staged[name])

    def _buffer(self, owner: str, parts: Iterable[Part]) -> _Buffer:
        """What lies in the buffer of a rank or node, by offset."""
        if owner not in self._buffers:
            entries = []
            for part in parts:
                group, run = self._groups[part.run.group], part.run
                nodes = tuple(self._ranks.node_names[node] for node in sorted(part.far))
                entries += [
                    (part.rank, self._order[name], run.box, str(group.dtype), part, name, nodes)
                    for name in group.names[run.first : run.stop]
                ]
            laid_out: _Buffer = {}
            offset = 0
            for *_, part, name, nodes in sorted(entries, key=lambda entry: entry[:4]):
                segment = Segment(
                    buffer=owner,
                    offset=offset,
                    name=name,
                    dtype=self._groups[part.run.group].dtype,
                    box=part.run.box,
                    nodes=nodes if owner in self._staged else (),
                )
                laid_out[name, segment.dtype, segment.box] = part, segment
                offset += -(-segment.num_bytes // ALIGNMENT) * ALIGNMENT
            self._buffers[owner] = laid_out
        return self._buffers[owner]

    @cached_property
    def _places(self) -> dict[tuple[str, torch.dtype], tuple[int, int]]:
        """Of each tensor in each precision: its group, and its place there."""
        return {
            (name, group.dtype): (number, index)
            for number, group in enumerate(self._groups)
            for index, name in enumerate(group.names)
        }

    @cached_property
    def _order(self) -> dict[str, int]:
        """Of tensors, as the sources name them."""
        names = (one.name for holder in self._sources.values() for one in holder.holdings)
        return {name: number for number, name in enumerate(dict.fromkeys(names))}

    @cached_property
    def put(self) -> Mapping[tuple[str, str], int]:
        """Bytes that a rank puts into a node's memory, by both: it stages for its own, it sends to
        others. Without the gaps that alignment leaves."""
        found: dict[tuple[str, str], int] = defaultdict(int)
        for rank, parts in self._staged.items():
            for part in parts:
                for node in (*part.far, *([self._node_of[rank]] if part.near else [])):
                    found[rank, self._ranks.node_names[node]] += part.run.num_bytes
        return dict(found)

    @cached_property
    def bytes_per_link(self) -> LinkBytes:
        staged: dict[str, int] = defaultdict(int)
        imported: dict[str, int] = defaultdict(int)
        for (rank, node), num_bytes in self.put.items():
            is_near = self._ranks.node_names[self._node_of[rank]] == node
            (staged if is_near else imported)[node] += num_bytes
        return LinkBytes(staged=dict(staged), imported=dict(imported), read=self._bytes_read())

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
                        parts[node] = _weighted(self._readable[node, number], len(group.shape))
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


def _weighted(parts: Sequence[Part], num_dims: int) -> tuple[IntArray, IntArray]:
    """The bounds of some parts, [parts, D, 2], and the bytes that an element of all tensors of each
    has, [parts]."""
    runs = [part.run for part in parts]
    bounds = np.array([run.box.bounds for run in runs], np.int64)
    weights = np.array([(run.stop - run.first) * run.itemsize for run in runs], np.int64)
    return bounds.reshape(len(runs), num_dims, 2), weights


def _overlap_bytes(box: Box, bounds: IntArray, weights: IntArray) -> int:
    own = np.array(box.bounds, np.int64).reshape(-1, 2)  # [D, 2]
    lengths = np.minimum(bounds[..., 1], own[:, 1]) - np.maximum(bounds[..., 0], own[:, 0])
    return int(np.maximum(lengths, 0).prod(axis=1) @ weights)
