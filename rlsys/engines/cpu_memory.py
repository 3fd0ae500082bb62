"""Memory of activations on the CPU, kept from one pass to the next.

glibc hands large freed blocks back to the kernel, which fills them with zeros again, a page fault
at a time, when the next layer asks for memory: about a tenth of an engine's time.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
LARGEST_MMAP_THRESHOLD = 32 << 20  # what glibc accepts on 64-bit systems


def keep_freed_memory() -> None:
    """For this whole process, and for threads that start from now on: it holds what its largest
    pass needed. Nothing happens without glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_ARENA_MAX, 1)  # a thread's own arena gives memory back whatever the threshold
