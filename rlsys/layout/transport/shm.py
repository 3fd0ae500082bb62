"""Weights through a file in shared memory: one writer, any number of readers on the node.

    write_weights(version, named tensors) ──► file + WeightManifest ──► open_weights(manifest)

The file holds the tensors one after another, each at a 64-byte boundary. Readers map it and see the
writer's bytes without a copy. A file is written once and never changed; the writer unlinks old
versions, which leaves readers that have mapped them unharmed.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from rlsys.layout.transport.owned_file import create
from rlsys.types import TensorEntry, WeightManifest

ALIGNMENT = 64


def write_weights(
    version: int, tensors: Iterable[tuple[str, torch.Tensor]], path: Path
) -> WeightManifest:
    """Write named tensors (any device) to a new file at `path`.

    Raises FileExistsError if the file exists: published weights are never changed. Raises OSError,
    and leaves no file, where memory is short.
    """
    named = [(name, tensor.detach()) for name, tensor in tensors]
    file = WeightFile(path, {name: (tensor.dtype, tensor.shape) for name, tensor in named})
    for name, tensor in named:
        file.put(name, tensor)
    return file.manifest(version)


class WeightFile:
    """A new file with room for tensors that come one at a time, each exactly once.

    For models that are gathered piece by piece: no second copy of all weights ever exists.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> None:
        self.path = path
        self._entries: dict[str, TensorEntry] = {}
        self._num_bytes = 0
        for name, (dtype, shape) in tensors.items():
            self._entries[name] = TensorEntry(
                dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), offset=self._num_bytes
            )
            num_bytes = math.prod(shape) * dtype.itemsize
            self._num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._buffer = create(path, max(self._num_bytes, 1))
        self._flat = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._missing = set(self._entries)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor of any device, converted to the file's dtype."""
        self._missing.remove(name)
        _view(self._flat, self._entries[name]).copy_(tensor)

    def manifest(self, version: int) -> WeightManifest:
        assert not self._missing, f"{self.path} lacks {sorted(self._missing)[:4]}"
        return WeightManifest(
            version=version,
            path=str(self.path),
            num_bytes=self._num_bytes,
            entries=self._entries,
            checksum=zlib.crc32(self._buffer),
        )


def open_weights(manifest: WeightManifest, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
    """Map a published file; the tensors are views that must not be written to.

    Raises ValueError if the bytes are not those that were published.
    """
    with open(manifest.path, "rb") as file:
        buffer = mmap.mmap(
            file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    if len(buffer) < manifest.num_bytes:
        raise ValueError(
            f"weights file {manifest.path} has {len(buffer)} bytes, version {manifest.version} "
            f"needs {manifest.num_bytes}: it was cut off; publish the version again."
        )
    if verify and (found := zlib.crc32(buffer)) != manifest.checksum:
        raise ValueError(
            f"weights file {manifest.path} has checksum {found:#010x}, version {manifest.version} "
            f"was published with {manifest.checksum:#010x}: the bytes changed; publish it again."
        )
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    return {name: _view(flat, entry) for name, entry in manifest.entries.items()}


def _view(flat: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    num_bytes = math.prod(entry.shape) * dtype.itemsize
    return flat[entry.offset : entry.offset + num_bytes].view(dtype).view(entry.shape)
