"""Order of the calls of one trainer process, which has several models of several owners.

    add(call) ──► waiting ──► take() ──► running: a command, or parts of passes ──► ended()

Owners, the clients, take turns. The owners of the calls that have just run come after all others
that wait. Among the others, the oldest call is next. If it is a part of a pass, the waiting parts
of others run with it, one of each owner first, as far as they fit into one pass. A call never waits
for one that has not arrived.

So a call waits for the calls that run when it arrives, and then for older calls of other owners. An
owner that adds one call after the other is served every second time at most while others wait.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    number: int  # in the order of arrival
    call: T
    owner: str
    model: str
    num_tokens: int | None


class TrainerScheduler(Generic[T]):
    """Scheduler of one process, without I/O. Calls that run together have `max_tokens` at most."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting[T]] = {}  # by number, the oldest first
        self._is_running = False
        self._last_owners: frozenset[str] = frozenset()  # of the calls that ran last

    @property
    def num_waiting(self) -> int:
        """Number of waiting calls."""
        return len(self._waiting)

    def add(self, call: T, *, owner: str, model: str, num_tokens: int | None = None) -> None:
        """Add a call. A part of a pass has tokens; any other command runs alone.

        Calls of a model run in the order in which they were added.
        """
        number = next(self._numbers)
        self._waiting[number] = _Waiting(number, call, owner, model, num_tokens)

    def remove(self, call: T) -> bool:
        """Remove a waiting call. Return whether it was waiting."""
        for number, one in self._waiting.items():
            if one.call is call:
                del self._waiting[number]
                return True
        return False

    def take(self) -> list[T]:
        """Return the calls that run now, until `ended`: none while others run or if none waits."""
        if self._is_running or not self._waiting:
            return []
        chosen = self._chosen()
        for one in chosen:
            del self._waiting[one.number]
        self._is_running = True
        self._last_owners = frozenset(one.owner for one in chosen)
        return [one.call for one in chosen]

    def ended(self) -> None:
        """Note that the calls that `take` has returned have ended."""
        assert self._is_running, "call take first"
        self._is_running = False

    def _chosen(self) -> list[_Waiting[T]]:
        first_of_models: dict[str, _Waiting[T]] = {}
        for one in self._waiting.values():
            first_of_models.setdefault(one.model, one)
        candidates = list(first_of_models.values())
        others = [one for one in candidates if one.owner not in self._last_owners]
        candidates = others or candidates
        oldest = candidates[0]
        if oldest.num_tokens is None:
            return [oldest]
        chosen, num_tokens = [oldest], oldest.num_tokens
        for one in _in_turns(candidates):
            if one is oldest or one.num_tokens is None:
                continue
            if num_tokens + one.num_tokens <= self._max_tokens:
                chosen.append(one)
                num_tokens += one.num_tokens
        return chosen


def _in_turns(calls: list[_Waiting[T]]) -> list[_Waiting[T]]:
    """Return the first call of each owner, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for one in calls:
        turns.append((seen[one.owner], one.number, one))
        seen[one.owner] += 1
    return [one for _, _, one in sorted(turns, key=lambda turn: turn[:2])]
