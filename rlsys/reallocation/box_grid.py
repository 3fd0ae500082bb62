"""Grid of cells that cuts a tensor along the edges of boxes: each box covers a cell fully or not.

      boxes a [0:4], b [2:6]      cells       0:2   2:4   4:6
                                  covered by   a    a b    b

Shape legend: B boxes, D dimensions, C cells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from rlsys.reallocation.shards import Box

IntArray = npt.NDArray[np.int64]
Bounds = tuple[tuple[int, int], ...]


class Grid:
    """Grid of at least one box of one tensor, none of them empty."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        num_dims = len(boxes[0].bounds)
        bounds: IntArray = np.array([box.bounds for box in boxes], np.int64)
        bounds = bounds.reshape(len(boxes), num_dims, 2)  # [B, D, start and stop]
        self._edges = [np.unique(bounds[:, dim]) for dim in range(num_dims)]
        self._shape = tuple(len(edges) - 1 for edges in self._edges)
        covers = np.zeros((len(boxes), *self._shape), np.bool_)  # [B, cells of each dimension]
        places = [np.searchsorted(e, bounds[:, dim]) for dim, e in enumerate(self._edges)]  # [B, 2]
        for number in range(len(boxes)):
            inside = (slice(*place[number].tolist()) for place in places)
            index: tuple[int | slice, ...] = (number, *inside)
            covers[index] = True
        self._covers = covers.reshape(len(boxes), prod(self._shape))  # [B, C]

    def classes(self) -> Iterator[tuple[tuple[int, ...], IntArray]]:
        """Yield each set of box numbers that cover the same cells, with these cells."""
        packed = np.packbits(self._covers, axis=0)  # [B / 8, C]
        _, first, inverse = np.unique(packed, axis=1, return_index=True, return_inverse=True)
        inverse = inverse.reshape(-1)  # [C]
        cells: IntArray = np.argsort(inverse, kind="stable")
        of_class = np.split(cells, np.cumsum(np.bincount(inverse))[:-1])
        for number in np.argsort(first):
            covering = np.flatnonzero(self._covers[:, first[number]])
            yield tuple(covering.tolist()), of_class[number]

    def boxes(self, cells: IntArray) -> list[Box]:
        """Return few boxes that do not overlap and together are these cells."""
        if not self._shape:
            return [Box(())]
        at = np.stack(np.unravel_index(cells, self._shape), axis=1)  # [cells, D]
        low, high = at.min(axis=0), at.max(axis=0) + 1
        if len(cells) == prod((high - low).tolist()):
            return [self._box(tuple(zip(low.tolist(), high.tolist(), strict=True)))]
        found: list[Bounds] = [tuple((i, i + 1) for i in place) for place in at.tolist()]
        for dim in reversed(range(len(self._shape))):
            found = _merge(found, dim)
        return [self._box(bounds) for bounds in sorted(found)]

    def _box(self, bounds: Bounds) -> Box:
        """Convert indices of edges to indices of elements."""
        pairs = zip(self._edges, bounds, strict=True)
        return Box(tuple((int(edges[start]), int(edges[stop])) for edges, (start, stop) in pairs))


def _merge(boxes: Sequence[Bounds], dim: int) -> list[Bounds]:
    """Merge neighbours along a dimension that are equal in all others."""
    rows: dict[Bounds, list[tuple[int, int]]] = defaultdict(list)
    for bounds in boxes:
        rows[bounds[:dim] + bounds[dim + 1 :]].append(bounds[dim])
    found = []
    for others, pieces in rows.items():
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(pieces):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, stop))
        found += [(*others[:dim], piece, *others[dim:]) for piece in joined]
    return found
