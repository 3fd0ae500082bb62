"""The queue of waiting requests: highest priority first, equal ones in order of arrival."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable

from rlsys.types import GenerationRequest


class Waiting:
    """Requests that wait for a slot."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, GenerationRequest]] = []  # −priority, number, request
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def extend(self, requests: Iterable[GenerationRequest]) -> None:
        """Add requests."""
        for request in requests:
            heapq.heappush(self._heap, (-request.priority, next(self._numbers), request))

    @property
    def first(self) -> GenerationRequest:
        """The next request; there must be one."""
        return self._heap[0][2]

    def pop(self) -> GenerationRequest:
        """Remove the next request and return it."""
        return heapq.heappop(self._heap)[2]

    def remove(self, request_ids: Collection[str]) -> list[GenerationRequest]:
        """Remove these requests and return those that were waiting, in order."""
        removed = [entry for entry in self._heap if entry[2].request_id in request_ids]
        if removed:
            self._heap = [one for one in self._heap if one[2].request_id not in request_ids]
            heapq.heapify(self._heap)
        return [request for _, _, request in sorted(removed, key=lambda entry: entry[:2])]
