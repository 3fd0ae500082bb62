"""How a file of snapshots begins: which of its slots are whole, and of which steps.

[checksum of names and shapes; by slot: step + 1, or 0 while it is empty] int64

Apart from snapshot.py, so that whoever only keeps such files does without torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlsys.reallocation.transport.shared_memory import Bytes

HEADER_BYTES = 4096


def header_of(memory: Bytes) -> npt.NDArray[np.int64]:
    return memory[:HEADER_BYTES].view(np.int64)


def steps_in(memory: Bytes) -> set[int]:
    """Of the whole snapshots; behind the marks of all slots there are zeros."""
    return {int(mark) - 1 for mark in header_of(memory)[1:] if mark}
