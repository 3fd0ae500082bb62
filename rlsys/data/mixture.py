"""Mixtures: rows of several sources, each with its share of all prompts.

In: the rows of each source and the sources' weights. Out: the rows of one epoch. The source with
the fewest prompts per row gives each of its rows once. The others repeat theirs to keep their
share.

    math, 3 rows *0.7    code, 3 rows *0.3    ──►    an epoch of 10: 7 from math, 3 from code

An epoch is the same multiset every time, so the order of a run needs no state (row_source.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlsys.errors import require
from rlsys.types import Int32Array

# Maximum rows of one epoch (256 MiB). More is a mistake in the weights.
MAX_POSITIONS = 2**26


def mixed(sources: Sequence[Int32Array], weights: Sequence[float], where: str) -> Int32Array:
    """Return the rows of one epoch, with the rows of the sources alternating evenly.

    Raises:
        InvalidValue: A source has no rows, or the weights make an epoch too long. The field is
            `where`.
    """
    sizes = [len(rows) for rows in sources]
    require(
        min(sizes) > 0,
        where,
        rule=f"source {sizes.index(min(sizes)) + 1} of the mixture has no row that can be used",
        fix="Leave it out.",
    )
    total = sum(weights)
    num = max(size * total / weight for size, weight in zip(sizes, weights, strict=True))
    require(
        num <= MAX_POSITIONS,
        where,
        rule=f"an epoch of this mixture has {num:.0f} prompts, more than {MAX_POSITIONS}",
        fix="Use a larger weight for the largest source, or a part of its rows.",
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
    """Return `count` rows: all of them equally often, and evenly spread ones once more."""
    whole, extra = divmod(count, len(rows))
    spread = rows[np.arange(extra) * len(rows) // max(extra, 1)]
    return np.concatenate((np.tile(rows, whole), spread))
