"""Results of requests that take time, in memory.

    open(id) ──► pending ──► finish(id, answer) ──► kept until it was fetched, or for a limited time
                                 └──► wakes every waiter

Each future has one event and is not polled, so thousands of pending ones cost nothing. A fetched
result is kept for a while, because its answer may have been lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlsys.common.safe_json import dump_json
from rlsys.tinker_server.api_errors import ApiError

Category = Literal["user", "server"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Body of an answer, as it is sent."""

    body: bytes
    content_type: str = "application/json"


def json_answer(body: Mapping[str, Any]) -> Answer:
    """Return an answer with a JSON object."""
    return Answer(body=dump_json(body).encode())


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure, which the client raises as RequestFailedError."""

    message: str
    category: Category


@dataclass(kw_only=True)
class _Future:
    owner: str  # the session
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Answer | Failure | None = None
    expires_s: float | None = None  # by the clock; None while it is pending


class Futures:
    """All futures of a server.

    Args:
        clock: Returns monotonic seconds.
        max_pending: How many futures may be pending.
        max_pending_of_owner: How many futures of one session may be pending, so that it leaves
            room for others.
        keep_s: How long results are kept that were not fetched, as far as `expire` is called.
        fetched_keep_s: How long fetched results are kept.
        max_bytes: Size of all results. Beyond it, the oldest are dropped.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_pending: int = 65_536,
        max_pending_of_owner: int = 8_192,
        keep_s: float = 3600.0,
        fetched_keep_s: float = 60.0,
        max_bytes: int = 2**30,
    ) -> None:
        self._clock = clock
        self._max_pending = max_pending
        self._max_pending_of_owner = max_pending_of_owner
        self._pending: Counter[str] = Counter()  # by owner
        self._keep_s = keep_s
        self._fetched_keep_s = fetched_keep_s
        self._max_bytes = max_bytes
        self._futures: dict[str, _Future] = {}
        self._done: dict[str, None] = {}  # in the order of completion
        self._num_bytes = 0

    @property
    def num_pending(self) -> int:
        """Number of pending futures."""
        return len(self._futures) - len(self._done)

    def __contains__(self, name: str) -> bool:
        return name in self._futures

    def open(self, name: str, *, owner: str) -> None:
        """Add a pending future.

        Raises:
            ApiError: 429, too many are pending.
        """
        assert name not in self._futures, name
        if self._pending[owner] >= self._max_pending_of_owner:
            raise ApiError(
                "max_pending_of_session",
                self._max_pending_of_owner,
                rule=f"session {owner} has as many pending requests as the server allows it",
                fix="Wait for some of them.",
                status=429,
            )
        if self.num_pending >= self._max_pending:
            raise ApiError(
                "max_pending",
                self._max_pending,
                rule="the server has as many pending requests as it allows",
                fix="Wait for some of them.",
                status=429,
            )
        self._futures[name] = _Future(owner=owner)
        self._pending[owner] += 1

    def finish(self, name: str, outcome: Answer | Failure) -> None:
        """Set the result, once. Do nothing if the future was dropped."""
        future = self._futures.get(name)
        if future is None or future.outcome is not None:
            return
        future.outcome = outcome
        self._pending[future.owner] -= 1
        if not self._pending[future.owner]:
            del self._pending[future.owner]
        future.expires_s = self._clock() + self._keep_s
        future.is_done.set()
        self._done[name] = None
        self._num_bytes += _size(outcome)
        while self._num_bytes > self._max_bytes and len(self._done) > 1:
            self._drop(next(iter(self._done)))

    async def wait(self, name: str, timeout_s: float) -> Answer | Failure | None:
        """Return the result of a future, or None if it is still pending after `timeout_s`.

        Raises:
            ApiError: 410, the future is unknown or was dropped.
        """
        future = self._futures.get(name)
        if future is None:
            raise ApiError(
                "request_id",
                name,
                rule=f"there is no such result: it was kept for {self._keep_s:g} s, or for "
                f"{self._fetched_keep_s:g} s after it was fetched, or the server was restarted",
                fix="Send the request again if it may be repeated.",
                status=410,
            )
        if future.outcome is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await future.is_done.wait()
            except TimeoutError:
                return None
        return future.outcome

    def outcome(self, name: str) -> Answer | Failure | None:
        """Return the result, or None if the future is pending or unknown."""
        future = self._futures.get(name)
        return None if future is None else future.outcome

    def fetched(self, names: Iterable[str]) -> None:
        """Note that these results were fetched, and keep them for a little while."""
        limit_s = self._clock() + self._fetched_keep_s
        for name in names:
            future = self._futures.get(name)
            if future is not None and future.expires_s is not None:
                future.expires_s = min(future.expires_s, limit_s)

    def expire(self) -> None:
        """Drop the results whose time is over."""
        now = self._clock()
        expired = [name for name in self._done if (self._futures[name].expires_s or now) <= now]
        for name in expired:
            self._drop(name)

    def drop_all_of(self, owner: str) -> None:
        """Drop the futures of a session that has ended. Pending ones fail."""
        for name in [name for name, one in self._futures.items() if one.owner == owner]:
            self.finish(name, Failure(message=f"session {owner} has ended.", category="user"))
            self._drop(name)

    def _drop(self, name: str) -> None:
        future = self._futures.pop(name, None)
        if future is not None and self._done.pop(name, name) is None:
            self._num_bytes -= _size(future.outcome)


def _size(outcome: Answer | Failure | None) -> int:
    return len(outcome.body) if isinstance(outcome, Answer) else 0
