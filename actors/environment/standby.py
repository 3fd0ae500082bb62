"""A worker more than play, which has loaded everything by the time that one of them dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlsys.common.background_tasks import report, start_task

from .environment_proxy import EnvironmentProxy

# Spare workers in a row that may die unused; then one is hired only when it is needed.
MAX_LOST = 3


class Standby:
    """`create` starts a worker. One that dies unused is replaced, as long as `is_wanted`."""

    def __init__(
        self, create: Callable[[], EnvironmentProxy], *, is_wanted: Callable[[], bool]
    ) -> None:
        self._create = create
        self._is_wanted = is_wanted
        self.player: EnvironmentProxy | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._num_lost = 0

    def start_worker(self) -> None:
        self.player = self._create()
        self._keeping = start_task(self._keep(self.player), name="spare", fail=self._failed)

    def take(self) -> EnvironmentProxy:
        """It, if it lives, else a new one; another is hired in its place."""
        spare, self.player = self.player, None
        taken = self._create() if spare is None or spare.worker.is_dead else spare
        self._num_lost = 0
        self.start_worker()
        return taken

    def _failed(self, error: BaseException) -> None:
        """Do without a spare worker that nobody watches; `take` starts another."""
        report(error)
        self.player = None

    async def _keep(self, player: EnvironmentProxy) -> None:
        await player.gone()
        if self.player is not player or not self._is_wanted():
            return
        self.player = None
        self._num_lost += 1
        if self._num_lost <= MAX_LOST:
            self.start_worker()
