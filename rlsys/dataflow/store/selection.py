"""Which of the ready rows or groups a stage takes next.

In: candidates, each a row or a whole group whose columns are all there. Out: their order, and which
of the first in that order go together. Pure functions, put together in a `Selection`:

    whole_groups(length_bucketed(OLDEST_VERSION_FIRST))

`karmarkar_karp` splits what was taken over data-parallel ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlsys.config import require


class Candidate(NamedTuple):
    """A ready row, or a ready group (then over all of its rows)."""

    issued: int  # rows and groups are numbered in the order in which they were issued
    arrival: int  # numbered in the order in which they became ready; 0: taken before, given back
    min_version: int  # oldest policy_version among its tokens
    num_tokens: int


Rank = int | tuple[int, ...]
# (num_tokens of candidates in rank order, how many are wanted) -> places of those that go together
Choose = Callable[[Sequence[int], int], Sequence[int]]


def first_ones(lengths: Sequence[int], num_wanted: int) -> Sequence[int]:
    return range(min(num_wanted, len(lengths)))


def similar_lengths(lengths: Sequence[int], num_wanted: int) -> Sequence[int]:
    """Those that need the least padding to one length, the first candidate always among them, so
    that none waits for ever.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    num_wanted = min(num_wanted, len(lengths))
    first = by_length.index(0)
    starts = range(max(0, first - num_wanted + 1), min(first, len(lengths) - num_wanted) + 1)
    best = min(
        starts,
        key=lambda start: lengths[by_length[start + num_wanted - 1]] - lengths[by_length[start]],
    )
    return sorted(by_length[best : best + num_wanted])


@dataclass(frozen=True, kw_only=True)
class Selection:
    rank: Callable[[Candidate], Rank]
    """Smaller is taken earlier. Computed once, when the candidate becomes ready."""
    choose: Choose = first_ones
    lookahead: int = 1
    """How many batches of candidates `choose` sees."""
    gapless: bool = False
    """Take nothing before everything that was issued earlier has been taken or has ended."""
    groups: bool = False
    """Candidates are whole groups."""

    def __post_init__(self) -> None:
        require(
            self.lookahead >= 1, f"lookahead={self.lookahead} shows no candidates; use at least 1."
        )
        require(
            not (self.gapless and self.choose is not first_ones),
            "a selection in issue order cannot choose by length too; use one of both.",
        )


FIRST_COMPLETE = Selection(rank=lambda candidate: candidate.arrival)
FIRST_ISSUED = Selection(rank=lambda candidate: candidate.issued)
OLDEST_VERSION_FIRST = Selection(rank=lambda candidate: (candidate.min_version, candidate.arrival))
FIRST_ISSUED = Selection(rank=lambda candidate: candidate.issued)
# The same rows in the same order in every run: for on-policy training that can be repeated exactly.
IN_ORDER = Selection(rank=lambda candidate: candidate.issued, gapless=True)


def whole_groups(selection: Selection = FIRST_COMPLETE) -> Selection:
    return replace(selection, groups=True)


def length_bucketed(selection: Selection = FIRST_COMPLETE, *, lookahead: int = 4) -> Selection:
    """Batches of similar lengths, out of the next `lookahead` batches."""
    return replace(selection, choose=similar_lengths, lookahead=lookahead)


def karmarkar_karp(
    lengths: Sequence[int], num_ranks: int, *, equal_sizes: bool = False
) -> list[list[int]]:
    """Split items over ranks so that the ranks' sums are nearly equal.

    Largest differencing method (Karmarkar and Karp 1982, for any number of ranks): two partial
    splits at a time are merged, the heaviest rank of one with the lightest of the other, those
    with the widest spread first. The sums differ by at most the largest length.

    equal_sizes: every rank gets the same number of items; raises ValueError if that cannot be.
    Returns the items' places per rank; a rank may stay empty. O(n·ranks·log).
    """
    require(num_ranks >= 1, f"num_ranks={num_ranks} has nobody to give rows to; use at least 1.")
    require(
        not equal_sizes or len(lengths) % num_ranks == 0,
        f"{len(lengths)} rows cannot be split equally over {num_ranks} ranks; use a multiple.",
    )
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # A split: its ranks as (sum, items), heaviest first. Equal sizes follow when every split that
    # is merged has the same number of items on each rank.
    per_split = num_ranks if equal_sizes else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(range(0, len(by_length), per_split)):
        ranks = [(lengths[i], [i]) for i in by_length[start : start + per_split]]
        ranks += [(0, []) for _ in range(num_ranks - len(ranks))]
        heap.append((ranks[-1][0] - ranks[0][0], number, ranks))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (heavy + light, [*items, *others])
            for (heavy, items), (light, others) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda rank: -rank[0])
        number += 1
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    if not heap:
        return [[] for _ in range(num_ranks)]
    return [items for _, items in heap[0][2]]
