"""Checkpoints: copied between two optimizer steps, written to disk during the following steps.

    step ─► previous checkpoint is on disk ─► trainers copy their state ─► next step
                                              open work is pinned    └──► write ─► complete on disk

The copies, the open work and all else that `begin` records belong to the same step. Only one
checkpoint is written at a time. After the last step, training waits for the write.

A checkpoint is due after a number of steps or after a time (checkpoint_every), after the steps
whose checkpoints are kept for good (keep_every), and when it was requested from outside of the run.
Whether one is due is decided once per step, at the first question: training starts the next step
early only if nothing is due between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rlsys import metrics
from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.state import RunState
from rlsys.controller.step_hooks import BetweenSteps
from rlsys.controller.worker_protocols import RowsLost, TrainerDied

Begin = Callable[[int], Awaitable[Coroutine[Any, Any, None]]]


class Checkpointing:
    """The loop that writes checkpoints.

    `begin` records the state of a step and returns a coroutine that writes it. If the death of a
    trainer interrupts a write, the next checkpoint is due at once and training waits for it. So at
    most the steps of one interval follow a checkpoint that is not on disk yet.

    `is_requested` returns whether a request is open, until its checkpoint is complete. A request
    that comes during a write is answered after it. Runs that write only the last checkpoint ignore
    requests.
    """

    def __init__(self, state: RunState, begin: Begin, is_requested: Callable[[], bool]) -> None:
        self._state = state
        self._begin = begin
        self._is_requested = is_requested
        self._writing: asyncio.Task[None] | None = None
        self._step = state.step  # of the newest checkpoint
        self._interrupted_by: TrainerDied | RowsLost | None = None  # and not repeated yet
        self._changed = AsyncCondition()
        self._last_s = self._checked_s = state.clock()  # start of the newest checkpoint or the run
        self._due: dict[int, bool] = {}  # by step
        self.between_steps = BetweenSteps(
            name=metrics.CHECKPOINT,
            is_due=self._is_due,
            do=self._copy,
            done=state.step,
            undo=self._undo,
            settle=self._settle,
        )

    async def run(self) -> None:
        """Wait for each write to end and raise its errors."""
        while True:
            await self._changed.until(lambda: self._writing is not None)
            assert self._writing is not None
            try:
                await asyncio.shield(self._writing)
            except (TrainerDied, RowsLost) as death:
                self._interrupted_by = death
                self.between_steps.done = self._step - 1
            self._writing = None
            self._state.progress.notify()
            self._changed.notify()

    async def finish(self) -> None:
        """Wait for the current write after the run has failed."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def cancel(self) -> None:
        """Cancel the current write, if any."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def _is_due(self, step: int) -> bool:
        config = self._state.config
        if step == self._state.last_step or self._interrupted_by is not None:
            return True
        if config.keep_every > 0 and step % config.keep_every == 0:
            return True
        if step not in self._due:
            self._due[step] = self._is_regular(step) or self._is_wanted(step)
        return self._due[step]

    def _is_wanted(self, step: int) -> bool:
        """Return whether a request is open that no checkpoint before `step` answers."""
        if self._state.config.checkpoint_every == 0 or not self._is_requested():
            return False
        is_ahead = any(due and self._step < one < step for one, due in self._due.items())
        return self._writing is None and not is_ahead

    def _is_regular(self, step: int) -> bool:
        config = self._state.config
        if config.checkpoint_s is None:
            return bool(config.checkpoint_steps) and step % (config.checkpoint_steps or 1) == 0
        now_s = self._state.clock()
        # The current step is about to end. It takes about as long as the one before.
        age_s = now_s - self._last_s + (now_s - self._checked_s)
        self._checked_s = now_s
        return age_s >= config.checkpoint_s

    def _undo(self, step: int) -> None:
        """Forget the decisions about steps after `step`, which are trained again."""
        self._due = {one: due for one, due in self._due.items() if one <= step}

    async def _copy(self, step: int) -> None:
        await self._settle()
        self._last_s = self._state.clock()
        self._due = {one: due for one, due in self._due.items() if one >= step}
        write = await self._begin(step)
        waits = self._interrupted_by is not None or step == self._state.last_step
        self._interrupted_by = None
        self._step, self._writing = step, asyncio.create_task(write)
        self._changed.notify()
        if waits:
            await self._settle()
            if self._interrupted_by is not None:
                raise self._interrupted_by

    async def _settle(self) -> None:
        """Wait until nothing is being written. A write whose trainer has died ends soon."""
        await self._changed.until(lambda: self._writing is None)
