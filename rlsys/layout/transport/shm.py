"""Weights through a file in shared memory: one writer, any number of readers on the node.

    write_weights(version, named tensors) ──► file + WeightManifest ──► open_weights(manifest)

The file holds the tensors one after another, each at a 64-byte boundary. Readers map it and see the
writer's bytes without a copy. A file is written once and never changed; the writer unlinks old
versions, which leaves readers that have mapped them unharmed.
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from rlsys.types import TensorEntry, WeightManifest

ALIGNMENT = 64


def shared_memory_dir() -> Path:
    """Where files live in memory: /dev/shm, or the temporary directory on systems without it."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK):
        return shm
    return Path(os.environ.get("TMPDIR", "/tmp"))


def write_weights(
    version: int, tensors: Iterable[tuple[str, torch.Tensor]], path: Path
) -> WeightManifest:
    """Write named tensors (any device) to a new file at `path`.

    Raises FileExistsError if the file exists: published weights are never changed.
    """
    named = [(name, tensor.detach()) for name, tensor in tensors]
    entries: dict[str, TensorEntry] = {}
    offset = 0
    for name, tensor in named:
        entries[name] = TensorEntry(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=offset,
        )
        num_bytes = tensor.numel() * tensor.element_size()
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, max(offset, 1))
        buffer = mmap.mmap(descriptor, max(offset, 1))
    finally:
        os.close(descriptor)
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    for (_, tensor), entry in zip(named, entries.values(), strict=True):
        _view(flat, entry).copy_(tensor)
    return WeightManifest(
        version=version,
        path=str(path),
        num_bytes=offset,
        entries=entries,
        checksum=zlib.crc32(buffer),
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
