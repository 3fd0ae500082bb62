"""Checkpoints: copied between two optimizer steps, written beside those that follow.

    step ─► the one before is on disk ─► learners hold their state ─► next step
                                         open work is pinned    └──► write ─► on disk, whole

The copies, the open work and all else that `begin` takes down belong to the same step. One is
written at a time: the next waits for it. After the last step, training waits for the write too.

Checkpoints come after so many steps, or when the last is so old (checkpoint_every). Whether one is
due by time is decided once for each step, when it is first asked: training lets the next step begin
before this one has ended only where nothing is due between them.
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
    """`begin` takes down what belongs to a step, and returns what writes it.

    A write that a learner's death broke off is made up for, with the state that the learner goes on
    from; training waits for it. So at most one interval's steps are trained behind a checkpoint
    that is not on disk yet.
    """

    def __init__(self, state: RunState, begin: Begin) -> None:
        self._state = state
        self._begin = begin
        self._writing: asyncio.Task[None] | None = None
        self._step = state.step  # that was begun last
        self._interrupted_by: TrainerDied | RowsLost | None = (
            None  # by this, and not made up for yet
        )
        self._changed = AsyncCondition()
        self._last_s = self._checked_s = state.clock()  # when the last was begun, or the run
        self._due_by_time: dict[int, bool] = {}  # by step, of those that were asked about
        self.between_steps = BetweenSteps(
            name=metrics.CHECKPOINT,
            is_due=self._is_due,
            do=self._copy,
            done=state.step,
            undo=self._undo,
            settle=self._settle,
        )

    async def run(self) -> None:
        """Raises what a write has met. Waits for the next one to begin."""
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
        """The run has failed: what was copied before is written all the same."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def cancel(self) -> None:
        """The run ends now, with a write under way or without: nothing of it stays."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def _is_due(self, step: int) -> bool:
        config = self._state.config
        is_last = step == config.num_steps
        return is_last or self._interrupted_by is not None or self._is_regular(step)

    def _is_regular(self, step: int) -> bool:
        config = self._state.config
        if config.checkpoint_s is None:
            return bool(config.checkpoint_steps) and step % (config.checkpoint_steps or 1) == 0
        if step not in self._due_by_time:
            now_s = self._state.clock()
            # The step is about to end: it takes about as long as the one before.
            age_s = now_s - self._last_s + (now_s - self._checked_s)
            self._checked_s = now_s
            self._due_by_time[step] = age_s >= config.checkpoint_s
        return self._due_by_time[step]

    def _undo(self, step: int) -> None:
        """Decide anew about steps that are trained again."""
        self._due_by_time = {one: due for one, due in self._due_by_time.items() if one <= step}

    async def _copy(self, step: int) -> None:
        await self._settle()
        self._last_s = self._state.clock()
        self._due_by_time = {one: due for one, due in self._due_by_time.items() if one >= step}
        write = await self._begin(step)
        waits = self._interrupted_by is not None or step == self._state.config.num_steps
        self._interrupted_by = None
        self._step, self._writing = step, asyncio.create_task(write)
        self._changed.notify()
        if waits:
            await self._settle()
            if self._interrupted_by is not None:
                raise self._interrupted_by

    async def _settle(self) -> None:
        """Until nothing is being written: a write whose learner has died ends soon."""
        await self._changed.until(lambda: self._writing is None)
