"""Files in shared memory that belong to a process, and where they lie.

Shared memory outlives a process that is killed. So a file is locked by the one that made it, and
those without a living owner are removed by whoever comes next.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlsys.types import WeightManifest

WEIGHTS_PREFIX = "rlsys-weights-"


def shared_memory_dir() -> Path:
    """Where files live in memory: /dev/shm, or the temporary directory on systems without it."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK):
        return shm
    return Path(os.environ.get("TMPDIR", "/tmp"))


def reserve(path: Path, num_bytes: int, *, purpose: str) -> int:
    """The descriptor of a new file whose memory is there: a write to it can no longer fail. It is
    locked until descriptor and maps are gone.

    Raises FileExistsError, or OSError naming the purpose where memory is short; no file is left.
    """
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
    except OSError as error:
        path.unlink()
        os.close(descriptor)
        raise OSError(
            error.errno,
            f"cannot reserve {num_bytes / 2**30:.2f} GiB for {purpose} in {path.parent} "
            f"({error.strerror}), where {_free_gib(path.parent):.2f} GiB are free; enlarge it "
            "(Docker: --shm-size), or delete what lies there",
        ) from error
    return descriptor


def create(path: Path, num_bytes: int) -> mmap.mmap:
    """A new file for weights, mapped; see `reserve`."""
    descriptor = reserve(path, num_bytes, purpose="a version of the weights")
    try:
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def remove_orphans(directory: Path, prefix: str) -> None:
    """Remove files whose owner was killed: its lock ended with it."""
    for path in directory.glob(f"{prefix}*"):
        # It may belong to somebody else, be locked by a living owner, or go at any moment.
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            with path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _free_gib(directory: Path) -> float:
    return shutil.disk_usage(directory).free / 2**30


@contextlib.contextmanager
def local_copy(
    manifest: WeightManifest, content: npt.NDArray[np.uint8]
) -> Iterator[WeightManifest]:
    """A version's bytes, brought from another node, as a file of this one while the block runs."""
    directory = shared_memory_dir()
    remove_orphans(directory, WEIGHTS_PREFIX)
    path = directory / f"{Path(manifest.path).name}-copy-{os.getpid()}"
    with create(path, len(content)) as buffer:  # which holds the lock
        try:
            buffer.write(content.data)
            yield replace(manifest, path=str(path))
        finally:
            path.unlink()
