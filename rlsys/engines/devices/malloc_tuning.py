"""Tuning of glibc's malloc, so that activations reuse memory on the CPU.

    keep_freed_memory()          freed blocks stay with the process, for the next allocation
    with apart(): ...            large blocks allocated here return to the system when freed
    Pieces().release()           return fragmented free memory to the system

By default glibc returns large freed blocks to the kernel, which clears them page by page when the
next layer allocates memory. This takes about a tenth of an engine's time.

glibc can rarely reuse a kept block for the same size: it allocates a tensor with room to align it,
gives that room to small objects, and the hole that the tensor leaves is then too small. Activations
that come and go in turn fill each other's holes. Weights gathered for one layer, between its
activations, leave a hole for every layer.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlsys.engines.devices.offload import return_freed_memory

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # largest value that glibc accepts on 64-bit systems
APART = 1 << 20  # page faults cost little compared to the communication of so many bytes

_kept = False


def keep_freed_memory() -> None:
    """Keep freed memory in this process, up to the most that it ever used at once.

    It applies to all threads that start from now on. It does nothing without glibc.
    """
    global _kept
    mallopt = glibc_function("mallopt")
    if mallopt is None:
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_ARENA_MAX, 1)  # other arenas, one per thread, ignore the thresholds
    _kept = True


@contextmanager
def apart() -> Iterator[None]:
    """Return blocks of a MiB and more that are allocated within to the system when they are freed.

    Use it for buffers that come and go between blocks that stay. It has an effect only after
    `keep_freed_memory`.
    """
    mallopt = glibc_function("mallopt") if _kept else None
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, APART)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)


class Pieces:
    """Fragmented free memory of the heap, between forward and backward pass."""

    MIN_SHARE = 0.2  # of used memory; releasing less is not worth the page faults of its reuse
    MIN_BYTES = 64 << 20
    AS_LARGE = 0.95  # share of the largest micro-batch; after a smaller one, a larger one reuses it

    def __init__(self) -> None:
        self._most_used = 0

    def release(self) -> None:
        """Return it to the system if it is large and the micro-batch is as large as any before."""
        heap = heap_sizes() if _kept else None
        if heap is not None and self._are_many(heap.used, heap.free):
            return_freed_memory()

    def _are_many(self, used: int, free: int) -> bool:
        is_large = used >= self.AS_LARGE * self._most_used
        self._most_used = max(self._most_used, used)
        return is_large and free > max(self.MIN_SHARE * used, self.MIN_BYTES)


class _Heap(ctypes.Structure):
    """`struct mallinfo2`; the C names are historical."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "used", "free", "keepcost")),
    ]


def heap_sizes() -> Any:
    """Return the heap's sizes in bytes; None without glibc 2.33 or later."""
    mallinfo2 = glibc_function("mallinfo2")
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Heap
    return mallinfo2()


@functools.cache
def glibc_function(function: str) -> Any:
    """Return a function of the C library by name; None without it, or off Linux."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), function, None)
