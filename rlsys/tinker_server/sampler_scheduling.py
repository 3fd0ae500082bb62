"""Scheduling of one sampler replica: which weights it has, and when it switches to others.

    add(key, request) ──► waiting, by weights ─┬► admit() ──► running, all of one key ──► ended()
                                               └► due() ──► the weights to load, when nothing runs

A replica has one version of one model's weights at a time, and one version samples a completion
from its first token to its last. Requests for the current weights are admitted at once, until a
request for others has waited for `patience_s`. Then running requests finish, and the replica loads
the weights of the request that has waited longest.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    number: int  # in the order of arrival
    since_s: float
    size: int
    request: T


class SamplerScheduler(Generic[T]):
    """Scheduler of one replica, without I/O. `clock` returns monotonic seconds. Keys name weights.

    A request counts as `size` completions. At most `max_running` are admitted at a time, or a
    single larger request.
    """

    def __init__(self, clock: Callable[[], float], *, patience_s: float, max_running: int) -> None:
        self.current: str | None = None
        self.num_running = 0  # completions
        self._clock = clock
        self._patience_s = patience_s
        self._max_running = max_running
        self._numbers = itertools.count()
        self._waiting: dict[str, deque[_Waiting[T]]] = {}  # by key, the oldest first

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def add(self, key: str, request: T, size: int = 1) -> None:
        """Add a request for these weights."""
        one = _Waiting(next(self._numbers), self._clock(), size, request)
        self._waiting.setdefault(key, deque()).append(one)

    def remove(self, request: T) -> bool:
        """Remove a waiting request. Return whether it was waiting."""
        for key, queue in self._waiting.items():
            for place, one in enumerate(queue):
                if one.request is request:
                    del queue[place]
                    if not queue:
                        del self._waiting[key]
                    return True
        return False

    def admit(self) -> list[T]:
        """Return the requests that may run now. They count as running."""
        admitted: list[T] = []
        while self._may_admit:
            assert self.current is not None
            queue = self._waiting[self.current]
            one = queue.popleft()
            if not queue:
                del self._waiting[self.current]
            self.num_running += one.size
            admitted.append(one.request)
        return admitted

    @property
    def _may_admit(self) -> bool:
        if self.current not in self._waiting:
            return False
        first, other = self._waiting[self.current][0], self._oldest_other
        if self.num_running and self.num_running + first.size > self._max_running:
            return False
        return other is None or first.number < other.number or not self._is_patience_over

    def waiting_for(self, key: str) -> list[T]:
        """Return the requests that wait for these weights."""
        return [one.request for one in self._waiting.get(key, ())]

    def take_waiting_for(self, key: str) -> list[T]:
        """Remove and return the requests that wait for these weights."""
        return [one.request for one in self._waiting.pop(key, ())]

    def due(self) -> str | None:
        """Return the weights to load now: nothing runs, and no waiting request may start."""
        if self.num_running or not self._waiting or self._may_admit:
            return None
        others = [key for key in self._waiting if key != self.current]
        return min(others, key=lambda key: self._waiting[key][0].number, default=None)

    @property
    def patience_left_s(self) -> float | None:
        """Seconds until a request for other weights has waited long enough.

        None: there is none, or one has already.
        """
        other = self._oldest_other
        if other is None:
            return None
        left_s = other.since_s + self._patience_s - self._clock()
        return left_s if left_s > 0 else None

    def switched(self, key: str | None) -> None:
        """Note that the replica has these weights. None: they are unknown."""
        assert not self.num_running, "every completion has one version"
        self.current = key

    def ended(self, count: int) -> None:
        """Note that this many completions have ended."""
        self.num_running -= count
        assert self.num_running >= 0

    @property
    def _oldest_other(self) -> _Waiting[T] | None:
        others = [queue[0] for key, queue in self._waiting.items() if key != self.current]
        return min(others, key=lambda one: one.number, default=None)

    @property
    def _is_patience_over(self) -> bool:
        """Return whether a request for other weights has waited long enough."""
        other = self._oldest_other
        return other is not None and self._clock() - other.since_s >= self._patience_s
