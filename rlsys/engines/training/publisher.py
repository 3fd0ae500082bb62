"""Published versions of the weights: the newest, and the one before it until the next is written.

A replica opens a version as soon as it is told of it and then keeps it itself, for however long it
waits with loading it. So the version before the newest is there for those that were told of it just
now; one that comes later still gets MemoryGone, and takes a newer version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlsys.layout.transport.available_memory import require_memory
from rlsys.layout.transport.shm import WeightFile, weights_bytes
from rlsys.types import WeightManifest

NUM_KEPT = 2


class Publisher:
    """Of one trainer, in the process of its first rank. Raises OSError where memory is short for
    the versions that it will keep."""

    def __init__(self, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> None:
        self._tensors = tensors
        self._published: list[WeightFile] = []
        require_memory(
            NUM_KEPT * weights_bytes(tensors), purpose=f"{NUM_KEPT} versions of the weights"
        )

    def create(self, version: int) -> WeightFile:
        """Room for a version; closes the one before the newest. Raises OSError where memory is
        short."""
        self._close(len(self._published) - NUM_KEPT + 1)
        return WeightFile(version, self._tensors)

    def commit(self, file: WeightFile) -> WeightManifest:
        """The manifest of a filled file, which is the newest version from now on."""
        manifest = file.manifest()
        self._published.append(file)
        return manifest

    def close(self) -> None:
        self._close(len(self._published))

    def _close(self, count: int) -> None:
        for _ in range(count):
            self._published.pop(0).close()
