"""Lossless differences between two versions of the same bytes, for readers of the older version.

16-bit weights hardly change at the learning rates of reinforcement learning: a step moves a weight
by a millionth, and its last bit is worth a ten-thousandth. So most weights keep all their bits, and
the positions and new values of the others are a small part of the whole. The result is the newer
version, bit by bit, as its digests prove.

    words [W]          16 bits each
    groups [W / 16]    one bit per group: any of its words changed
    marks [·]          one bit per word of the changed groups
    values [·]         the changed words
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlsys.reallocation.transport.shared_memory import Bytes

GROUP = 16  # words of 16 bits
GROUP_BYTES = 2 * GROUP


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changed words of 16 bits."""

    groups: Bytes
    marks: Bytes
    values: npt.NDArray[np.uint16]

    @property
    def num_bytes(self) -> int:
        """Bytes of the difference."""
        return int(self.groups.nbytes + self.marks.nbytes + self.values.nbytes)


def changes(old: Bytes, new: Bytes) -> Changes:
    """Return the changes between bytes of the same length, a multiple of GROUP_BYTES."""
    ours, theirs = old.view(np.uint16), new.view(np.uint16)
    differ = (ours != theirs).reshape(-1, GROUP)  # [W / 16, 16]
    touched = differ.any(axis=1)
    return Changes(
        groups=np.packbits(touched),
        marks=np.packbits(differ[touched]),
        values=theirs[differ.reshape(-1)],
    )


def apply(difference: Changes, content: Bytes) -> None:
    """Update `content` from the older version to the newer one, in place."""
    words = content.view(np.uint16).reshape(-1, GROUP)
    touched = np.unpackbits(difference.groups, count=len(words)).view(bool)
    places = np.flatnonzero(touched)
    marks = np.unpackbits(difference.marks, count=GROUP * len(places)).view(bool)
    group, word = np.nonzero(marks.reshape(-1, GROUP))
    words[places[group], word] = difference.values
