from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.dataflow.store.ready_rows import ReadyQueue
from rlsys.dataflow.store.selection import (
    FIRST_COMPLETE,
    FIRST_ISSUED,
    IN_ORDER,
    OLDEST_VERSION_FIRST,
    Candidate,
    Selection,
    karmarkar_karp,
    length_bucketed,
    similar_lengths,
    whole_groups,
)
from tests.errors import invalid


def ready(
    selection: Selection, candidates: Sequence[Candidate], *, taken: Sequence[int] = ()
) -> ReadyQueue:
    lengths = {candidate.issued: candidate.num_tokens for candidate in candidates}
    queue = ReadyQueue(
        selection,
        num_tokens=lambda number: lengths[number],
        is_open=lambda number: number not in taken,
    )
    for candidate in candidates:
        queue.push(candidate)
    return queue


def candidate(issued: int, arrival: int, min_version: int = 0, num_tokens: int = 1) -> Candidate:
    return Candidate(issued=issued, arrival=arrival, min_version=min_version, num_tokens=num_tokens)


ARRIVED = [candidate(5, 1, 7), candidate(2, 2, 6), candidate(9, 3, 6), candidate(0, 4, 8)]


def test_first_complete_takes_in_order_of_arrival() -> None:
    assert ready(FIRST_COMPLETE, ARRIVED).pop(1, 3) == [5, 2, 9]


def test_given_back_rows_come_first() -> None:
    queue = ready(FIRST_COMPLETE, ARRIVED)
    assert queue.pop(2, 2) == [5, 2]
    queue.push(candidate(2, 0))
    assert queue.pop(1, 4) == [2, 9, 0]


def test_oldest_version_first_breaks_ties_by_arrival() -> None:
    assert ready(OLDEST_VERSION_FIRST, ARRIVED).pop(1, 4) == [2, 9, 5, 0]


def test_first_issued_does_not_wait_for_gaps() -> None:
    assert ready(FIRST_ISSUED, ARRIVED).pop(1, 3) == [0, 2, 5]


def test_in_order_waits_for_what_was_issued_before() -> None:
    assert ready(IN_ORDER, ARRIVED).pop(1, 4) == [0]
    assert ready(IN_ORDER, ARRIVED[:3], taken=[0]).pop(1, 4) == []  # 1 is still to come
    assert ready(IN_ORDER, ARRIVED, taken=[1]).pop(1, 4) == [0, 2]
    queue = ready(IN_ORDER, ARRIVED, taken=[0, 1, 3, 4])  # 0 was given back
    assert queue.pop(4, 4) == []
    assert queue.pop(3, 4) == [0, 2, 5]
    assert len(queue) == 1


def test_too_few_candidates_stay_where_they_are() -> None:
    queue = ready(length_bucketed(FIRST_COMPLETE), ARRIVED)
    assert queue.pop(5, 5) == []
    assert sorted(queue.pop(4, 4)) == [0, 2, 5, 9]
    assert len(queue) == 0


def test_similar_lengths_choose_the_narrowest_batch_with_the_first_candidate() -> None:
    #                       the first one, 90, with 85 and 100 rather than with 10, 11, 12
    assert similar_lengths([90, 10, 11, 85, 12, 100], 3) == [0, 3, 5]
    assert similar_lengths([90, 10], 3) == [0, 1]


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_similar_lengths_are_the_best_choice_with_the_first(
    lengths: list[int], num_wanted: int
) -> None:
    chosen = similar_lengths(lengths, num_wanted)
    size = min(num_wanted, len(lengths))
    assert len(set(chosen)) == size
    assert 0 in chosen
    others = itertools.combinations(range(1, len(lengths)), size - 1)
    spreads = [
        max(lengths[i] for i in (0, *rest)) - min(lengths[i] for i in (0, *rest)) for rest in others
    ]
    assert max(lengths[i] for i in chosen) - min(lengths[i] for i in chosen) == min(spreads)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=40),
    st.sampled_from([FIRST_COMPLETE, OLDEST_VERSION_FIRST, length_bucketed(), FIRST_ISSUED]),
    st.integers(1, 7),
    st.data(),
)
def test_every_candidate_leaves_the_queue_once(
    rows: list[tuple[int, int]], selection: Selection, num_wanted: int, data: st.DataObject
) -> None:
    queue = ready(
        selection, [candidate(i, i + 1, version, n) for i, (version, n) in enumerate(rows)]
    )
    ended = data.draw(st.sets(st.integers(0, max(len(rows) - 1, 0))))
    for number in ended:
        queue.discard(number)
    popped: list[int] = []
    while numbers := queue.pop(1, num_wanted):
        assert len(numbers) <= num_wanted
        popped += numbers
    assert sorted(popped) == sorted(set(range(len(rows))) - ended)


def test_refused_selections() -> None:
    with invalid("gapless", True):
        length_bucketed(IN_ORDER)
    with invalid("lookahead", 0):
        length_bucketed(lookahead=0)
    assert whole_groups(IN_ORDER).gapless


def test_karmarkar_karp_by_hand() -> None:
    # 8 7 6 5 4: 8-7=1, 6-5=1, 4-1=3, 3-1=2 -> sums 16 and 14, where the best split has 15 and 15.
    assert sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2)) == [14, 16]
    # In equal numbers: 8,1 7,2 6,3 -> three pairs of 9.
    split = karmarkar_karp([8, 7, 6, 3, 2, 1], 3, equal_sizes=True)
    assert sums([8, 7, 6, 3, 2, 1], split) == [9, 9, 9]
    assert karmarkar_karp([], 2) == [[], []]
    assert sorted(karmarkar_karp([5], 2)) == [[], [0]]
    with invalid("number of rows", 5):
        karmarkar_karp([1, 1, 1, 1, 1], 2, equal_sizes=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10_000), max_size=60), st.integers(1, 9), st.booleans())
def test_karmarkar_karp_partitions_within_its_bound(
    lengths: list[int], num_ranks: int, equal_sizes: bool
) -> None:
    if equal_sizes:
        lengths = lengths[: len(lengths) // num_ranks * num_ranks]
    split = karmarkar_karp(lengths, num_ranks, equal_sizes=equal_sizes)
    assert len(split) == num_ranks
    assert sorted(i for items in split for i in items) == list(range(len(lengths)))
    totals = sums(lengths, split)
    assert totals[-1] - totals[0] <= max(lengths, default=0)
    if equal_sizes:
        assert {len(items) for items in split} == {len(lengths) // num_ranks}


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_karmarkar_karp_is_close_to_the_best_split(lengths: list[int], num_ranks: int) -> None:
    """Within 4/3 - 1/(3m) of the optimum: Michiels, Korst, Aarts and van Leeuwen, 2003."""
    best = min(
        max(sum(n for n, r in zip(lengths, ranks, strict=True) if r == rank) for rank in set(ranks))
        for ranks in itertools.product(range(num_ranks), repeat=len(lengths))
    )
    heaviest = sums(lengths, karmarkar_karp(lengths, num_ranks))[-1]
    assert heaviest <= (Fraction(4, 3) - Fraction(1, 3 * num_ranks)) * best


def sums(lengths: Sequence[int], split: Sequence[Sequence[int]]) -> list[int]:
    return sorted(sum(lengths[i] for i in items) for items in split)
