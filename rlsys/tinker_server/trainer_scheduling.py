"""Order of the calls of one trainer process, which has several models of several owners.

    add(call) ──► waiting ──► take() ──► running ──► ended()

One call runs at a time. Owners, the clients, take turns: the owner whose last turn was longest ago
is next, with its oldest call. So an owner's oldest call waits for the running call and for one call
of each other owner at most.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TrainerScheduler(Generic[T]):
    """Scheduler of one process, without I/O."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}  # by owner, those who have waited longest first
        self._turns: dict[str, int] = {}  # the last turn of each owner
        self._num_turns = 0
        self._is_running = False

    def add(self, call: T, *, owner: str) -> None:
        """Add a call. Calls of an owner run in the order in which they were added."""
        self._waiting.setdefault(owner, deque()).append(call)

    def remove(self, call: T) -> bool:
        """Remove a waiting call. Return whether it was waiting."""
        for owner, calls in self._waiting.items():
            if call in calls:
                calls.remove(call)
                self._forget_if_empty(owner)
                return True
        return False

    def take(self) -> T | None:
        """Return the call that runs now, until `ended`: None while one runs or if none waits."""
        if self._is_running:
            return None
        if not self._waiting:
            self._turns.clear()  # no owner waits
            return None
        owner = min(self._waiting, key=lambda one: self._turns.get(one, 0))
        call = self._waiting[owner].popleft()
        self._forget_if_empty(owner)
        self._num_turns += 1
        self._turns[owner] = self._num_turns
        self._is_running = True
        return call

    def ended(self) -> None:
        """Note that the call that `take` has returned has ended."""
        assert self._is_running, "call take first"
        self._is_running = False

    def _forget_if_empty(self, owner: str) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]
