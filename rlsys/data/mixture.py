"""A mixture: rows of several sources, each with its part of all prompts.

In: the rows of each source and the sources' weights. Out: the rows of one epoch. The source with
the fewest prompts per row gives each of its rows once; the others repeat theirs to keep their part.

    math, 3 rows *0.7    code, 3 rows *0.3    ──►    an epoch of 10: 7 from math, 3 from code

An epoch is the same multiset every time, so the order of a run needs no state (row_source.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlsys.config import require
from rlsys.types import Int32Array

# Rows of one epoch: more than that is a mistake in the weights, and 256 MiB.
MAX_POSITIONS = 2**26


def mixed(sources: Sequence[Int32Array], weights: Sequence[float], where: str) -> Int32Array:
    """Return the rows of one epoch, those of the sources alternating evenly.

    Raises ValueError, beginning with `where`, for a source without rows, and for weights that make
    an epoch too long.
    """
    sizes = [len(rows) for rows in sources]
    require(
        min(sizes) > 0,
        f"{where}: source {sizes.index(min(sizes)) + 1} of the mixture has no row that can be "
        "used. Leave it out.",
    )
    total = sum(weights)
    num = max(size * total / weight for size, weight in zip(sizes, weights, strict=True))
    require(
        num <= MAX_POSITIONS,
        f"{where}: an epoch of this mixture has {num:.0f} prompts, more than {MAX_POSITIONS}. Use "
        "a larger weight for the largest source, or a part of its rows.",
    )
    num = math.ceil(num - 1e-6)  # 3 / 0.3 is 10, not 11
    counts = [
        max(size, round(num * weight / total)) for size, weight in zip(sizes, weights, strict=True)
    ]
    rows = [_repeated(one, count) for one, count in zip(sources, counts, strict=True)]
    places = [(np.arange(count) + 0.5) / count for count in counts]
    order = np.argsort(np.concatenate(places), kind="stable")
    found: Int32Array = np.concatenate(rows)[order].astype(np.int32)
    return found


def _repeated(rows: Int32Array, count: int) -> Int32Array:
    """Return `count` rows: all of them equally often, and once more some that are evenly spread."""
    whole, extra = divmod(count, len(rows))
    spread = rows[np.arange(extra) * len(rows) // max(extra, 1)]
    return np.concatenate((np.tile(rows, whole), spread))
