"""Which rows each rank of a trained model takes in each of its passes.

    groups ──cut──► pieces: rows of a group that share its prompt in one pass
           ──longest first, to the emptiest──► num_passes · num_ranks bins of at most max_tokens
           ──heaviest first──► passes of num_ranks bins

Ranks wait for each other in every pass, so a pass takes as long as its heaviest rank. Fine pieces
balance well, but the prompt is computed again for each of them: of several cuts, the one whose
passes take least is chosen. The plan follows from lengths alone.

Costs count tokens as they cost in a short row; attention adds to that what it reads of the past.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# Pieces that a bin should have at least, in the cuts that are tried; None cuts only where a group
# does not fit into a pass.
CUTS = (None, 1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class GroupLengths:
    prompt: int
    completions: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What the ranks can take."""

    num_ranks: int
    max_tokens: int  # of one pass on one rank
    attention_tokens: float
    """Of a row, when attention to them costs as much as all the rest of the model does."""

    def cost(self, past: int, num_tokens: int) -> float:
        """Of tokens behind so many others of their row."""
        return num_tokens * (1 + (past + num_tokens / 2) / self.attention_tokens)


# (group, row within it), by their places in what was given
RowPlace = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class _Load:
    num_tokens: int
    cost: float


@dataclass(frozen=True, kw_only=True)
class _Piece:
    group: int
    rows: tuple[int, ...]
    prompt: _Load
    completions: _Load

    @property
    def num_tokens(self) -> int:
        return self.prompt.num_tokens + self.completions.num_tokens

    @property
    def cost(self) -> float:
        return self.prompt.cost + self.completions.cost


class _Bin:
    def __init__(self) -> None:
        self.num_tokens, self.cost = 0, 0.0
        self.rows: list[RowPlace] = []
        self._groups: set[int] = set()

    def num_tokens_with(self, piece: _Piece) -> int:
        prompt = 0 if piece.group in self._groups else piece.prompt.num_tokens
        return self.num_tokens + prompt + piece.completions.num_tokens

    def add(self, piece: _Piece) -> None:
        self.num_tokens = self.num_tokens_with(piece)
        self.cost += piece.completions.cost
        if piece.group not in self._groups:
            self.cost += piece.prompt.cost
        self._groups.add(piece.group)
        self.rows += [(piece.group, row) for row in piece.rows]


def plan_micro_batches(
    groups: Sequence[GroupLengths], budget: Budget, *, whole_groups: bool = False
) -> list[list[list[RowPlace]]]:
    """By pass, then by rank, the rows. Each row stands once; a bin holds more than max_tokens only
    where it is one row, or, with `whole_groups`, one group.
    """
    plans: list[tuple[float, int, list[list[_Bin]]]] = []
    # One rank waits for nobody, so for it nothing is won by a cut.
    for pieces_per_bin in CUTS[:1] if whole_groups or budget.num_ranks == 1 else CUTS:
        pieces = _cut(groups, budget, pieces_per_bin, whole_groups=whole_groups)
        passes = _in_passes(_bins(pieces, budget), budget.num_ranks)
        seconds = sum(max(one.cost for one in bins) for bins in passes)
        plans.append((seconds, len(plans), passes))
    return [[sorted(one.rows) for one in bins] for bins in min(plans)[2]]


def _cut(
    groups: Sequence[GroupLengths],
    budget: Budget,
    pieces_per_bin: int | None,
    *,
    whole_groups: bool,
) -> list[_Piece]:
    wholes = [_piece(number, group, budget) for number, group in enumerate(groups)]
    if whole_groups:
        return wholes
    most = float("inf")
    if pieces_per_bin is not None:
        num_bins = _num_passes(wholes, budget) * budget.num_ranks
        most = sum(whole.cost for whole in wholes) / (num_bins * pieces_per_bin)
    return [
        piece
        for number, group in enumerate(groups)
        for piece in _pieces(number, group, budget, most)
    ]


def _piece(
    number: int, group: GroupLengths, budget: Budget, rows: Sequence[int] | None = None
) -> _Piece:
    rows = range(len(group.completions)) if rows is None else rows
    lengths = [group.completions[row] for row in rows]
    cost = sum(budget.cost(group.prompt, length) for length in lengths)
    return _Piece(
        group=number,
        rows=tuple(rows),
        prompt=_Load(num_tokens=group.prompt, cost=budget.cost(0, group.prompt)),
        completions=_Load(num_tokens=sum(lengths), cost=cost),
    )


def _pieces(number: int, group: GroupLengths, budget: Budget, most: float) -> Sequence[_Piece]:
    """Of a group, in the fewest pieces of similar cost of which each fits and costs `most`; single
    rows may be larger.
    """
    num_rows = len(group.completions)
    by_length = sorted(range(num_rows), key=lambda row: -group.completions[row])
    whole = _piece(number, group, budget)
    fewest = max(1, int(whole.num_tokens / budget.max_tokens), int(whole.cost / most))
    pieces = [whole]
    for num_pieces in range(min(fewest, num_rows), num_rows + 1):
        # Dealt there and back, so that the sums are alike.
        order = [*range(num_pieces), *reversed(range(num_pieces))]
        dealt: list[list[int]] = [[] for _ in range(num_pieces)]
        for place, row in enumerate(by_length):
            dealt[order[place % len(order)]].append(row)
        pieces = [_piece(number, group, budget, rows) for rows in dealt]
        if all(one.num_tokens <= budget.max_tokens and one.cost <= most for one in pieces):
            break
    return pieces


def _num_passes(pieces: Sequence[_Piece], budget: Budget) -> int:
    num_tokens = sum(piece.num_tokens for piece in pieces)
    full = -(-num_tokens // (budget.max_tokens * budget.num_ranks))
    return max(1, min(full, -(-len(pieces) // budget.num_ranks)))


def _bins(pieces: Sequence[_Piece], budget: Budget) -> list[_Bin]:
    """As few as hold all pieces, a multiple of the ranks."""
    by_cost = sorted(pieces, key=lambda piece: (-piece.cost, piece.group, piece.rows))
    num_passes = _num_passes(pieces, budget)
    while (bins := _filled(by_cost, num_passes * budget.num_ranks, budget.max_tokens)) is None:
        num_passes += 1
    return bins


def _filled(pieces: Sequence[_Piece], num_bins: int, max_tokens: int) -> list[_Bin] | None:
    bins = [_Bin() for _ in range(num_bins)]
    heap = [(0.0, number) for number in range(num_bins)]
    for piece in pieces:
        passed = []  # lighter ones that it does not fit into
        while heap:
            cost, number = heapq.heappop(heap)
            found = bins[number]
            if not found.rows or found.num_tokens_with(piece) <= max_tokens:
                found.add(piece)
                passed.append((found.cost, number))
                break
            passed.append((cost, number))
        else:
            return None
        for entry in passed:
            heapq.heappush(heap, entry)
    return bins


def _in_passes(bins: Sequence[_Bin], num_ranks: int) -> list[list[_Bin]]:
    """Bins of similar cost at a time; over the passes, ranks have similar sums."""
    by_cost = sorted(bins, key=lambda one: -one.cost)
    sums = [0.0] * num_ranks
    passes = []
    for start in range(0, len(by_cost), num_ranks):
        of_pass: list[_Bin] = [by_cost[start]] * num_ranks
        lightest = sorted(range(num_ranks), key=lambda rank: sums[rank])
        for rank, one in zip(lightest, by_cost[start : start + num_ranks], strict=True):
            of_pass[rank] = one
            sums[rank] += one.cost
        passes.append(of_pass)
    return passes
