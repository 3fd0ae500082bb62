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
    wholes = [_whole(number, group, budget) for number, group in enumerate(groups)]
    # A single rank does not wait, so cuts do not help it.
    for pieces_per_bin in CUTS[:1] if whole_groups or budget.num_ranks == 1 else CUTS:
        pieces = [one.piece for one in wholes]
        if not whole_groups:
            pieces = _cut(wholes, budget, pieces_per_bin)
        micro_batches = _in_micro_batches(_bins(pieces, budget), budget.num_ranks)
        cost = sum(max(one.cost for one in bins) for bins in micro_batches)
        plans.append((cost, len(plans), micro_batches))
    return [[sorted(one.rows) for one in bins] for bins in min(plans)[2]]


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """A group as one piece, and the cost of each of its rows."""

    lengths: Sequence[int]
    row_costs: Sequence[float]
    piece: _Piece

    def part(self, rows: Sequence[int]) -> _Piece:
        return _Piece(
            group=self.piece.group,
            rows=tuple(rows),
            prompt=self.piece.prompt,
            completions=_Load(
                num_tokens=sum([self.lengths[row] for row in rows]),
                cost=sum([self.row_costs[row] for row in rows]),
            ),
        )


def _whole(number: int, group: GroupLengths, budget: Budget) -> _Whole:
    costs = [budget.cost(group.prompt, length) for length in group.completions]
    piece = _Piece(
        group=number,
        rows=tuple(range(len(costs))),
        prompt=_Load(num_tokens=group.prompt, cost=budget.cost(0, group.prompt)),
        completions=_Load(num_tokens=sum(group.completions), cost=sum(costs)),
    )
    return _Whole(lengths=group.completions, row_costs=costs, piece=piece)


def _cut(wholes: Sequence[_Whole], budget: Budget, pieces_per_bin: int | None) -> list[_Piece]:
    max_cost = float("inf")
    if pieces_per_bin is not None:
        all_pieces = [one.piece for one in wholes]
        num_bins = _num_micro_batches(all_pieces, budget) * budget.num_ranks
        max_cost = sum(piece.cost for piece in all_pieces) / (num_bins * pieces_per_bin)
    return [piece for one in wholes for piece in _pieces(one, budget, max_cost)]


def _pieces(whole: _Whole, budget: Budget, max_cost: float) -> Sequence[_Piece]:
    """Cut a group into the fewest pieces of similar cost that fit and cost at most `max_cost`.

    Single rows may be larger.
    """
    num_rows = len(whole.lengths)
    by_length = sorted(range(num_rows), key=lambda row: -whole.lengths[row])
    tokens, cost = whole.piece.num_tokens, whole.piece.cost
    fewest = max(1, int(tokens / budget.max_tokens), int(cost / max_cost))
    pieces = [whole.piece]
    for num_pieces in range(min(fewest, num_rows), num_rows + 1):
        # Deal the rows back and forth, so that the sums are similar.
        order = [*range(num_pieces), *reversed(range(num_pieces))]
        dealt: list[list[int]] = [[] for _ in range(num_pieces)]
        for place, row in enumerate(by_length):
            dealt[order[place % len(order)]].append(row)
        pieces = [whole.part(rows) for rows in dealt]
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
