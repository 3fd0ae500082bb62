"""Weights through a file in shared memory: one writer, any number of readers on the node.

    write_weights(version, named tensors) ──► file + WeightManifest ──► open_weights(manifest)

The file holds the tensors one after another, each at a 64-byte boundary. Readers map it and see the
writer's bytes without a copy. A file is written once and never changed; the writer unlinks old
versions, which leaves readers that have mapped them unharmed. Shared memory outlives a process that
is killed, so a file is locked by the one that made it, and those without a living owner are removed
by whoever comes next.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rlsys.types import TensorEntry, WeightManifest

ALIGNMENT = 64

# Of files that remove_orphans may remove.
PREFIX = "rlsys-weights-"


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
        self._buffer = _create(path, max(self._num_bytes, 1))
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


def _create(path: Path, num_bytes: int) -> mmap.mmap:
    """A mapped new file whose memory is reserved: a write to it can no longer fail. It is locked
    until the map is gone."""
    # Locked under another name first: nobody may see it without its lock.
    unlocked = path.with_name(f".{path.name}-{os.getpid()}")
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(unlocked, path)
    except OSError:
        os.close(descriptor)
        raise
    finally:
        unlocked.unlink()
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.ftruncate(descriptor, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    except OSError as error:
        path.unlink()
        raise OSError(
            error.errno,
            f"cannot publish {num_bytes / 2**30:.2f} GiB of weights to {path.parent} "
            f"({error.strerror}), where {_free_gib(path.parent):.2f} GiB are free; enlarge it "
            "(Docker: --shm-size) or delete what lies there",
        ) from error
    finally:
        os.close(descriptor)


def remove_orphans(directory: Path) -> None:
    """Remove weights whose owner was killed: its lock ended with it."""
    for path in directory.glob(f"{PREFIX}*"):
        # It may belong to somebody else, be locked by a living owner, or go at any moment.
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            with path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _free_gib(directory: Path) -> float:
    return shutil.disk_usage(directory).free / 2**30


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


@contextlib.contextmanager
def local_copy(
    manifest: WeightManifest, content: npt.NDArray[np.uint8]
) -> Iterator[WeightManifest]:
    """A version's bytes, brought from another node, as a file of this one while the block runs."""
    directory = shared_memory_dir()
    remove_orphans(directory)
    path = directory / f"{Path(manifest.path).name}-copy-{os.getpid()}"
    with _create(path, len(content)) as buffer:  # which holds the lock
        try:
            buffer.write(content.data)
            yield replace(manifest, path=str(path))
        finally:
            path.unlink()
