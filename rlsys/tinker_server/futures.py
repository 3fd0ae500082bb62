"""What the client is to get of a request that takes its time, in memory.

open(id) ──► pending ──► finish(id, answer) ──► kept until it was fetched, or for so long
                             └──► every waiter at once

One event for each future, and none of it polled: thousands that wait cost nothing until they are
done. What was fetched stays for a while, since its answer may have been lost on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlsys.common.safe_json import dump_json
from rlsys.tinker_server.api_errors import ApiError

Category = Literal["user", "server"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The body of an answer, as it is sent."""

    body: bytes
    content_type: str = "application/json"


def json_answer(body: Mapping[str, Any]) -> Answer:
    """Return an answer with a JSON object."""
    return Answer(body=dump_json(body).encode())


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What the client raises as RequestFailedError."""

    message: str
    category: Category


@dataclass(kw_only=True)
class _Future:
    owner: str  # the session
    is_done: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: Answer | Failure | None = None
    expires_s: float | None = None  # by the clock; None while it is pending


class Futures:
    """`clock`: monotonic seconds. `keep_s`: of what nobody has fetched; `fetched_keep_s`: of what
    somebody has; both where `expire` is called now and then. `max_bytes` of answers that are kept;
    beyond it the oldest go first.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_pending: int = 16_384,
        keep_s: float = 3600.0,
        fetched_keep_s: float = 60.0,
        max_bytes: int = 2**30,
    ) -> None:
        self._clock = clock
        self._max_pending = max_pending
        self._keep_s = keep_s
        self._fetched_keep_s = fetched_keep_s
        self._max_bytes = max_bytes
        self._futures: dict[str, _Future] = {}
        self._done: dict[str, None] = {}  # in the order in which they were
        self._num_bytes = 0

    @property
    def num_pending(self) -> int:
        return len(self._futures) - len(self._done)

    def __contains__(self, name: str) -> bool:
        return name in self._futures

    def open(self, name: str, *, owner: str) -> None:
        """A pending one. Raises Refused where too many are."""
        assert name not in self._futures, name
        if self.num_pending >= self._max_pending:
            raise ApiError(
                f"{self.num_pending} requests are under way, the most that this server takes; wait "
                "for some of them.",
                429,
            )
        self._futures[name] = _Future(owner=owner)

    def finish(self, name: str, outcome: Answer | Failure) -> None:
        """Once; nothing happens where it was dropped meanwhile."""
        future = self._futures.get(name)
        if future is None or future.outcome is not None:
            return
        future.outcome = outcome
        future.expires_s = self._clock() + self._keep_s
        future.is_done.set()
        self._done[name] = None
        self._num_bytes += _size(outcome)
        while self._num_bytes > self._max_bytes and len(self._done) > 1:
            self._drop(next(iter(self._done)))

    async def wait(self, name: str, timeout_s: float) -> Answer | Failure | None:
        """Its outcome; None where it is pending after so long. Raises Refused, 410, for one that is
        unknown: never opened, or gone.
        """
        future = self._futures.get(name)
        if future is None:
            raise ApiError(
                f"the result of request {name!r} is not here: it was kept for "
                f"{self._keep_s:g} s, or {self._fetched_keep_s:g} s after it was fetched, or the "
                "server has started anew since; send the request again where it may be repeated.",
                410,
            )
        if future.outcome is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await future.is_done.wait()
            except TimeoutError:
                return None
        return future.outcome

    def outcome(self, name: str) -> Answer | Failure | None:
        """What there is of it now."""
        future = self._futures.get(name)
        return None if future is None else future.outcome

    def fetched(self, names: Iterable[str]) -> None:
        """Somebody has them; each is kept for a little while."""
        limit_s = self._clock() + self._fetched_keep_s
        for name in names:
            future = self._futures.get(name)
            if future is not None and future.expires_s is not None:
                future.expires_s = min(future.expires_s, limit_s)

    def expire(self) -> None:
        """Drop those whose time is over."""
        now = self._clock()
        over = [name for name in self._done if (self._futures[name].expires_s or now) <= now]
        for name in over:
            self._drop(name)

    def drop_all_of(self, owner: str) -> None:
        """Of a session that is over; who waits for a pending one is told so."""
        for name in [name for name, one in self._futures.items() if one.owner == owner]:
            self.finish(name, Failure(message=f"session {owner} is over.", category="user"))
            self._drop(name)

    def _drop(self, name: str) -> None:
        future = self._futures.pop(name, None)
        if future is not None and self._done.pop(name, name) is None:
            self._num_bytes -= _size(future.outcome)


def _size(outcome: Answer | Failure | None) -> int:
    return len(outcome.body) if isinstance(outcome, Answer) else 0
