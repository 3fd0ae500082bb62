"""An environment worker as its replica sees it: it starts at once and is watched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from rlsys.environments.workers.loop_watchdog import BLOCKED_S, Blocked
from rlsys.rewards import RewardFailure
from rlsys.types import GenerationRequest

from ..cluster.calls import Worker, as_future
from ..cluster.long_poll import COLLECT_WAIT_S
from ..rollout.ray_replica import DEADLY

# Duration of one call that watches the event loop; the next one follows at once.
WATCH_S = 60.0

# The watchdog must report first, because only it knows which episode blocks the event loop.
WATCHDOG_FIRST_S = 15.0


class EnvironmentProxy:
    """Environment worker and the episodes that it plays. It starts at once."""

    def __init__(self, name: str, worker: Worker, start_timeout_s: float) -> None:
        self.name = name
        self.worker = worker
        self.actor_id = ""
        self.pid = 0
        self.requests: dict[str, GenerationRequest] = {}
        self.has_started_playing = False  # with its episodes, or may have
        self.blocked: Blocked | None = None  # the blocking episode, if the worker was ended for one
        self.collecting: asyncio.Future[Any] | None = None
        self._starting = as_future(self._start(start_timeout_s))
        self._watching = as_future(self._watch())

    async def started(self) -> None:
        """Wait until it has started; raise what the start raised."""
        await asyncio.shield(self._starting)

    async def wait_for_death(self) -> None:
        """Wait until it has died, even if it was never used."""
        await asyncio.wait([self._watching])

    def collect(self) -> asyncio.Future[Any]:
        """Return the pending call of `collect`, which raises the errors of the start too."""
        if self.collecting is None:
            limit_s = COLLECT_WAIT_S + BLOCKED_S + WATCHDOG_FIRST_S
            self.collecting = as_future(self._call("collect", timeout_s=limit_s))
        return self.collecting

    def play(self, requests: Sequence[GenerationRequest]) -> asyncio.Future[None]:
        """Send episodes as soon as it has started; await the result until it has them.

        A death is reported by `collect`, not here.
        """
        self.requests.update((request.request_id, request) for request in requests)
        return as_future(self._play(requests))

    def report_unplayed(
        self, verdicts: Sequence[tuple[GenerationRequest, RewardFailure | None]]
    ) -> asyncio.Future[None]:
        """Let it report episodes that failed or were cancelled with those that it plays."""
        self.requests.update((request.request_id, request) for request, _ in verdicts)
        return as_future(self._report_unplayed(verdicts))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort episodes."""
        with contextlib.suppress(*DEADLY):
            await self._call("abort", list(request_ids))

    @property
    def groups(self) -> set[int]:
        """Return the groups of its episodes."""
        return {r.task.group_id for r in self.requests.values() if r.task is not None}

    async def _play(self, requests: Sequence[GenerationRequest]) -> None:
        with contextlib.suppress(*DEADLY):
            if not self.has_started_playing:
                await self._call("place")  # raises here if it has died, before it has any episode
                self.has_started_playing = True
            await self._call("submit", list(requests))

    async def _report_unplayed(
        self, verdicts: Sequence[tuple[GenerationRequest, RewardFailure | None]]
    ) -> None:
        with contextlib.suppress(*DEADLY):
            await self._call("report_unplayed", list(verdicts))

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
        """End the worker when an episode blocks its event loop."""
        await self.started()
        limit_s = WATCH_S + self.worker.timeout_s
        while True:
            blocked = await self.worker.call("watch", WATCH_S, timeout_s=limit_s)
            if blocked is not None:
                self.blocked = blocked
                self.worker.end(f"an episode {blocked.message}")
