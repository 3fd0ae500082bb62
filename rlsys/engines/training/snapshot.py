"""Snapshots of a rank's state in memory of another process, for a fast restart of the rank.

    rank ── write(step) ──► [ slot | slot | ... ] ── steps, read(step) ──► the replacement rank
                                    ├── hold(step) ──► a checkpoint, written during training
                                    └── open_snapshot(step) ──► ranks with another layout

In: the tensors of one rank, as views of what it trains. Out: the same bytes, in a file of shared
memory that outlives the rank; nothing is serialised or written to a disk. A write goes to the slot
with the oldest step that is not held. The slot is marked empty before the first byte and complete
after the last, so other slots stay complete if the writer is killed.

Each rank has a file of its own. A state of the whole trainer is a step that all files contain.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from rlsys.engines.training.snapshot_header import HEADER_BYTES, header_of
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import TensorShard, local_part
from rlsys.reallocation.transport.shared_memory import Bytes, MemoryGone, map_shared, open_shared
from rlsys.reallocation.transport.tensor_copies import copy_all

ALIGNMENT = 64

State = Mapping[str, torch.Tensor]


def snapshot_bytes(state: State, num_slots: int) -> int:
    """Return the size of a SnapshotFile for this state."""
    return HEADER_BYTES + num_slots * _slot_bytes(state)


class SnapshotFile:
    """Shared memory called `name` at `path`: `snapshot_bytes` of a state, initially zeros.

    Raises MemoryGone if its owner is dead, ValueError if it has snapshots of another rank, model or
    layout.
    """

    def __init__(self, path: str, name: str, state: State) -> None:
        self.name = name
        descriptor = open_shared(path, name, writable=True)
        try:
            # Populated now: the first touch of a page within a step costs that step time.
            buffer = map_shared(descriptor, getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(descriptor)
        num_slots, rest = divmod(len(buffer) - HEADER_BYTES, _slot_bytes(state))
        header, checksum = header_of(buffer), _checksum(state)
        if rest or header[0] not in (0, checksum):
            raise InvalidValue(
                name,
                rule="the file has snapshots of another model or layout",
                fix="Read only snapshots of the same rank, model and number of ranks.",
            )
        header[0] = checksum
        self._marks = header[1 : 1 + num_slots]
        slots = buffer[HEADER_BYTES:].reshape(num_slots, -1)
        self._slots = [_views(slot, state) for slot in slots]
        self._held: int | None = None

    @property
    def steps(self) -> set[int]:
        """Steps of the complete snapshots."""
        return {int(mark) - 1 for mark in self._marks if mark}

    def write(self, step: int, state: State) -> None:
        """Keep the state after `step` optimizer steps, replacing the oldest that is not held."""
        if step in self.steps:
            return
        assert step > max(self.steps, default=-1), "newer snapshots belong to another history"
        free = [slot for slot in range(len(self._slots)) if slot != self._held]
        slot = min(free, key=self._marks.__getitem__)
        self._marks[slot] = 0
        own = [local_part(tensor) for tensor in state.values()]
        copy_all([*self._slots[slot].values()], own)
        self._marks[slot] = step + 1

    def read(self, step: int, state: State) -> None:
        """Fill the tensors of `state`, and discard newer snapshots: the run continues from here."""
        slot = self._slot_of(step)
        self._marks[self._marks > step + 1] = 0
        own = [local_part(tensor) for tensor in state.values()]
        copy_all(own, [*self._slots[slot].values()])

    def hold(self, step: int) -> State:
        """Return the snapshot of a step, unchanged until `release`. Only one may be held."""
        assert self._held is None, "a snapshot is held already"
        self._held = self._slot_of(step)
        return self._slots[self._held]

    def release(self) -> None:
        """Allow the held snapshot to be overwritten."""
        self._held = None

    def clear(self) -> None:
        """Discard all snapshots."""
        self._marks[:] = 0

    def _slot_of(self, step: int) -> int:
        [slot] = np.flatnonzero(self._marks == step + 1)
        return int(slot)


@contextlib.contextmanager
def open_snapshot(
    path: str, name: str, held: Sequence[TensorShard], step: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Open the snapshot of `step` of another rank, with shards `held`, by name within the block.

    Raises MemoryGone if the snapshot is missing, or was replaced before the end of the block.
    """
    state = {one.name: torch.empty(one.box.shape, dtype=one.dtype, device="meta") for one in held}
    descriptor = open_shared(path, name, writable=False)
    try:
        # A private mapping, which torch accepts as writable; nothing is written to it.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=protection)
    finally:
        os.close(descriptor)
    buffer: Bytes = np.frombuffer(mapped, np.uint8)
    header = header_of(buffer)
    num_slots, rest = divmod(len(buffer) - HEADER_BYTES, _slot_bytes(state))
    assert (rest, header[0]) == (0, _checksum(state)), f"{name} is a file of another state"
    slots = np.flatnonzero(header[1 : 1 + num_slots] == step + 1)
    if slots.size:
        yield _views(buffer[HEADER_BYTES:].reshape(num_slots, -1)[slots[0]], state)
    if not slots.size or header[1 + slots[0]] != step + 1:
        raise MemoryGone(f"{name} no longer has a snapshot of step {step}.")


def _checksum(state: State) -> int:
    shapes = [(name, str(t.dtype), tuple(local_part(t).shape)) for name, t in state.items()]
    return zlib.crc32(repr(shapes).encode())


def _slot_bytes(state: State) -> int:
    return sum(_aligned_bytes(tensor) for tensor in state.values())


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-local_part(tensor).nbytes // ALIGNMENT) * ALIGNMENT


def _views(slot: Bytes, state: State) -> dict[str, torch.Tensor]:
    """Return a slot as tensors with a storage each, which torch.save writes without a copy."""
    views, offset = {}, 0
    for name, tensor in state.items():
        part = local_part(tensor)
        flat = torch.from_numpy(slot[offset : offset + part.nbytes])
        views[name] = flat.view(part.dtype).view(part.shape)
        offset += _aligned_bytes(tensor)
    return views
