"""Blocks: one write to shared memory, with many rows, several columns and arrays of any length.

    {column: [array of row 0, array of row 1, ...]} ──write──► bytes in an arena + BlockRef
                                                    ◄──read─── views of those bytes

A block holds its columns one after another. Within a column, the rows' arrays are adjacent, without
padding or headers. The lengths of the rows travel in the BlockRef, which is small enough for the
controller to keep it for every live row. R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlsys.errors import InvalidValue, require
from rlsys.types import Int32Array

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Columns = Mapping[str, Sequence[Array]]  # per column, R arrays of one dtype and one dimension

# A column starts at a multiple of the largest element size, so that its arrays are aligned.
ALIGNMENT = 8


class BlockLayout(NamedTuple):
    """Shape of a block, without its place."""

    columns: tuple[str, ...]  # [C]
    dtypes: tuple[str, ...]  # [C] numpy's names
    packed_lengths: bytes  # [C, R] int32, elements; bytes take a quarter of a small array's memory

    @property
    def lengths(self) -> Int32Array:
        """Numbers of elements, [C, R]."""
        flat = np.frombuffer(self.packed_lengths, dtype=np.int32)
        return flat.reshape(len(self.columns), -1)

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.packed_lengths) // (4 * len(self.columns))

    def has_places(self, places: Collection[int]) -> bool:
        """Return whether all these places are rows of the block."""
        return not places or (min(places) >= 0 and max(places) < self.num_rows)

    def starts(self) -> list[int]:
        """Return the first byte of each column, and the size of the block, [C + 1]."""
        starts = [0]
        for total, dtype in zip(self.lengths.sum(axis=1).tolist(), self.dtypes, strict=True):
            starts.append(starts[-1] + _aligned(total * np.dtype(dtype).itemsize))
        return starts

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return self.starts()[-1]

    def row_bytes(self) -> list[int]:
        """Return the number of bytes of each row over all columns, [R]."""
        sizes = np.array([np.dtype(dtype).itemsize for dtype in self.dtypes])
        row_bytes: list[int] = (sizes @ self.lengths).tolist()
        return row_bytes


class BlockRef(NamedTuple):
    """Place of a block."""

    shard: str
    lease: int  # the piece of the shard's arena, to free its rows
    offset: int  # bytes from the arena's start
    layout: BlockLayout


# The arrays of one row: its block, and its place there.
ColumnRef = tuple[BlockRef, int]


def layout_of(columns: Columns) -> BlockLayout:
    """Return the layout of a batch.

    Raises:
        InvalidValue: There are no columns or no rows, columns differ in their number of rows, or
            the arrays of a column are not one-dimensional, numeric and of one dtype.
    """
    require(
        len(columns) > 0,
        "columns",
        [],
        rule="a block has at least one column",
        fix="Give at least one.",
    )
    num_rows = {name: len(arrays) for name, arrays in columns.items()}
    require(
        len(set(num_rows.values())) == 1 and 0 not in num_rows.values(),
        "rows by column",
        num_rows,
        rule="all columns of a block have the same number of rows, at least 1",
        fix="Give one array per row in each column.",
    )
    dtypes = []
    for name, arrays in columns.items():
        first = arrays[0].dtype
        require(
            first.kind in "biuf",
            f"dtype of column {name!r}",
            str(first),
            rule="the store holds numbers and booleans only",
            fix="Convert the column.",
        )
        for row, array in enumerate(arrays):
            if array.dtype != first or array.ndim != 1:
                raise InvalidValue(
                    f"column {name!r}, row {row}",
                    f"{array.dtype} {array.shape}",
                    rule=f"a column has one-dimensional arrays of one dtype (row 0 has {first})",
                    fix="Convert the arrays.",
                )
        dtypes.append(first.name)
    lengths = np.array([[len(array) for array in arrays] for arrays in columns.values()], np.int32)
    return BlockLayout(tuple(columns), tuple(dtypes), lengths.tobytes())


def write_block(arena: Bytes, offset: int, layout: BlockLayout, columns: Columns) -> None:
    """Copy a batch to its place, column by column."""
    starts = layout.starts()[:-1]
    totals = layout.lengths.sum(axis=1).tolist()
    for start, dtype, total, arrays in zip(
        starts, layout.dtypes, totals, columns.values(), strict=True
    ):
        np.concatenate(arrays, out=np.frombuffer(arena, dtype, total, offset + start))


def read_column(arena: Bytes, cells: Sequence[ColumnRef], column: str) -> list[Array]:
    """Return views of one column, one per cell of one shard, without a copy."""
    index: dict[int, tuple[Array, list[int]]] = {}  # by block: its flat column and bounds of rows
    views = []
    for block, place in cells:
        entry = index.get(id(block))
        if entry is None:
            entry = index[id(block)] = _flat_column(arena, block, column)
        flat, bounds = entry
        views.append(flat[bounds[place] : bounds[place + 1]])
    return views


def pack_cells(arena: Bytes, cells: Mapping[str, Sequence[ColumnRef]]) -> Bytes:
    """Copy the bytes of cells of one shard, column by column, for a transfer to another node."""
    parts: list[Bytes] = []
    for column, of_column in cells.items():
        views = [view.view(np.uint8) for view in read_column(arena, of_column, column)]
        num_bytes = sum(map(len, views))
        parts += [*views, np.zeros(_aligned(num_bytes) - num_bytes, np.uint8)]
    return np.concatenate(parts)


def unpack_cells(packed: Bytes, cells: Mapping[str, Sequence[ColumnRef]]) -> dict[str, list[Array]]:
    """Return views into the result of pack_cells, by column."""
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
        raise InvalidValue(
            "column",
            column,
            rule=f"the block has the columns {list(layout.columns)}",
            fix="Read one of these.",
        )
    number = layout.columns.index(column)
    bounds = [0, *np.cumsum(layout.lengths[number], dtype=np.int64).tolist()]
    start = block.offset + layout.starts()[number]
    return np.frombuffer(arena, layout.dtypes[number], bounds[-1], start), bounds


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
