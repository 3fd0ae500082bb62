"""Scheduling of one sampler replica: who is next, and when the replica switches to other weights.

    add(whole, request) ──► waiting, by whole weights ─┬► admit() ──► running ──► ended()
                            and then by owner          └► due() ──► whole weights to load, when
                                                                    nothing runs

A replica has whole weights, those of the base model or of a model that is trained as a whole, and
any number of adapters of the base model. Requests of different adapters run in one batch. One
version samples a completion from its first token to its last.

Owners, the clients, take turns: the next request is the oldest one of the owner with the fewest
running completions, and among several such owners, of the one whose last turn was longest ago.
Owners that sample at the same time have equal shares of the batch. While another owner is active,
an owner has at most half of the batch, so that the other one need not wait for its completions to
end.

Requests for the current whole weights are admitted until a request for others has waited for
`patience_s`. Then running requests finish, and the replica loads the weights of the request that
has waited longest.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

# An owner is active for so long after its last request or the end of its last completion: it may
# train in between.
ACTIVE_S = 60.0


@dataclass(frozen=True)
class _Waiting(Generic[T]):
    number: int  # in the order of arrival
    since_s: float
    size: int
    request: T
    owner: str
    adapter: int


class SamplerScheduler(Generic[T]):
    """Scheduler of one replica, without I/O. `clock` returns monotonic seconds.

    A request counts as `size` completions. At most `max_running` are admitted at a time, or a
    single larger request, and at most `max_adapters` different adapters. `batch_size` completions
    are shared by active owners, each of which has at least a single request; None: no limit.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        patience_s: float,
        max_running: int,
        max_adapters: int = 1,
        batch_size: int | None = None,
    ) -> None:
        self.current: str | None = None  # whole weights
        self._clock = clock
        self._patience_s = patience_s
        self._max_running = max_running
        self._max_adapters = max_adapters
        self._batch_size = batch_size
        self._last_s: dict[str, float] = {}  # when owners were active, the longest ago first
        self._turns: dict[str, int] = {}  # number of the last turn of these owners
        self._numbers = itertools.count()
        # By whole weights, then by owner, then by number, the oldest first. No queue is empty.
        self._waiting: dict[str, dict[str, OrderedDict[int, _Waiting[T]]]] = {}
        self._places: dict[T, tuple[str, str, int]] = {}  # of waiting requests in it
        self._running: Counter[str] = Counter()  # completions, by owner
        self._adapters: Counter[int] = Counter()  # completions, by adapter

    @property
    def num_running(self) -> int:
        """Number of running completions."""
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._places)

    @property
    def running_adapters(self) -> set[int]:
        """Adapters that running completions use."""
        return set(self._adapters)

    def num_running_of(self, owner: str) -> int:
        """Return the number of running completions of an owner."""
        return self._running[owner]

    def add(
        self, whole: str, request: T, size: int = 1, *, owner: str = "", adapter: int = 0
    ) -> None:
        """Add a request that needs these whole weights, and an adapter unless it is 0.

        Waiting requests must differ.
        """
        assert request not in self._places
        self._note_active(owner)
        one = _Waiting(next(self._numbers), self._clock(), size, request, owner, adapter)
        self._waiting.setdefault(whole, {}).setdefault(owner, OrderedDict())[one.number] = one
        self._places[request] = whole, owner, one.number

    def remove(self, request: T) -> bool:
        """Remove a waiting request. Return whether it was waiting."""
        place = self._places.pop(request, None)
        if place is None:
            return False
        whole, owner, number = place
        owners = self._waiting[whole]
        del owners[owner][number]
        if not owners[owner]:
            del owners[owner]
        if not owners:
            del self._waiting[whole]
        return True

    def admit(self) -> list[T]:
        """Return the requests that may run now. They count as running."""
        admitted: list[T] = []
        while (one := self._admissible) is not None:
            self.remove(one.request)
            self._running[one.owner] += one.size
            self._turns[one.owner] = next(self._numbers)
            if one.adapter:
                self._adapters[one.adapter] += one.size
            admitted.append(one.request)
        return admitted

    @property
    def _admissible(self) -> _Waiting[T] | None:
        """The next request, if it may run now. Others wait behind it, so that it gets its turn."""
        if self.current not in self._waiting:
            return None
        firsts = [_first(queue) for queue in self._waiting[self.current].values()]
        num_owners = self._num_owners
        firsts = [one for one in firsts if not self._has_its_share(one, num_owners)]
        if not firsts:
            return None
        first = min(
            firsts,
            key=lambda one: (self._running[one.owner], self._turns.get(one.owner, -1), one.number),
        )
        if self.num_running and self.num_running + first.size > self._max_running:
            return None
        is_another = first.adapter and first.adapter not in self._adapters
        if is_another and len(self._adapters) >= self._max_adapters:
            return None
        other = self._oldest_other
        oldest = min(one.number for one in firsts)
        if other is not None and other.number < oldest and self._is_patience_over:
            return None
        return first

    def _has_its_share(self, one: _Waiting[T], num_owners: int) -> bool:
        """Return whether a request must wait for completions of its owner, so others have room."""
        num_running = self._running[one.owner]
        if self._batch_size is None or not num_running:
            return False
        if num_running + one.size <= self._batch_size // max(2, num_owners):
            return False
        now = self._clock()
        return num_owners > 1 or any(
            owner != one.owner and now - last_s < ACTIVE_S for owner, last_s in self._last_s.items()
        )

    @property
    def _num_owners(self) -> int:
        """Number of owners with running or waiting completions."""
        waiting = (owner for owners in self._waiting.values() for owner in owners)
        return len({*self._running, *waiting})

    def _note_active(self, owner: str) -> None:
        now = self._clock()
        self._last_s.pop(owner, None)
        self._last_s[owner] = now
        while now - next(iter(self._last_s.values())) >= ACTIVE_S:
            gone = next(iter(self._last_s))
            del self._last_s[gone]
            self._turns.pop(gone, None)

    def waiting_for(self, whole: str) -> list[T]:
        """Return the requests that wait for these whole weights."""
        queues = self._waiting.get(whole, {}).values()
        return [one.request for queue in queues for one in queue.values()]

    def take_waiting_for(self, whole: str) -> list[T]:
        """Remove and return the requests that wait for these whole weights."""
        found = self.waiting_for(whole)
        for request in found:
            self.remove(request)
        return found

    def due(self) -> str | None:
        """Return the whole weights to load: nothing runs, and no waiting request may start."""
        if self.num_running or not self._waiting or self._admissible is not None:
            return None
        others = [(one.number, whole) for whole, one in self._oldest() if whole != self.current]
        return min(others, default=(0, None))[1]

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

    def switched(self, whole: str | None) -> None:
        """Note that the replica has these whole weights. None: they are unknown."""
        assert not self.num_running, "every completion has one version"
        self.current = whole

    def ended(self, count: int, *, owner: str = "", adapter: int = 0) -> None:
        """Note that this many completions have ended."""
        assert self._running[owner] >= count
        self._note_active(owner)
        self._running[owner] -= count
        self._running += Counter()  # drops zeros
        if adapter:
            self._adapters[adapter] -= count
            self._adapters += Counter()

    def stopped(self) -> None:
        """Note that no completion runs any more."""
        self._running.clear()
        self._adapters.clear()

    def _oldest(self) -> Iterator[tuple[str, _Waiting[T]]]:
        """Yield the oldest request for each of the whole weights."""
        for whole, owners in self._waiting.items():
            firsts = (_first(queue) for queue in owners.values())
            yield whole, min(firsts, key=lambda one: one.number)

    @property
    def _oldest_other(self) -> _Waiting[T] | None:
        others = (one for whole, one in self._oldest() if whole != self.current)
        return min(others, key=lambda one: one.number, default=None)

    @property
    def _is_patience_over(self) -> bool:
        """Return whether a request for other weights has waited long enough."""
        other = self._oldest_other
        return other is not None and self._clock() - other.since_s >= self._patience_s


def _first(queue: OrderedDict[int, _Waiting[T]]) -> _Waiting[T]:
    return next(iter(queue.values()))
