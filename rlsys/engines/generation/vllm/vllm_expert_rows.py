"""The experts of every token that a vLLM engine computes, kept by request and by cache slot.

    step: rows of experts [N, L·K] ─┬─► table [S, L·K] by slot of the KV cache
                                    └─► rows of each request, position by position
    request that reuses cached tokens ◄── rows of their slots

The table follows the KV cache. A cached token that a request reuses was computed by another
request, and its row is at the token's slot. Rows of a request stay when its tokens are computed
again after a preemption, because the first pass sampled the next token. Positions of rejected
drafts are overwritten.

Shape legend: N tokens of a step, S slots, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsys.types import ExpertArray

SlotArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class ScheduledTokens:
    """Tokens of a request in a step: positions `start` to `end`.

    Attributes:
        request_id: None for a request whose rows are not requested.
        num_known: Tokens of prompt and completion that are certain, without drafts.
        slots: Function that returns the slots of the positions from one up to another.
    """

    request_id: str | None
    start: int
    end: int
    num_known: int
    slots: Callable[[int, int], SlotArray]


class ExpertRows:
    """Rows of experts of a KV cache with `num_slots` slots and of its requests."""

    def __init__(self, num_slots: int, width: int, dtype: npt.DTypeLike) -> None:
        self._of_slots = np.zeros((num_slots, width), dtype)
        self._of_requests: dict[str, _Rows] = {}

    def record(self, scheduled: Sequence[ScheduledTokens], experts: ExpertArray) -> None:
        """Record the rows [N, L·K] of a step, request after request."""
        first = 0
        parts = []
        for one in scheduled:
            part = experts[first : first + one.end - one.start]
            self._of_slots[one.slots(one.start, one.end)] = part
            parts.append(part)
            first += len(part)
        # After all slots are written: a request may reuse tokens that this step computes.
        for one, part in zip(scheduled, parts, strict=True):
            if one.request_id is not None:
                self._record_request(one.request_id, one, part)

    def _record_request(self, name: str, one: ScheduledTokens, part: ExpertArray) -> None:
        rows = self._of_requests.get(name)
        if rows is None:
            rows = self._of_requests[name] = _Rows(self._of_slots[:0])
            rows.append(self._of_slots[one.slots(0, one.start)])
        # The last known token is an input of this step at the earliest. Later rows were drafts.
        rows.truncate(one.num_known - 1)
        if len(rows) < one.start:  # tokens that another request has computed since a preemption
            rows.append(self._of_slots[one.slots(len(rows), one.start)])
        rows.append(part[len(rows) - one.start :])

    def rows(self, request_id: str, start: int) -> ExpertArray:
        """Return the rows [.., L·K] of a request from a position on; none for an unknown one."""
        found = self._of_requests.get(request_id)
        return self._of_slots[:0] if found is None else found.from_position(start)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the rows of requests that have ended."""
        for name in request_ids:
            self._of_requests.pop(name, None)

    def forget_all(self) -> None:
        """Free the rows of all requests."""
        self._of_requests.clear()


class _Rows:
    """A growing array of rows."""

    def __init__(self, empty: ExpertArray) -> None:
        self._array = np.empty_like(empty)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, rows: ExpertArray) -> None:
        end = self._length + len(rows)
        if end > len(self._array):
            grown = np.empty((max(end, 2 * len(self._array)), rows.shape[1]), self._array.dtype)
            grown[: self._length] = self._array[: self._length]
            self._array = grown
        self._array[self._length : end] = rows
        self._length = end

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def from_position(self, start: int) -> ExpertArray:
        return self._array[start : self._length].copy()
