"""Prefix tree of token rows, stored as one row in which each shared prefix occurs once.

    rows          a b c d        tree     a b c ┬ d             packed    a b c d e f x y
                  a b c e f                     └ e f           position  0 1 2 3 3 4 0 1
                  x y                     x y

Rows are sorted by their tokens, and a row's own tokens are contiguous. So the descendants of a
token directly follow it in one piece, and attention along the tree consists of few rectangles
(`blocks`).

Shape legend: B rows, N = Σ lengths, M tokens of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """A rectangle of attention: tokens [query_start, query_end) see tokens [key_start, key_end).

    If both ranges are the same, each token sees the tokens up to itself; otherwise all of them.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int

    def __len__(self) -> int:
        """Return the number of queries."""
        return self.query_end - self.query_start

    @property
    def is_causal(self) -> bool:
        """Each token of the block sees the tokens up to itself."""
        return self.query_start == self.key_start


@dataclass(frozen=True)
class _Piece:
    """Positions [start, end) of the rows that pass through it; the first one has index `place`."""

    start: int
    end: int
    place: int

    def place_of(self, position: int) -> int:
        return self.place + position - self.start


class PrefixTree:
    """Prefix tree of rows of at least one token each.

    `min_shared` is the smallest prefix, in tokens, that is shared, and the smallest extension of it
    that forms another fork, because each fork costs calls. None: rows share nothing and keep their
    order.
    """

    def __init__(self, rows: Sequence[npt.NDArray[np.integer]], *, min_shared: int | None) -> None:
        self.lengths: IntArray = np.array([len(row) for row in rows])  # [B]
        self._order = list(range(len(rows)))
        self.shared: IntArray = np.zeros(len(rows), np.int64)
        """[B]: length of the prefix that a row shares with an earlier row in the tree."""
        if min_shared is not None:
            self._order.sort(key=lambda index: _sort_key(rows[index]))
            self._share(rows, min_shared)
        own = (self.lengths - self.shared)[self._order]
        self._starts: IntArray = np.empty(len(rows), np.int64)  # [B] of each row's own tokens
        self._starts[self._order] = np.cumsum(own) - own

    def _share(self, rows: Sequence[npt.NDArray[np.integer]], min_shared: int) -> None:
        forks: list[int] = []  # positions of forks on the path of the row before
        for before, row in pairwise(self._order):
            common = _num_common(rows[before], rows[row])
            while forks and forks[-1] > common:
                forks.pop()
            fork = forks[-1] if forks else 0
            if common == len(rows[row]):
                fork = common  # the row adds no token
            elif common - fork >= min_shared:
                fork = common
                forks.append(fork)
            self.shared[row] = fork

    @property
    def num_tokens(self) -> int:
        """M, the tokens of the tree."""
        return int((self.lengths - self.shared).sum())

    @property
    def owners(self) -> IntArray:
        """[≤ B]: rows with own tokens, in the order of the tree."""
        return np.array([row for row in self._order if self.shared[row] < self.lengths[row]])

    @cached_property
    def position_ids(self) -> IntArray:
        """[M]: the position of each token in its rows."""
        own = (self.lengths - self.shared)[self._order]
        first = (self._starts - self.shared)[self._order]
        positions: IntArray = np.arange(self.num_tokens) - np.repeat(first, own)
        return positions

    @cached_property
    def owner(self) -> IntArray:
        """[M]: the row that owns each token."""
        return np.repeat(self._order, (self.lengths - self.shared)[self._order])

    @cached_property
    def row_starts(self) -> IntArray:
        """[B]: index in `places` of each row's first token."""
        starts: IntArray = np.cumsum(self.lengths) - self.lengths
        return starts

    @cached_property
    def places(self) -> IntArray:
        """[N]: index in the tree of each token of the rows, one row after another."""
        places = np.empty(int(self.lengths.sum()), np.int64)
        before: IntArray = places[:0]
        for row in self._order:
            start, shared = self.row_starts[row], self.shared[row]
            own = self.lengths[row] - shared
            of_row = places[start : start + self.lengths[row]]
            of_row[:shared] = before[:shared]
            of_row[shared:] = np.arange(self._starts[row], self._starts[row] + own)
            before = of_row
        return places

    @cached_property
    def ends(self) -> IntArray:
        """[M]: index after the last descendant of each token."""
        last = self.places[self.row_starts + self.lengths - 1]  # [B]
        ends = np.zeros(self.num_tokens, np.int64)
        np.maximum.at(ends, self.places, np.repeat(last + 1, self.lengths))
        return ends

    @cached_property
    def blocks(self) -> list[Block]:
        """Rectangles that cover each pair of a token and a token of its own path once."""
        whole: list[Block] = []
        open_pieces: list[_Piece] = []  # pieces that end at a fork on the path of the row before
        runs: list[_Piece] = []  # runs of own tokens on the same path
        for row in self.owners.tolist():
            shared, length, start = int(self.shared[row]), int(self.lengths[row]), self._starts[row]
            whole += _closed(open_pieces, shared, int(start))
            while runs and runs[-1].start >= shared:
                runs.pop()
            begin = max(open_pieces[-1].end if open_pieces else 0, runs[-1].start if runs else 0)
            if begin < shared:
                open_pieces.append(_Piece(begin, shared, runs[-1].place_of(begin)))
            runs.append(_Piece(shared, length, int(start)))
        whole += _closed(open_pieces, 0, self.num_tokens)
        ends = {int(start) for start in self._starts[self.owners]} | {self.num_tokens}
        ends |= {block.key_end for block in whole}
        edges = sorted(ends)
        causal = [Block(*edge, *edge) for edge in pairwise(edges)]
        return causal + whole


def _closed(open_pieces: list[_Piece], position: int, end: int) -> list[Block]:
    """Return blocks of the pieces after `position`, which no later row passes through.

    Their descendants end before index `end`. A piece that begins before `position` is cut there.
    """
    blocks = []
    while open_pieces and open_pieces[-1].end > position:
        piece = open_pieces.pop()
        first, after = piece.place_of(max(piece.start, position)), piece.place_of(piece.end)
        blocks.append(Block(after, end, first, after))
    return blocks


def _sort_key(row: npt.NDArray[np.integer]) -> bytes:
    """Return a key that sorts rows by tokens, a row after the rows that extend it."""
    return row.astype(">u4").tobytes() + b"\xff\xff\xff\xff"


def _num_common(one: npt.NDArray[np.integer], other: npt.NDArray[np.integer]) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
