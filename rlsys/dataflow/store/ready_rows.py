"""The queue of candidates of one stage, in the order of its selection.

In: candidates as they become ready, and those that end before they are taken. Out: the ones to
take next. Ended candidates stay in the heap as stale entries until they are popped or the heap is
rebuilt, so every operation costs O(log n) on average.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from rlsys.dataflow.store.selection import Candidate, Rank, Selection, first_ones


class ReadyQueue:
    """A heap of candidates.

    Args:
        num_tokens: Length of a row or group.
        is_open: Whether a row or group has neither ended nor been taken by this stage. True for
            one that is not issued yet.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        num_tokens: Callable[[int], int],
        is_open: Callable[[int], bool],
    ) -> None:
        self._selection = selection
        self._num_tokens = num_tokens
        self._is_open = is_open
        self._heap: list[tuple[Rank, int]] = []
        self._ready: set[int] = set()
        self._next_issued = 0  # if gapless: all earlier candidates were taken or have ended

    def __len__(self) -> int:
        return len(self._ready)

    def push(self, candidate: Candidate) -> None:
        """Add a candidate."""
        self._ready.add(candidate.issued)
        heapq.heappush(self._heap, (self._selection.rank(candidate), candidate.issued))

    def discard(self, number: int) -> None:
        """Remove a row or group that has ended, if it was ready."""
        self._ready.discard(number)
        if len(self._heap) > 2 * len(self._ready) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._ready]
            heapq.heapify(self._heap)

    def pop(self, at_least: int, at_most: int) -> list[int]:
        """Take up to `at_most` candidates; none if there would be fewer than `at_least`."""
        if len(self._ready) < at_least:
            return []
        head = self._pop_head(at_most * self._selection.lookahead)
        chosen = self._choose([number for _, number in head], at_most)
        if len(chosen) < at_least:
            chosen = ()
        taken = set(chosen)
        for place, entry in enumerate(head):
            if place not in taken:
                heapq.heappush(self._heap, entry)
        numbers = [head[place][1] for place in chosen]
        self._ready.difference_update(numbers)
        return numbers

    def _choose(self, numbers: Sequence[int], num_wanted: int) -> Sequence[int]:
        choose = self._selection.choose
        if choose is first_ones:
            return range(min(num_wanted, len(numbers)))
        return choose([self._num_tokens(number) for number in numbers], num_wanted)

    def _pop_head(self, num_wanted: int) -> list[tuple[Rank, int]]:
        gapless = self._selection.gapless
        if gapless:
            self._next_issued = next_issued = self._first_open(self._next_issued)
        head: list[tuple[Rank, int]] = []
        while self._heap and len(head) < num_wanted:
            number = self._heap[0][1]
            if number in self._ready:
                if gapless and number > next_issued:
                    break
                if gapless and number == next_issued:
                    next_issued = self._first_open(number + 1)
                head.append(heapq.heappop(self._heap))
            else:
                heapq.heappop(self._heap)
        return head

    def _first_open(self, number: int) -> int:
        while not self._is_open(number):
            number += 1
        return number
