"""One write to the data plane: many rows, several columns, arrays of any length.

    {column: [array of row 0, array of row 1, ...]} ──write──► bytes in an arena + BlockRef
                                                    ◄──read─── views of those bytes

A block holds its columns one after another; within a column the rows' arrays touch, without padding
or headers. The index (which row is how long) travels in the BlockRef, which is small enough to sit
in the controller for every live row. R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlsys.config import require
from rlsys.types import Int32Array

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Columns = Mapping[str, Sequence[Array]]  # per column, R arrays of one dtype and one dimension

# A column starts at a multiple of the largest element size, so that its arrays are aligned.
ALIGNMENT = 8


class BlockLayout(NamedTuple):
    """Shape of a block, before it has a place."""

    columns: tuple[str, ...]  # [C]
    dtypes: tuple[str, ...]  # [C] numpy's names
    packed_lengths: bytes  # [C, R] int32, elements; bytes take a quarter of a small array's memory

    @property
    def lengths(self) -> Int32Array:
        """[C, R] elements."""
        flat = np.frombuffer(self.packed_lengths, dtype=np.int32)
        return flat.reshape(len(self.columns), -1)

    @property
    def num_rows(self) -> int:
        return len(self.packed_lengths) // (4 * len(self.columns))

    def has_places(self, places: Collection[int]) -> bool:
        return not places or (min(places) >= 0 and max(places) < self.num_rows)

    def starts(self) -> list[int]:
        """[C + 1] byte at which each column starts, and the block's size at the end."""
        starts = [0]
        for total, dtype in zip(self.lengths.sum(axis=1).tolist(), self.dtypes, strict=True):
            starts.append(starts[-1] + _aligned(total * np.dtype(dtype).itemsize))
        return starts

    @property
    def num_bytes(self) -> int:
        return self.starts()[-1]

    def row_bytes(self) -> list[int]:
        """[R] payload of each row over all columns."""
        sizes = np.array([np.dtype(dtype).itemsize for dtype in self.dtypes])
        row_bytes: list[int] = (sizes @ self.lengths).tolist()
        return row_bytes


class BlockRef(NamedTuple):
    """Where one block lies."""

    shard: str
    lease: int  # the piece of the shard's arena, for handing the bytes back
    offset: int  # bytes from the arena's start
    layout: BlockLayout


# One row's arrays: its block, and its place there.
ColumnRef = tuple[BlockRef, int]


def layout_of(columns: Columns) -> BlockLayout:
    """Check a batch and say how it will lie.

    Raises ValueError for no columns, no rows, columns of unequal numbers of rows, arrays that are
    not one-dimensional, and arrays of different or non-numeric dtypes in one column.
    """
    require(len(columns) > 0, "a block without columns holds nothing; put at least one column.")
    num_rows = {name: len(arrays) for name, arrays in columns.items()}
    require(
        len(set(num_rows.values())) == 1 and 0 not in num_rows.values(),
        f"columns have {num_rows} rows; a block needs the same number, at least 1, in each.",
    )
    dtypes = []
    for name, arrays in columns.items():
        first = arrays[0].dtype
        require(
            first.kind in "biuf",
            f"column {name!r} has dtype {first}; the store holds numbers and booleans only.",
        )
        for row, array in enumerate(arrays):
            if array.dtype != first or array.ndim != 1:
                raise ValueError(
                    f"column {name!r}, row {row} of the block: {array.dtype} {array.shape}; a "
                    f"column takes one-dimensional arrays of one dtype (row 0 has {first})."
                )
        dtypes.append(first.name)
    lengths = np.array([[len(array) for array in arrays] for arrays in columns.values()], np.int32)
    return BlockLayout(tuple(columns), tuple(dtypes), lengths.tobytes())


def write_block(arena: Bytes, offset: int, layout: BlockLayout, columns: Columns) -> None:
    """Copy a batch to its place: one pass per column."""
    starts = layout.starts()[:-1]
    totals = layout.lengths.sum(axis=1).tolist()
    for start, dtype, total, arrays in zip(
        starts, layout.dtypes, totals, columns.values(), strict=True
    ):
        np.concatenate(arrays, out=np.frombuffer(arena, dtype, total, offset + start))


def read_column(arena: Bytes, cells: Sequence[ColumnRef], column: str) -> list[Array]:
    """Views, one per cell of one shard, of one column. No copy."""
    index: dict[int, tuple[Array, list[int]]] = {}  # by block: its column flat, and where rows end
    views = []
    for block, place in cells:
        entry = index.get(id(block))
        if entry is None:
            entry = index[id(block)] = _flat_column(arena, block, column)
        flat, bounds = entry
        views.append(flat[bounds[place] : bounds[place + 1]])
    return views


def pack_cells(arena: Bytes, cells: Mapping[str, Sequence[ColumnRef]]) -> Bytes:
    """The bytes of cells (by column) of one shard, column by column: what goes to another node."""
    parts: list[Bytes] = []
    for column, of_column in cells.items():
        views = [view.view(np.uint8) for view in read_column(arena, of_column, column)]
        num_bytes = sum(map(len, views))
        parts += [*views, np.zeros(_aligned(num_bytes) - num_bytes, np.uint8)]
    return np.concatenate(parts)


def unpack_cells(packed: Bytes, cells: Mapping[str, Sequence[ColumnRef]]) -> dict[str, list[Array]]:
    """Inverse of pack_cells: views into what was packed."""
    unpacked: dict[str, list[Array]] = {}
    offset = 0
    for column, of_column in cells.items():
        unpacked[column] = []
        for block, place in of_column:
            number = block.layout.columns.index(column)
            dtype = np.dtype(block.layout.dtypes[number])
            num_bytes = int(block.layout.lengths[number, place]) * dtype.itemsize
            unpacked[column].append(packed[offset : offset + num_bytes].view(dtype))
            offset += num_bytes
        offset = _aligned(offset)
    return unpacked


def _flat_column(arena: Bytes, block: BlockRef, column: str) -> tuple[Array, list[int]]:
    layout = block.layout
    if column not in layout.columns:
        raise ValueError(f"column {column!r} is not in a block of {list(layout.columns)}.")
    number = layout.columns.index(column)
    bounds = [0, *np.cumsum(layout.lengths[number], dtype=np.int64).tolist()]
    start = block.offset + layout.starts()[number]
    return np.frombuffer(arena, layout.dtypes[number], bounds[-1], start), bounds


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
