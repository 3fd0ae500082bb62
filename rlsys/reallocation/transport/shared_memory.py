"""Memory that processes of one node and one user share, and that the kernel takes back by itself.

    SharedMemory(name, bytes, purpose) ──► path ──► open_shared(path, name): a file descriptor

It is a file in no directory (memfd): others reach it through its owner's entry in /proc while the
owner holds it, and keep what they have opened or mapped, whatever becomes of the owner. The last
process that lets go of it frees it, also by dying: nothing is ever left to clean up, and the size
of /dev/shm plays no part. Linux only.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from rlsys.common.atomic_files import size_limit
from rlsys.common.available_memory import require_memory

Bytes = npt.NDArray[np.uint8]


class MemoryGone(FileNotFoundError):
    """The owner has closed this memory, or is dead."""


class SharedMemory:
    """Bytes, zero at first, whose pages are there: a write to them can no longer fail, and nobody
    can make it shorter.

    `name` tells those that open it later whether it is still the same. Raises OSError, which names
    the purpose and what is missing, where memory is short.
    """

    def __init__(self, name: str, num_bytes: int, *, purpose: str) -> None:
        require_memory(num_bytes, purpose=purpose)
        self.name = name
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            # Whoever has mapped what another cuts off is killed when it looks there.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            self.close()
            why = size_limit() if error.errno == errno.EFBIG else error.strerror
            raise OSError(
                error.errno, f"cannot take {num_bytes} bytes for {purpose}: {why}."
            ) from error

    @property
    def path(self) -> str:
        """For the processes of this node and user."""
        return path_of(self.descriptor)

    def map(self, flags: int = 0) -> Bytes:
        """All bytes; they stay when this object is closed."""
        return map_shared(self.descriptor, flags)

    def close(self) -> None:
        """Nobody can open it any more; who has opened or mapped it keeps it."""
        os.close(self.descriptor)


def path_of(descriptor: int) -> str:
    """Of a descriptor of this process, for others; as long as it is open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_shared(path: str, name: str, *, writable: bool) -> int:
    """A descriptor of the memory at this path, which may be an ordinary file's too.

    Raises MemoryGone unless the memory of this name is still there.
    """
    try:
        # The kernel gives numbers of processes and descriptors out again; what they lead to by now
        # may be a socket, which cannot be opened, or a pipe, which waits.
        _check_name(path, path, name)
        descriptor = os.open(path, os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY))
    except FileNotFoundError as error:
        if isinstance(error, MemoryGone):
            raise
        raise MemoryGone(f"{name} is gone: {path} is closed, or its owner is dead.") from None
    try:
        _check_name(f"/proc/self/fd/{descriptor}", path, name)
    except MemoryGone:
        os.close(descriptor)
        raise
    return descriptor


def is_there(path: str, name: str) -> bool:
    """Whether the memory of this name can still be opened."""
    try:
        _check_name(path, path, name)
    except OSError:
        return False
    return True


def _check_name(link: str, path: str, name: str) -> None:
    if not path.startswith("/proc/"):
        return
    if (found := os.readlink(link)) != f"/memfd:{name} (deleted)":
        raise MemoryGone(f"{name} is gone: {path} now leads to {found}.")


def map_shared(descriptor: int, flags: int = 0) -> Bytes:
    """The bytes of a descriptor, writable and shared with everyone who maps it."""
    num_bytes = os.fstat(descriptor).st_size
    return np.frombuffer(
        mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | flags), dtype=np.uint8
    )
