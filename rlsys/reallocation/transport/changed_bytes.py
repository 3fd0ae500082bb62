"""What has changed between two versions of the same bytes, for readers that have the older one.

16-bit weights at the rates of reinforcement learning hardly change: a step moves a weight by a
millionth, its last bit is worth a ten-thousandth. So most of them keep all their bits, and which
changed, with what they are now, is a small part of the whole. Nothing is lost: what comes out is
the newer version to the last bit, as its digests prove.

    words [W]          of 16 bits each
    groups [W / 16]    a bit for each: is any of its words another?
    marks [·]          of those groups, a bit for each word
    values [·]         the words that are
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
    groups: Bytes
    marks: Bytes
    values: npt.NDArray[np.uint16]

    @property
    def num_bytes(self) -> int:
        return int(self.groups.nbytes + self.marks.nbytes + self.values.nbytes)


def changes(old: Bytes, new: Bytes) -> Changes:
    """Both are as long, in whole groups."""
    ours, theirs = old.view(np.uint16), new.view(np.uint16)
    differ = (ours != theirs).reshape(-1, GROUP)  # [W / 16, 16]
    touched = differ.any(axis=1)
    return Changes(
        groups=np.packbits(touched),
        marks=np.packbits(differ[touched]),
        values=theirs[differ.reshape(-1)],
    )


def apply(told: Changes, content: Bytes) -> None:
    """Bring `content` from the older version to the newer one, in place."""
    words = content.view(np.uint16).reshape(-1, GROUP)
    touched = np.unpackbits(told.groups, count=len(words)).view(bool)
    places = np.flatnonzero(touched)
    marks = np.unpackbits(told.marks, count=GROUP * len(places)).view(bool)
    group, word = np.nonzero(marks.reshape(-1, GROUP))
    words[places[group], word] = told.values
