"""A rank's state in memory that another process owns, so that the rank's death costs seconds.

    rank ── write(step) ──► [ slot | slot ] ── steps, read(step) ──► the rank that takes its place

In: the tensors of one rank, as views of what it trains. Out: the same bytes, in a file of memory
that outlives the rank; nothing is serialised and nothing touches a disk. A write goes to the slot
that holds the older step. That slot counts as empty from before the first byte until after the
last, so the other one is whole at whatever moment the writer is killed.

Each rank has a file of its own. A state of the whole trainer is a step that all of them hold.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Mapping

import numpy as np
import torch

from rlsys.engines.training.sharding import local
from rlsys.layout.transport.shared_memory import map_shared, open_shared

# [first slot: step + 1, or 0 while it is empty; second slot; checksum of names and shapes] int64
HEADER_BYTES = 4096
ALIGNMENT = 64

State = Mapping[str, torch.Tensor]


def snapshot_bytes(state: State) -> int:
    """Size of a SnapshotFile for this state."""
    return HEADER_BYTES + 2 * _slot_bytes(state)


class SnapshotFile:
    """The shared memory of this name at `path`, which has `snapshot_bytes` of this state and began
    as zeros.

    Raises MemoryGone if its owner is dead, ValueError if it holds snapshots of another state: of
    another rank, model or layout.
    """

    def __init__(self, path: str, name: str, state: State) -> None:
        descriptor = open_shared(path, name, writable=True)
        try:
            # Mapped at once: a page that is first touched in a step costs that step time.
            buffer = map_shared(descriptor, getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(descriptor)
        self._header = buffer[:HEADER_BYTES].view(np.int64)[:3]
        shapes = [(name, str(t.dtype), tuple(local(t).shape)) for name, t in state.items()]
        checksum = zlib.crc32(repr(shapes).encode())
        if len(buffer) != snapshot_bytes(state) or self._header[2] not in (0, checksum):
            raise ValueError(
                f"{name} holds snapshots of another model or layout; a rank reads only those that "
                "the same rank of the same model and number of ranks wrote."
            )
        self._header[2] = checksum
        flat = torch.from_numpy(buffer)[HEADER_BYTES:]
        self._slots = [_views(slot, state) for slot in flat.split(_slot_bytes(state))]

    @property
    def steps(self) -> set[int]:
        """Of the whole snapshots."""
        return {int(mark) - 1 for mark in self._header[:2] if mark}

    def write(self, step: int, state: State) -> None:
        """Keep the state after `step` optimizer steps, and that of the newest step before it."""
        if step in self.steps:
            return
        assert step > max(self.steps, default=-1), "newer snapshots belong to another history"
        slot = int(np.argmin(self._header[:2]))
        self._header[slot] = 0
        torch._foreach_copy_(self._slots[slot], [local(tensor) for tensor in state.values()])
        self._header[slot] = step + 1

    def read(self, step: int, state: State) -> None:
        """Fill the tensors of `state`. Forgets newer snapshots: another history begins here."""
        [slot] = np.flatnonzero(self._header[:2] == step + 1)
        for newer in np.flatnonzero(self._header[:2] > step + 1):
            self._header[newer] = 0
        torch._foreach_copy_([local(tensor) for tensor in state.values()], self._slots[slot])

    def clear(self) -> None:
        self._header[:2] = 0


def _slot_bytes(state: State) -> int:
    return sum(_aligned_bytes(tensor) for tensor in state.values())


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-local(tensor).nbytes // ALIGNMENT) * ALIGNMENT


def _views(flat: torch.Tensor, state: State) -> list[torch.Tensor]:
    """Of a slot's bytes, in the state's order."""
    views, offset = [], 0
    for tensor in state.values():
        part = local(tensor)
        views.append(flat[offset : offset + part.nbytes].view(part.dtype).view(part.shape))
        offset += _aligned_bytes(tensor)
    return views
