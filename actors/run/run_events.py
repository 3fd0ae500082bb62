"""Consequences of a run's records in the launching process: an early stop, and callbacks.

    step, evaluation, checkpoint ─► RunEvents ─► stop_when is met, or a callback returned STOP
                                        │                         └─► the controller stops
                                        └─► on_step, on_evaluation, on_checkpoint, in a thread

Training waits for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlsys.config import RunConfig
from rlsys.controller.controller import Controller
from rlsys.metrics import EVAL_IS_BEST, STEP
from rlsys.runs.callbacks import (
    END_S,
    Callbacks,
    CallbackThread,
    CheckpointRecord,
    EvaluationRecord,
    StepRecord,
    frozen,
)
from rlsys.runs.early_stop import EarlyStop
from rlsys.runs.export_seal import EarlyEnd
from rlsys.runs.observe.console import RunConsole

Line = Mapping[str, float]

END_AFTER_FAILURE_S = 1.0  # that a failed or interrupted run waits for its callbacks


class RunEvents:
    """Early stop and callbacks of one run. At the end of its block it waits for the callbacks.

    Args:
        config: The configuration.
        directory: The run's directory.
        console: Output for the user.
        callbacks: Functions of the user.
        recorded: Lines of metrics.jsonl and evaluations.jsonl from before a resume.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        console: RunConsole,
        callbacks: Callbacks,
        recorded: Sequence[Line],
    ) -> None:
        self._config = config
        self._directory = directory.absolute()
        self._console = console
        self._early_stop = EarlyStop(config.stop_conditions)
        self._loop = asyncio.get_running_loop()
        self._controller: Controller | None = None
        self._reason: str | None = None
        self.thread = CallbackThread(
            callbacks=callbacks, warn=console.warn, stop=self._stop_from_thread
        )
        for line in recorded:
            self._reason = self._early_stop.observe(line) or self._reason

    async def __aenter__(self) -> RunEvents:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        limit_s = END_S if kind is None else END_AFTER_FAILURE_S
        await asyncio.to_thread(self.thread.close, limit_s)

    @property
    def early_end(self) -> EarlyEnd | None:
        """Why the run stops early, for the seal of its export; None if it does not."""
        if self._reason is None:
            return None
        config = self._config
        return EarlyEnd(reason=self._reason, num_steps=config.num_steps, stop_when=config.stop_when)

    def control(self, controller: Controller) -> None:
        """Stop this controller from now on, at once if the recorded lines require it."""
        self._controller = controller
        if (reason := self._reason) is not None:
            self._reason = None
            self._stop(reason)

    def stepped(self, line: Line) -> None:
        """Take the line of an optimizer step."""
        self._observe(line)
        self.thread.hand_over(
            StepRecord(step=int(line[STEP]), metrics=frozen(line), directory=self._directory)
        )

    def evaluated(self, line: Line) -> None:
        """Take the line of an evaluation."""
        self._observe(line)
        self.thread.hand_over(
            EvaluationRecord(
                step=int(line[STEP]),
                metrics=frozen(line),
                is_best=bool(line[EVAL_IS_BEST]),
                directory=self._directory,
            )
        )

    def checkpointed(self, step: int, path: Path) -> None:
        """Take a checkpoint that is complete on disk."""
        self.thread.hand_over(
            CheckpointRecord(step=step, path=path.absolute(), directory=self._directory)
        )

    def _observe(self, line: Line) -> None:
        for warning in self._early_stop.unknown(line):
            self._console.warn(warning)
        if (reason := self._early_stop.observe(line)) is not None:
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        controller = self._controller
        if self._reason is not None or controller is None:
            return
        controller.stop()
        if controller.last_step < self._config.num_steps:
            self._reason = reason
            self._console.stopping(reason, last_step=controller.last_step)

    def _stop_from_thread(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the run has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._stop, reason)
