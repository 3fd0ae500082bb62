"""A warm standby environment worker, which replaces a worker that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlsys.common.background_tasks import report, start_task
from rlsys.common.supervision import STANDBY_WORKERS, Supervisor

from .environment_proxy import EnvironmentProxy


class Standby:
    """Keeper of one standby worker.

    `create` starts a worker. One that dies unused is replaced while `is_wanted`. After too many
    such deaths a worker is started only when it is needed.
    """

    def __init__(
        self, create: Callable[[], EnvironmentProxy], *, is_wanted: Callable[[], bool]
    ) -> None:
        self._create = create
        self._is_wanted = is_wanted
        self.worker: EnvironmentProxy | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._supervisor = Supervisor[str](STANDBY_WORKERS)

    def start_worker(self) -> None:
        """Start a standby worker."""
        self.worker = self._create()
        self._keeping = start_task(self._keep(self.worker), name="standby", fail=self._failed)

    def take(self) -> EnvironmentProxy:
        """Return the standby worker if it is alive, else a new one, and start its successor."""
        standby, self.worker = self.worker, None
        taken = self._create() if standby is None or standby.worker.is_dead else standby
        self._supervisor.progressed()
        self.start_worker()
        return taken

    def _failed(self, error: BaseException) -> None:
        """Continue without a standby worker when watching it fails; `take` starts another."""
        report(error)
        self.worker = None

    async def _keep(self, worker: EnvironmentProxy) -> None:
        await worker.wait_for_death()
        if self.worker is not worker or not self._is_wanted():
            return
        self.worker = None
        if not self._supervisor.died(f"{worker.name} died").gives_up:
            self.start_worker()
