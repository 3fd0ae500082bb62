"""Published versions of the weights: a file each, the newest three kept.

A generation engine may still be reading the previous version when the next one is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlsys.layout.transport.owned_file import WEIGHTS_PREFIX, remove_orphans
from rlsys.layout.transport.shm import WeightFile
from rlsys.types import WeightManifest

NUM_KEPT = 3


class Publisher:
    """Files named `<prefix>-<serial>-v<version>` in `directory`; the prefix is one run's own."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self._directory = directory
        self._prefix = prefix
        self._serial = 0  # a version can be published twice: before and after a warm start
        self._published: deque[WeightFile] = deque()
        remove_orphans(directory, WEIGHTS_PREFIX)

    def create(
        self, version: int, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> WeightFile:
        """Room for a version. Raises OSError where memory is short."""
        path = self._directory / f"{self._prefix}-{self._serial:06d}-v{version}"
        file = WeightFile(path, tensors)
        self._serial += 1
        self._published.append(file)
        return file

    def commit(self, file: WeightFile, version: int) -> WeightManifest:
        """The manifest of a filled file; unlinks those that nobody may read any more."""
        manifest = file.manifest(version)
        self._unlink(len(self._published) - NUM_KEPT)
        return manifest

    def close(self) -> None:
        self._unlink(len(self._published))

    def _unlink(self, count: int) -> None:
        for _ in range(count):
            self._published.popleft().path.unlink(missing_ok=True)
