"""The header of a file of snapshots: its complete slots and their steps.

[checksum of names and shapes; per slot: step + 1, or 0 while it is empty] int64

Separate from snapshot.py, so that processes which only keep such files need no torch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlsys.reallocation.transport.shared_memory import Bytes

HEADER_BYTES = 4096


def header_of(memory: Bytes) -> npt.NDArray[np.int64]:
    """Return the header as a view."""
    return memory[:HEADER_BYTES].view(np.int64)


def steps_in(memory: Bytes) -> set[int]:
    """Return the steps of the complete snapshots; zeros follow the marks of the slots."""
    return {int(mark) - 1 for mark in header_of(memory)[1:] if mark}
