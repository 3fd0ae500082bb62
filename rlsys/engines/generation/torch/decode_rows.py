"""The rows of a decode pass: each request's last token, then drafted tokens that follow it.

    lengths, last tokens, Drafts ──► DecodeRows ──► pass, sampling ──► accepted level by level

Every row samples the token after its input, with the random number of that token's position. A
drafted token is accepted if it is the token that the row before it has sampled. So the accepted
tokens are those of passes without drafts, whatever was drafted.

Shape legend: N running requests, M drafted tokens, R = N + M rows, P rows with padding, K tokens of
the longest draft.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsys.engines.generation.torch.draft_policy import Drafts
from rlsys.types import Int32Array

IntArray = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class DecodeRows:
    """Rows by level: level 0 has the last token of each request, level k its k-th drafted one."""

    slots: IntArray  # [R]
    offsets: IntArray  # [R], the level
    tokens: Int32Array  # [R], the inputs

    @classmethod
    def of(cls, slots: IntArray, last_tokens: Int32Array, drafts: Drafts | None) -> DecodeRows:
        """Return the rows of requests in `slots` [N] with their last tokens [N]."""
        offsets = np.zeros(len(slots), np.int64)
        if drafts is None:
            return cls(slots=slots, offsets=offsets, tokens=last_tokens)
        return cls(
            slots=np.concatenate((slots, drafts.slots)),
            offsets=np.concatenate((offsets, drafts.offsets)),
            tokens=np.concatenate((last_tokens, drafts.tokens)),
        )

    @property
    def num_levels(self) -> int:
        """1 + K, or 1 without drafts."""
        return int(self.offsets[-1]) + 1

    def levels(self) -> Iterator[slice]:
        """Yield the rows of each level."""
        starts = np.searchsorted(self.offsets, np.arange(self.num_levels + 1))
        for start, end in itertools.pairwise(starts.tolist()):
            yield slice(start, end)

    def padded(self, num_rows: int) -> IntArray:
        """Return indices [P] of rows. The last row is repeated, since each row of a pass writes."""
        order: IntArray = np.minimum(np.arange(num_rows), len(self.slots) - 1)
        return order
