"""An environment worker as its replica sees it: it starts at once, is watched, and has episodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from rlsys.environments.workers.loop_watchdog import BLOCKED_S, Blocked
from rlsys.rewards import RewardFailure
from rlsys.types import GenerationRequest

from ..cluster.calls import Worker, as_future
from ..rollout.rollout_actor import COLLECT_WAIT_S, DEADLY

# How long one call looks whether the event loop goes on; the next one follows at once.
WATCH_S = 60.0

# For the witness to tell first who blocks the event loop: nobody else knows.
WITNESS_FIRST_S = 15.0


class EnvironmentProxy:
    """A worker, which starts at once, and what it plays."""

    def __init__(self, name: str, worker: Worker, start_timeout_s: float) -> None:
        self.name = name
        self.worker = worker
        self.actor_id = ""
        self.pid = 0
        self.requests: dict[str, GenerationRequest] = {}
        self.has_begun = False  # with what it was given, or may have
        self.blocked: Blocked | None = None  # what it was ended for, if it was for that
        self.collecting: asyncio.Future[Any] | None = None
        self._starting = as_future(self._start(start_timeout_s))
        self._watching = as_future(self._watch())

    async def started(self) -> None:
        """Raises what the start raised."""
        await asyncio.shield(self._starting)

    async def gone(self) -> None:
        """Waits until it has died, also unused."""
        await asyncio.wait([self._watching])

    def collect(self) -> asyncio.Future[Any]:
        """Its call under way; raises what the start raised, or the call."""
        if self.collecting is None:
            limit_s = COLLECT_WAIT_S + BLOCKED_S + WITNESS_FIRST_S
            self.collecting = as_future(self._call("collect", timeout_s=limit_s))
        return self.collecting

    def play(self, requests: Sequence[GenerationRequest]) -> asyncio.Future[None]:
        """As soon as it has started; returns when it has them. That it dies, whoever collects from
        it notices.
        """
        self.requests.update((request.request_id, request) for request in requests)
        return as_future(self._play(requests))

    def give_up(
        self, verdicts: Sequence[tuple[GenerationRequest, RewardFailure | None]]
    ) -> asyncio.Future[None]:
        """To be told with what it has played: these have failed, or nobody wants them."""
        self.requests.update((request.request_id, request) for request, _ in verdicts)
        return as_future(self._give_up(verdicts))

    async def abort(self, request_ids: Sequence[str]) -> None:
        with contextlib.suppress(*DEADLY):
            await self._call("abort", list(request_ids))

    @property
    def groups(self) -> set[int]:
        return {r.task.group_id for r in self.requests.values() if r.task is not None}

    async def _play(self, requests: Sequence[GenerationRequest]) -> None:
        with contextlib.suppress(*DEADLY):
            if not self.has_begun:
                await self._call("place")  # if it has died unnoticed, it has not begun with them
                self.has_begun = True
            await self._call("submit", list(requests))

    async def _give_up(
        self, verdicts: Sequence[tuple[GenerationRequest, RewardFailure | None]]
    ) -> None:
        with contextlib.suppress(*DEADLY):
            await self._call("give_up", list(verdicts))

    async def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        await self.started()
        return await self.worker.call(method, *args, timeout_s=timeout_s)

    async def _start(self, timeout_s: float) -> None:
        _, self.actor_id, self.pid = await self.worker.call("place", timeout_s=timeout_s)
        try:
            await self.worker.call("start", timeout_s=timeout_s)
        except BaseException:
            self.worker.kill()
            raise

    async def _watch(self) -> None:
        """Ends it when an episode blocks its event loop."""
        await self.started()
        limit_s = WATCH_S + self.worker.timeout_s
        while True:
            blocked = await self.worker.call("watch", WATCH_S, timeout_s=limit_s)
            if blocked is not None:
                self.blocked = blocked
                self.worker.end(f"an episode {blocked.message}")
