"""Rows that begin alike, as one row in which what they share stands once.

    rows          a b c d        tree     a b c ┬ d             packed    a b c d e f x y
                  a b c e f                     └ e f           position  0 1 2 3 3 4 0 1
                  x y                     x y

Rows are laid out in the order of their tokens, and a row's own tokens in one run. So whatever
follows a token in the tree stands in one piece behind it, and attention along the tree is a few
rectangles (`blocks`).

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
    """Tokens [query_start, query_end) see tokens [key_start, key_end): all of them, or, where the
    two are the same, each those up to itself.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int

    def __len__(self) -> int:
        """Its queries."""
        return self.query_end - self.query_start

    @property
    def is_causal(self) -> bool:
        return self.query_start == self.key_start


@dataclass(frozen=True)
class _Piece:
    """Positions [start, end) of the rows that pass through it; the first one stands at `place`."""

    start: int
    end: int
    place: int

    def place_of(self, position: int) -> int:
        return self.place + position - self.start


class PrefixTree:
    """Of rows of at least one token each. `min_shared`: a beginning that is shared counts from so
    many tokens on, and a longer one of some of these rows from so many more: each fork costs calls.
    None: rows stand apart, in their order, whatever they share.
    """

    def __init__(self, rows: Sequence[npt.NDArray[np.integer]], *, min_shared: int | None) -> None:
        self.lengths: IntArray = np.array([len(row) for row in rows])  # [B]
        self._order = list(range(len(rows)))
        self.shared: IntArray = np.zeros(len(rows), np.int64)
        """[B]: of how many tokens, from its first on, a row has none of its own."""
        if min_shared is not None:
            self._order.sort(key=lambda index: _sort_key(rows[index]))
            self._share(rows, min_shared)
        own = (self.lengths - self.shared)[self._order]
        self._starts: IntArray = np.empty(len(rows), np.int64)  # [B] of each row's own tokens
        self._starts[self._order] = np.cumsum(own) - own

    def _share(self, rows: Sequence[npt.NDArray[np.integer]], min_shared: int) -> None:
        forks: list[int] = []  # on the way of the row before, by position
        for before, row in pairwise(self._order):
            common = _num_common(rows[before], rows[row])
            while forks and forks[-1] > common:
                forks.pop()
            fork = forks[-1] if forks else 0
            if common == len(rows[row]):
                fork = common  # it adds nothing, so nothing forks
            elif common - fork >= min_shared:
                fork = common
                forks.append(fork)
            self.shared[row] = fork

    @property
    def num_tokens(self) -> int:
        """M."""
        return int((self.lengths - self.shared).sum())

    @property
    def owners(self) -> IntArray:
        """[≤ B]: rows with tokens of their own, as they stand in the tree."""
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
        """[M]: the row whose own each token is."""
        return np.repeat(self._order, (self.lengths - self.shared)[self._order])

    @cached_property
    def row_starts(self) -> IntArray:
        """[B]: where each row begins in `places`."""
        starts: IntArray = np.cumsum(self.lengths) - self.lengths
        return starts

    @cached_property
    def places(self) -> IntArray:
        """[N]: where in the tree each token stands; rows one after another."""
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
        """[M]: the place behind the last token that follows a token, or is it."""
        last = self.places[self.row_starts + self.lengths - 1]  # [B]
        ends = np.zeros(self.num_tokens, np.int64)
        np.maximum.at(ends, self.places, np.repeat(last + 1, self.lengths))
        return ends

    @cached_property
    def blocks(self) -> list[Block]:
        """What sees what: each token with each one of its row before it, or itself, once."""
        whole: list[Block] = []
        open_pieces: list[_Piece] = []  # that end at a fork on the way of the row before
        runs: list[_Piece] = []  # of own tokens, on the same way
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
    """Blocks of pieces beyond `position`, which no later row passes through: what follows them ends
    before place `end`. A piece that begins before `position` is cut there.
    """
    blocks = []
    while open_pieces and open_pieces[-1].end > position:
        piece = open_pieces.pop()
        first, behind = piece.place_of(max(piece.start, position)), piece.place_of(piece.end)
        blocks.append(Block(behind, end, first, behind))
    return blocks


def _sort_key(row: npt.NDArray[np.integer]) -> bytes:
    """Orders by tokens; a row stands behind those that it is the beginning of."""
    return row.astype(">u4").tobytes() + b"\xff\xff\xff\xff"


def _num_common(one: npt.NDArray[np.integer], other: npt.NDArray[np.integer]) -> int:
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
