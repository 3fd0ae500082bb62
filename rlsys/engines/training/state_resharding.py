"""Moving a trainer's state to ranks with another layout, from snapshots of the previous ranks.

    files of snapshots ──┐                 ┌── same node: read in place, in the node's memory
                         ├─► plan ─► rank ─┤
    holdings of ranks  ──┘                 └── other nodes: one WeightDelta from each sender

The files are those of one step and together contain every element of the new state. Elements on a
rank's own node are read there; others are sent once for all ranks of the node. A WeightDelta has a
digest of each of its buckets, like weights that are sent to replicas.
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
from rlsys.reallocation.transport.staging import Content, pack
from rlsys.reallocation.transport.tensor_copies import copy_parts
from rlsys.reallocation.transport.weight_deltas import WeightDelta
from rlsys.types import WeightShare


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A file of snapshots that outlived the rank that wrote it."""

    path: str
    name: str
    holder: Holder
    """The state in the file, and its node; its rank is the file's own name."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """Input of the plan, which all ranks and all nodes with files compute alike."""

    step: int
    files: tuple[Kept, ...]
    targets: tuple[Holder, ...]

    @property
    def plan(self) -> ReallocationPlan:
        """The plan. Raises ValueError if no file has some element."""
        return plan(tuple(file.holder for file in self.files), self.targets)

    @property
    def senders(self) -> Mapping[str, Sequence[str]]:
        """Nodes that send a WeightDelta, by receiving node."""
        node_of = {file.holder.rank: file.holder.node for file in self.files}
        found: dict[str, set[str]] = defaultdict(set)
        for file, node in self.plan.put:
            if node_of[file] != node:
                found[node].add(node_of[file])
        return {node: sorted(senders) for node, senders in found.items()}

    @property
    def bytes_sent(self) -> int:
        """Bytes that are sent between nodes."""
        return sum(self.plan.bytes_per_link.imported.values())


def find_move(
    files: Sequence[tuple[Kept, Collection[int]]], targets: Sequence[Holder], at_most: int
) -> Move | None:
    """Return the move of the newest step, up to `at_most`, that the files contain completely.

    `files` come with the steps of their complete snapshots. Returns None if there is no such step.
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
        except ValueError:  # a shard or a stage is missing
            continue
        return move
    return None


def packed(move: Move, sender: str, receiver: str) -> WeightDelta:
    """Return the elements in `sender`'s files that `receiver` lacks. Raises MemoryGone."""
    with ExitStack() as opened:
        local = _Files(move, sender, opened)
        imports = [one.there for one in move.plan.imports(receiver) if one.there.buffer in local]
        segments, end = [], 0
        for one in imports:
            segments.append(replace(one, offset=end))
            end += -(-one.num_bytes // ALIGNMENT) * ALIGNMENT
        share = WeightShare(
            version=move.step, rank=0, node=sender, path="", num_bytes=0, checksum=0
        )
        share, content = pack(segments, share, lambda one: local.read(one, one.box))
    return WeightDelta(share=share, content=content)


def fill(move: Move, rank: str, state: State, weight_deltas: Iterable[WeightDelta]) -> None:
    """Fill a rank's state from files of its node and from `weight_deltas` of other nodes.

    Raises MemoryGone, DamagedWeightsError.
    """
    (target,) = (target for target in move.targets if target.rank == rank)
    with ExitStack() as opened:
        local, remote = _Files(move, target.node, opened), _received(weight_deltas)
        pairs = []
        for read in move.plan.reads(rank):
            want, origin = target.holdings[read.want], read.origin
            assert isinstance(origin, Segment), "a new rank has nothing of its own"
            if origin.buffer in local:
                source = local.read(origin, read.box)
            else:
                source = remote[origin.name, origin.box][read.box.slices_in(origin.box)]
            into = local_part(state[want.name])
            pairs.append((into[read.box.slices_in(want.box)], source))
        copy_parts(pairs)


class _Files:
    """Open files of a node. Any thread may read them."""

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
        """Return a part of a segment of one file, as a view."""
        outer = self._boxes[segment.buffer][segment.name]
        return self._tensors[segment.buffer][segment.name][box.slices_in(outer)]


def _received(weight_deltas: Iterable[WeightDelta]) -> dict[tuple[str, Box], torch.Tensor]:
    """Verify what other nodes sent and return it by name and box."""
    found: dict[tuple[str, Box], torch.Tensor] = {}
    for weight_delta in weight_deltas:
        assert not isinstance(weight_delta.content, Changes), "a state is sent whole"
        content = Content(weight_delta.share, weight_delta.content)
        content.verify()
        found |= {(segment.name, segment.box): part for segment, part in content.parts()}
    return found
