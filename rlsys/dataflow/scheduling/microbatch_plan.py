"""The micro-batch plan: the rows of each rank of a trained model in each micro-batch.

    groups ──cut──► pieces: rows of a group that share its prompt in one micro-batch
           ──longest first, to the emptiest──► num_micro_batches · num_ranks bins of max_tokens
           ──heaviest first──► micro-batches of num_ranks bins

Ranks wait for each other in every micro-batch, so it takes as long as its heaviest rank. Small
pieces balance well, but each piece computes the prompt again. Several cuts are tried, and the
fastest one is chosen. The plan depends on lengths only.

The unit of costs is a token in a short row. Attention adds a cost for the tokens that it reads.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

# Minimum pieces per bin in the cuts that are tried. None cuts only groups that do not fit into a
# micro-batch.
CUTS = (None, 1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class GroupLengths:
    """Numbers of tokens of a group."""

    prompt: int
    completions: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The ranks and their limits.

    Attributes:
        max_tokens: Tokens of a micro-batch on one rank.
        attention_tokens: Sequence length at which attention costs as many FLOPs as the rest of the
            model.
    """

    num_ranks: int
    max_tokens: int
    attention_tokens: float

    def cost(self, past: int, num_tokens: int) -> float:
        """Return the cost of tokens after `past` others of their row."""
        return num_tokens * (1 + (past + num_tokens / 2) / self.attention_tokens)


# (index of the group, index of the row in it)
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
    """Return the rows by micro-batch and rank; each row occurs once.

    A rank has more than `max_tokens` in a micro-batch only for a single row, or, with
    `whole_groups`, a single group.
    """
    plans: list[tuple[float, int, list[list[_Bin]]]] = []
    # A single rank does not wait, so cuts do not help it.
    for pieces_per_bin in CUTS[:1] if whole_groups or budget.num_ranks == 1 else CUTS:
        pieces = _cut(groups, budget, pieces_per_bin, whole_groups=whole_groups)
        micro_batches = _in_micro_batches(_bins(pieces, budget), budget.num_ranks)
        cost = sum(max(one.cost for one in bins) for bins in micro_batches)
        plans.append((cost, len(plans), micro_batches))
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
    max_cost = float("inf")
    if pieces_per_bin is not None:
        num_bins = _num_micro_batches(wholes, budget) * budget.num_ranks
        max_cost = sum(whole.cost for whole in wholes) / (num_bins * pieces_per_bin)
    return [
        piece
        for number, group in enumerate(groups)
        for piece in _pieces(number, group, budget, max_cost)
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


def _pieces(number: int, group: GroupLengths, budget: Budget, max_cost: float) -> Sequence[_Piece]:
    """Cut a group into the fewest pieces of similar cost that fit and cost at most `max_cost`.

    Single rows may be larger.
    """
    num_rows = len(group.completions)
    by_length = sorted(range(num_rows), key=lambda row: -group.completions[row])
    whole = _piece(number, group, budget)
    fewest = max(1, int(whole.num_tokens / budget.max_tokens), int(whole.cost / max_cost))
    pieces = [whole]
    for num_pieces in range(min(fewest, num_rows), num_rows + 1):
        # Deal the rows back and forth, so that the sums are similar.
        order = [*range(num_pieces), *reversed(range(num_pieces))]
        dealt: list[list[int]] = [[] for _ in range(num_pieces)]
        for place, row in enumerate(by_length):
            dealt[order[place % len(order)]].append(row)
        pieces = [_piece(number, group, budget, rows) for rows in dealt]
        if all(one.num_tokens <= budget.max_tokens and one.cost <= max_cost for one in pieces):
            break
    return pieces


def _num_micro_batches(pieces: Sequence[_Piece], budget: Budget) -> int:
    num_tokens = sum(piece.num_tokens for piece in pieces)
    full = -(-num_tokens // (budget.max_tokens * budget.num_ranks))
    return max(1, min(full, -(-len(pieces) // budget.num_ranks)))


def _bins(pieces: Sequence[_Piece], budget: Budget) -> list[_Bin]:
    """Fill as few bins as possible, a multiple of the number of ranks."""
    by_cost = sorted(pieces, key=lambda piece: (-piece.cost, piece.group, piece.rows))
    num = _num_micro_batches(pieces, budget)
    while (bins := _filled(by_cost, num * budget.num_ranks, budget.max_tokens)) is None:
        num += 1
    return bins


def _filled(pieces: Sequence[_Piece], num_bins: int, max_tokens: int) -> list[_Bin] | None:
    bins = [_Bin() for _ in range(num_bins)]
    heap = [(0.0, number) for number in range(num_bins)]
    for piece in pieces:
        popped = []  # lighter bins without room for it, and the bin that takes it
        while heap:
            cost, number = heapq.heappop(heap)
            found = bins[number]
            if not found.rows or found.num_tokens_with(piece) <= max_tokens:
                found.add(piece)
                popped.append((found.cost, number))
                break
            popped.append((cost, number))
        else:
            return None
        for entry in popped:
            heapq.heappush(heap, entry)
    return bins


def _in_micro_batches(bins: Sequence[_Bin], num_ranks: int) -> list[list[_Bin]]:
    """Group bins of similar cost; balance the sums of the ranks over all micro-batches."""
    by_cost = sorted(bins, key=lambda one: -one.cost)
    sums = [0.0] * num_ranks
    micro_batches = []
    for start in range(0, len(by_cost), num_ranks):
        micro_batch: list[_Bin] = [by_cost[start]] * num_ranks
        lightest = sorted(range(num_ranks), key=lambda rank: sums[rank])
        for rank, one in zip(lightest, by_cost[start : start + num_ranks], strict=True):
            micro_batch[rank] = one
            sums[rank] += one.cost
        micro_batches.append(micro_batch)
    return micro_batches
