"""Memory of activations on the CPU, kept from one pass to the next.

    keep_freed_memory()          freed blocks stay with the process, for what is asked next
    with apart(): ...            but those made here lie by themselves, and go back when freed
    Pieces().let_go()            what is kept and lies in pieces, within a pass that needs memory

glibc hands large freed blocks back to the kernel, which fills them with zeros again, a page fault
at a time, when the next layer asks for memory: about a tenth of an engine's time.

What glibc keeps it can seldom give for the same again: a tensor is asked for with room to align it,
the room goes to small objects, and the hole that the tensor leaves is short of it. Activations that
live and die in turn fill each other's holes; weights that are gathered for a layer, between its
activations, leave one for every layer.
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
LARGEST_MMAP_THRESHOLD = 32 << 20  # what glibc accepts on 64-bit systems
APART = 1 << 20  # a page fault more is little beside what ranks exchange of so many bytes

_kept = False


def keep_freed_memory() -> None:
    """For this whole process, and for threads that start from now on: it holds what its largest
    pass needed. Nothing happens without glibc.
    """
    global _kept
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_ARENA_MAX, 1)  # a thread's own arena gives memory back whatever the threshold
    _kept = True


@contextmanager
def apart() -> Iterator[None]:
    """Blocks of a MiB and more that are made within go back to the system when they are freed, in a
    process that keeps others. For what comes and goes between blocks that stay.
    """
    mallopt = _glibc("mallopt") if _kept else None
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, APART)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)


class Pieces:
    """Freed memory that lies between what is used, when a pass has most of its activations."""

    MOST = 0.2  # of what is used; less is not worth the page faults of what fills it again
    FEWEST_BYTES = 64 << 20
    AS_LARGE = 0.95  # as the largest pass so far: in a smaller one, the next larger fills them

    def __init__(self) -> None:
        self._most_used = 0

    def let_go(self) -> None:
        """To the system, where there is much of it and this pass is as large as any before."""
        heap = _heap() if _kept else None
        if heap is not None and self._are_many(heap.used, heap.free):
            return_freed_memory()

    def _are_many(self, used: int, free: int) -> bool:
        is_large = used >= self.AS_LARGE * self._most_used
        self._most_used = max(self._most_used, used)
        return is_large and free > max(self.MOST * used, self.FEWEST_BYTES)


class _Heap(ctypes.Structure):
    """`struct mallinfo2`, whose names are glibc's history."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "used", "free", "keepcost")),
    ]


def _heap() -> Any:
    """Of this process, in bytes; None without glibc, or with one before 2.33."""
    mallinfo2 = _glibc("mallinfo2")
    if mallinfo2 is None:
        return None
    mallinfo2.restype = _Heap
    return mallinfo2()


@functools.cache
def _glibc(function: str) -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), function, None)
