"""Selections: rules for which of the ready rows or groups a stage takes next.

In: candidates, each a row or a whole group with complete columns. Out: their order, and which of
the first ones form a batch. Pure functions, combined in a `Selection`:

    whole_groups(length_bucketed(OLDEST_VERSION_FIRST))

`karmarkar_karp` splits a batch over data-parallel ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlsys.errors import require


class Candidate(NamedTuple):
    """A ready row or group; a group's numbers are those of all its rows."""

    issued: int  # number in the order of issue
    arrival: int  # number in the order of readiness; 0 for requeued ones
    min_version: int  # oldest policy_version among its tokens
    num_tokens: int


Rank = int | tuple[int, ...]
# (num_tokens of candidates in rank order, number wanted) -> places of those that form a batch
Choose = Callable[[Sequence[int], int], Sequence[int]]


def first_ones(lengths: Sequence[int], num_wanted: int) -> Sequence[int]:
    """Choose the first candidates."""
    return range(min(num_wanted, len(lengths)))


def similar_lengths(lengths: Sequence[int], num_wanted: int) -> Sequence[int]:
    """Choose the candidates that need the least padding to one length.

    The first candidate is always among them, so none waits for ever.
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
    """A rule for the next batch.

    Attributes:
        rank: Sort key, smallest first, computed when the candidate becomes ready.
        choose: Chooses a batch from the first candidates.
        lookahead: Number of batches that `choose` sees.
        gapless: Take a candidate only after all earlier issued ones were taken or have ended.
        groups: Candidates are whole groups.
    """

    rank: Callable[[Candidate], Rank]
    choose: Choose = first_ones
    lookahead: int = 1
    gapless: bool = False
    groups: bool = False

    def __post_init__(self) -> None:
        require(
            self.lookahead >= 1,
            "lookahead",
            self.lookahead,
            rule="must be at least 1",
            fix="Use at least 1.",
        )
        require(
            not (self.gapless and self.choose is not first_ones),
            "gapless",
            self.gapless,
            rule="a selection in issue order cannot choose by length",
            fix="Use one of the two.",
        )


FIRST_COMPLETE = Selection(rank=lambda candidate: candidate.arrival)
OLDEST_VERSION_FIRST = Selection(rank=lambda candidate: (candidate.min_version, candidate.arrival))
FIRST_ISSUED = Selection(rank=lambda candidate: candidate.issued)
# The same rows in the same order in every run, for reproducible on-policy training.
IN_ORDER = Selection(rank=lambda candidate: candidate.issued, gapless=True)


def whole_groups(selection: Selection = FIRST_COMPLETE) -> Selection:
    """Return a selection of whole groups."""
    return replace(selection, groups=True)


def length_bucketed(selection: Selection = FIRST_COMPLETE, *, lookahead: int = 4) -> Selection:
    """Return a selection of similar lengths out of the next `lookahead` batches."""
    return replace(selection, choose=similar_lengths, lookahead=lookahead)


def karmarkar_karp(
    lengths: Sequence[int], num_ranks: int, *, equal_sizes: bool = False
) -> list[list[int]]:
    """Split items over ranks so that the ranks' sums are nearly equal.

    Largest differencing method (Karmarkar and Karp 1982, for any number of ranks): the two partial
    splits with the widest spread are merged, the heaviest rank of one with the lightest of the
    other, until one split is left. The sums differ by at most the largest length. O(n·ranks·log).

    Return the places of the items of each rank; a rank may be empty. With `equal_sizes`, every rank
    gets the same number of items.

    Raises:
        InvalidValue: `num_ranks` is below 1, or equal sizes are impossible.
    """
    require(
        num_ranks >= 1, "num_ranks", num_ranks, rule="must be at least 1", fix="Use at least 1."
    )
    require(
        not equal_sizes or len(lengths) % num_ranks == 0,
        "number of rows",
        len(lengths),
        rule=f"is not divisible by {num_ranks} ranks",
        fix=f"Use a multiple of {num_ranks}.",
    )
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # A split: its ranks as (sum, items), heaviest first. With equal sizes, every merged split has
    # the same number of items on each rank.
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
