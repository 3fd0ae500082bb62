"""Shared memory for the processes of one user on one node, which the kernel frees by itself.

    SharedMemory(name, bytes, purpose) ──► path ──► open_shared(path, name): a file descriptor

The memory is an anonymous file (memfd). Other processes open it through its owner's entry in /proc
while the owner keeps it open, and keep what they have opened or mapped even if the owner dies. The
kernel frees it when the last process closes it or dies, so nothing has to be cleaned up. The size
of /dev/shm does not matter. Linux only.
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
    """Shared memory whose owner has closed it, or has died."""


class SharedMemory:
    """Shared bytes, initially zero, with all pages allocated.

    A write to them cannot fail for lack of memory, and no process can shrink them. Processes that
    open the memory check `name` to detect a reused descriptor. Raises OSError, with the purpose and
    the missing amount, if there is too little memory.
    """

    def __init__(self, name: str, num_bytes: int, *, purpose: str) -> None:
        require_memory(num_bytes, purpose=purpose)
        self.name = name
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            # A process that reads mapped bytes after a truncation would be killed.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            self.close()
            why = size_limit() if error.errno == errno.EFBIG else error.strerror
            raise OSError(
                error.errno, f"cannot allocate {num_bytes} bytes for {purpose}: {why}."
            ) from error

    @property
    def path(self) -> str:
        """Path for other processes of this node and user."""
        return path_of(self.descriptor)

    def map(self, flags: int = 0) -> Bytes:
        """Return all bytes; they stay valid after `close`."""
        return map_shared(self.descriptor, flags)

    def close(self) -> None:
        """Close the memory: it can no longer be opened, but existing mappings stay valid."""
        os.close(self.descriptor)


def path_of(descriptor: int) -> str:
    """Return a path to a descriptor of this process for other processes, valid while it is open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_shared(path: str, name: str, *, writable: bool) -> int:
    """Return a descriptor of the memory at this path, which may be an ordinary file.

    Raises MemoryGone unless the memory of this name still exists.
    """
    try:
        # The kernel reuses process ids and descriptors. By now the path may lead to a socket, which
        # cannot be opened, or to a pipe, whose opening blocks.
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
    """Return whether the memory of this name can still be opened."""
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
    """Return the bytes of a descriptor, writable and shared with all processes that map it."""
    num_bytes = os.fstat(descriptor).st_size
    return np.frombuffer(
        mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | flags), dtype=np.uint8
    )
