"""Weights through shared memory: one writer, any number of readers on the node.

    WeightFile(version, shapes) ── put each tensor ──► manifest ──► held(manifest) ──► open_weights

The file holds the tensors one after another, each at a 64-byte boundary. Readers map it and see the
writer's bytes without a copy. A file is written once and never changed. The writer closes versions
that are no longer needed, or dies; a reader that has opened one by then keeps it (`held`), and one
that comes later gets MemoryGone: a newer version is there, or soon will be.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rlsys.layout.transport.shared_memory import (
    Bytes,
    SharedMemory,
    open_shared,
    path_of,
)
from rlsys.types import TensorEntry, WeightManifest

ALIGNMENT = 64


class WeightFile:
    """Room for one version's tensors, which come one at a time, each exactly once.

    For models that are gathered piece by piece: no second copy of all weights ever exists. Raises
    OSError where memory is short.
    """

    def __init__(
        self, version: int, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> None:
        self._version = version
        self._entries, self._num_bytes = _lay_out(tensors)
        self._memory = SharedMemory(
            _name(version), max(self._num_bytes, 1), purpose="a version of the weights"
        )
        self._bytes = self._memory.map()
        self._flat = torch.from_numpy(self._bytes)
        self._missing = set(self._entries)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor of any device, converted to the file's dtype."""
        self._missing.remove(name)
        _view(self._flat, self._entries[name]).copy_(tensor)

    def manifest(self) -> WeightManifest:
        assert not self._missing, f"version {self._version} lacks {sorted(self._missing)[:4]}"
        return WeightManifest(
            version=self._version,
            path=self._memory.path,
            num_bytes=self._num_bytes,
            entries=self._entries,
            checksum=zlib.crc32(self._bytes.data),
        )

    def close(self) -> None:
        """Nobody can open this version any more."""
        self._memory.close()


def weights_bytes(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> int:
    """What a version of these takes."""
    return _lay_out(tensors)[1]


def write_weights(
    version: int, tensors: Iterable[tuple[str, torch.Tensor]], path: Path
) -> WeightManifest:
    """Named tensors as an ordinary file, which stays until somebody removes it.

    Raises FileExistsError if there is one: published weights are never changed.
    """
    named = [(name, tensor.detach()) for name, tensor in tensors]
    file = WeightFile(version, {name: (tensor.dtype, tensor.shape) for name, tensor in named})
    with contextlib.closing(file):
        for name, tensor in named:
            file.put(name, tensor)
        manifest = file.manifest()
        with path.open("xb") as copy:
            copy.write(read_weights(manifest).data)
    return replace(manifest, path=str(path))


@contextlib.contextmanager
def held(manifest: WeightManifest) -> Iterator[WeightManifest]:
    """The version, to be opened for as long as the block runs, whatever its writer does.

    Raises MemoryGone if it is too late.
    """
    descriptor = open_shared(manifest.path, _name(manifest.version), writable=False)
    try:
        yield replace(manifest, path=path_of(descriptor))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def local_copy(manifest: WeightManifest, content: Bytes) -> Iterator[WeightManifest]:
    """A version's bytes, brought from another node, as memory of this one while the block runs."""
    memory = SharedMemory(
        _name(manifest.version), len(content), purpose="a copy of a version of the weights"
    )
    try:
        memory.map()[:] = content
        yield replace(manifest, path=memory.path)
    finally:
        memory.close()


def read_weights(manifest: WeightManifest) -> Bytes:
    """A copy of a version's bytes, to be sent to another node. Raises MemoryGone."""
    with held(manifest) as local:
        return np.fromfile(local.path, np.uint8)


def open_weights(manifest: WeightManifest, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
    """Map a published version; the tensors are views that must not be written to.

    Raises MemoryGone if it has been closed, ValueError if the bytes are not those that were
    published.
    """
    descriptor = open_shared(manifest.path, _name(manifest.version), writable=False)
    try:
        buffer = mmap.mmap(
            descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)
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


def _name(version: int) -> str:
    return f"rlsys-weights-v{version}"


def _lay_out(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
) -> tuple[dict[str, TensorEntry], int]:
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        entries[name] = TensorEntry(
            dtype=str(dtype).removeprefix("torch."), shape=tuple(shape), offset=end
        )
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return entries, end


def _view(flat: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    num_bytes = math.prod(entry.shape) * dtype.itemsize
    return flat[entry.offset : entry.offset + num_bytes].view(dtype).view(entry.shape)
