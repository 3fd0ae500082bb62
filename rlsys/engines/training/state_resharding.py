"""A trainer's state on its way to ranks that are laid out otherwise, out of what those before kept.

    files of snapshots ──┐                 ┌── near: read where they lie, in the node's memory
                         ├─► plan ─► rank ─┤
    holdings of ranks  ──┘                 └── far: parcels, one from each node that sends

The files are those of one step, and together have each element that a rank is to have. Elements
that a rank's node has are read there; others come in once for all ranks of the node. A parcel has a
digest of each of its buckets, as weights have that travel to replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from rlsys.engines.training.snapshot import State, open_snapshot
from rlsys.reallocation.plan import ALIGNMENT, ReallocationPlan, Segment, plan
from rlsys.reallocation.shards import Box, Holder, local_part
from rlsys.reallocation.transport.changed_bytes import Changes
from rlsys.reallocation.transport.staging import Content, copy_parts, pack
from rlsys.reallocation.transport.weight_deltas import WeightDelta
from rlsys.types import WeightShare


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A file of snapshots, which outlived the rank that wrote it."""

    path: str
    name: str
    holder: Holder
    """What of a state lies in it, and on which node; its rank is the file's own name."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """What every rank and every node with a file has to know; whoever asks finds the same plan."""

    step: int
    files: tuple[Kept, ...]
    targets: tuple[Holder, ...]

    @property
    def plan(self) -> ReallocationPlan:
        """Raises ValueError for elements that no file has."""
        return plan(tuple(file.holder for file in self.files), self.targets)

    @property
    def senders(self) -> Mapping[str, Sequence[str]]:
        """By node with ranks, those that send it a parcel."""
        node_of = {file.holder.rank: file.holder.node for file in self.files}
        found: dict[str, set[str]] = defaultdict(set)
        for file, node in self.plan.put:
            if node_of[file] != node:
                found[node].add(node_of[file])
        return {node: sorted(senders) for node, senders in found.items()}

    @property
    def bytes_sent(self) -> int:
        """Between nodes."""
        return sum(self.plan.bytes_per_link.imported.values())


def find_move(
    files: Sequence[tuple[Kept, Collection[int]]], targets: Sequence[Holder], at_most: int
) -> Move | None:
    """From files with the steps that are whole in each, of the newest step, of at most so many, of
    which the files together have all that the targets are to have; None where there is none.
    """
    steps = {step for _, whole in files for step in whole if step <= at_most}
    for step in sorted(steps, reverse=True):
        move = Move(
            step=step,
            files=tuple(file for file, whole in files if step in whole),
            targets=tuple(targets),
        )
        try:
            _ = move.plan
        except ValueError:  # a shard or a stage is gone
            continue
        return move
    return None


def packed(move: Move, sender: str, receiver: str) -> WeightDelta:
    """What the files of one node give the ranks of another, which lack it. Raises MemoryGone."""
    with ExitStack() as opened:
        near = _Files(move, sender, opened)
        imports = [one.there for one in move.plan.imports(receiver) if one.there.buffer in near]
        segments, end = [], 0
        for one in imports:
            segments.append(replace(one, offset=end))
            end += -(-one.num_bytes // ALIGNMENT) * ALIGNMENT
        share = WeightShare(
            version=move.step, rank=0, node=sender, path="", num_bytes=0, checksum=0
        )
        share, content = pack(segments, share, lambda one: near.read(one, one.box))
    return WeightDelta(share=share, content=content)


def fill(move: Move, rank: str, state: State, weight_deltas: Iterable[WeightDelta]) -> None:
    """Write each element of a rank's state, from its node's files and what has come in. Raises
    MemoryGone, DamagedWeightsError.
    """
    (target,) = (target for target in move.targets if target.rank == rank)
    with ExitStack() as opened:
        near, far = _Files(move, target.node, opened), _arrived(weight_deltas)
        pairs = []
        for read in move.plan.reads(rank):
            want, origin = target.holdings[read.want], read.origin
            assert isinstance(origin, Segment), "a new rank has nothing of its own"
            if origin.buffer in near:
                source = near.read(origin, read.box)
            else:
                source = far[origin.name, origin.box][read.box.slices_in(origin.box)]
            into = local_part(state[want.name])
            pairs.append((into[read.box.slices_in(want.box)], source))
        copy_parts(pairs)


class _Files:
    """Those of a node, open within a block; any thread may read."""

    def __init__(self, move: Move, node: str, opened: ExitStack) -> None:
        self._tensors: dict[str, Mapping[str, torch.Tensor]] = {}
        self._boxes: dict[str, Mapping[str, Box]] = {}
        for file in move.files:
            held = file.holder.holdings
            if file.holder.node == node:
                snapshot = open_snapshot(file.path, file.name, held, move.step)
                self._tensors[file.name] = opened.enter_context(snapshot)
                self._boxes[file.name] = {one.name: one.box for one in held}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, segment: Segment, box: Box) -> torch.Tensor:
        """A part of what the plan finds in one of them, where it lies."""
        outer = self._boxes[segment.buffer][segment.name]
        return self._tensors[segment.buffer][segment.name][box.slices_in(outer)]


def _arrived(weight_deltas: Iterable[WeightDelta]) -> dict[tuple[str, Box], torch.Tensor]:
    """By name and box; verified."""
    found: dict[tuple[str, Box], torch.Tensor] = {}
    for weight_delta in weight_deltas:
        assert not isinstance(weight_delta.content, Changes), "a state travels whole"
        content = Content(weight_delta.share, weight_delta.content)
        content.verify()
        found |= {(segment.name, segment.box): part for segment, part in content.parts()}
    return found
