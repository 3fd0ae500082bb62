"""Successor of a sampler that has died: started in the background, at once or after a pause.

    died(reason) ──► report ──► pause ──► start ──► ready
                                  ▲         └── it fails: the next try, or the place is given up
                                  └─────────────┘

After too many deaths in a row without a completion, the next request starts the successor instead.
rlsys/common/supervision.py has the limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rlsys.common.background_tasks import report as report_error
from rlsys.common.background_tasks import start_task
from rlsys.common.number_text import counted
from rlsys.common.supervision import SAMPLERS, Supervisor
from rlsys.tinker_server.api_errors import PartDied


class Successor:
    """Starts one sampler again whenever it dies.

    Args:
        start: Starts the successor. Raises PartDied if it dies; another caller may start it too.
        warn: Gets one line about each death.
    """

    def __init__(self, start: Callable[[], Awaitable[object]], warn: Callable[[str], None]) -> None:
        self._start = start
        self._warn = warn
        self._supervisor = Supervisor[None](SAMPLERS)
        self._task: asyncio.Task[None] | None = None

    def progressed(self) -> None:
        """Note that the sampler has ended a completion."""
        self._supervisor.progressed()

    def died(self, reason: str) -> None:
        """Report the death of the sampler and start its successor."""
        if self._reported(reason) and (self._task is None or self._task.done()):
            self._task = start_task(self._restart(), name="sampler's successor", fail=report_error)

    def close(self) -> None:
        """Start no more."""
        if self._task is not None:
            self._task.cancel()

    async def _restart(self) -> None:
        while True:
            await asyncio.sleep(self._supervisor.pause_s())
            try:
                await self._start()
            except PartDied as death:
                if self._reported(str(death)):
                    continue
            except ValueError as error:  # the model has changed on disk
                self._warn(f"no other sampler starts: {error}")
            return

    def _reported(self, reason: str) -> bool:
        """Report a death. Return whether the successor is started at once."""
        reason = reason.rstrip(".")
        if self._supervisor.died(reason).gives_up:
            count = SAMPLERS.restart.max_restarts + 1
            self._warn(
                f"{reason}; {counted(count, 'death')} in a row without a completion. The next "
                "request starts another one."
            )
            return False
        self._warn(f"{reason}; another one replaces it")
        return True
