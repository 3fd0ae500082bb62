"""Functions of the user that are called during a run, in a thread of the launching process.

    controller ─► hand_over (never waits) ─► bounded queue ─► thread ─► on_step, on_evaluation, ...
                                                                  └─ STOP ─► the run ends early

The functions are not pickled and see the variables of the script that launched the run. A function
that is slower than the steps loses records, which are counted. A function that raises is reported
once, and called again for the next record.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Final

from rlsys.common.background_tasks import report, start_thread
from rlsys.common.number_text import counted, verb
from rlsys.common.user_functions import is_deferred, misfit, name_of, raised
from rlsys.errors import require

MAX_WAITING = 256  # records
END_S = 30.0  # that the end of a run waits for the functions


class _Stop(Enum):
    STOP = "STOP"

    def __repr__(self) -> str:
        return "rlsys.STOP"


STOP: Final = _Stop.STOP
"""Return this from a callback to end the run after the step that is under way."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """An optimizer step.

    Attributes:
        step: Number of optimizer steps so far.
        metrics: The line of metrics.jsonl.
        directory: The run's directory.
    """

    step: int
    metrics: Mapping[str, float]
    directory: Path


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """An evaluation on held-out prompts.

    Attributes:
        step: Number of optimizer steps of the evaluated model.
        metrics: The line of evaluations.jsonl.
        is_best: Whether the model is the best so far. It is in best/ then.
        directory: The run's directory.
    """

    step: int
    metrics: Mapping[str, float]
    is_best: bool
    directory: Path


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint that is complete on disk. The run removes it when newer ones replace it.

    Attributes:
        step: Number of optimizer steps so far.
        path: The checkpoint's directory.
        directory: The run's directory.
    """

    step: int
    path: Path
    directory: Path


Record = StepRecord | EvaluationRecord | CheckpointRecord


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """The functions that `rlsys.launch` was given."""

    on_step: Callable[[StepRecord], object] | None = None
    on_evaluation: Callable[[EvaluationRecord], object] | None = None
    on_checkpoint: Callable[[CheckpointRecord], object] | None = None

    def __post_init__(self) -> None:
        for name, function in vars(self).items():
            require(
                function is None or (callable(function) and not is_deferred(function)),
                f"launch: {name}",
                function,
                rule="must be a plain function",
                fix="Give a function of one record, or leave it out.",
            )
            mistake = misfit(function, object()) if callable(function) else None
            require(
                mistake is None,
                f"launch: {name}",
                function,
                rule=f"cannot be called with one record ({mistake})",
                fix="Give it one parameter.",
            )

    def of(self, record: Record) -> Callable[..., object] | None:
        """Return the function for a record."""
        if isinstance(record, StepRecord):
            return self.on_step
        return self.on_evaluation if isinstance(record, EvaluationRecord) else self.on_checkpoint


NO_CALLBACKS = Callbacks()


def frozen(line: Mapping[str, float]) -> Mapping[str, float]:
    """Return a copy of a line that nobody can change."""
    return MappingProxyType(dict(line))


@dataclass(kw_only=True)
class CallbackThread:
    """The thread that calls the functions, until `close`.

    Attributes:
        callbacks: The functions.
        warn: Shows a warning; called in the thread, and in that of `close`.
        stop: Called in the thread with the reason, once a function has returned STOP.
        max_waiting: Records that may wait.
    """

    callbacks: Callbacks
    warn: Callable[[str], None]
    stop: Callable[[str], None]
    max_waiting: int = MAX_WAITING
    num_dropped: int = 0
    num_failed: Counter[str] = field(default_factory=Counter)  # by function
    _waiting: queue.Queue[Record | None] = field(init=False)
    _thread: Thread | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._waiting = queue.Queue(self.max_waiting + 1)  # with room for the end

    def hand_over(self, record: Record) -> None:
        """Queue a record for its function, or drop it if too many wait. Returns at once."""
        if self.callbacks.of(record) is None:
            return
        if self._thread is None:
            self._thread = start_thread(self._run, name="callbacks", fail=report)
        if self._waiting.qsize() >= self.max_waiting:
            self.num_dropped += 1
            return
        self._waiting.put_nowait(record)

    def close(self, timeout_s: float = END_S) -> None:
        """Let the functions finish their records, within a time limit, and report failures."""
        if self._thread is not None:
            self._waiting.put_nowait(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                left = self._waiting.qsize() - 1
                self.warn(
                    f"the callbacks have not ended within {timeout_s:g} s. The run ends without "
                    f"them, and up to {counted(left, 'record')} {verb(left)} not handled."
                )
        if self.num_dropped:
            self.warn(
                f"{counted(self.num_dropped, 'record')} "
                f"{verb(self.num_dropped, 'was', 'were')} not passed to a callback, "
                "because the functions took longer than the steps and "
                f"{self.max_waiting} records were waiting."
            )
        for name, count in self.num_failed.items():
            if count > 1:
                self.warn(f"callback {name} has failed {counted(count, 'time')}.")

    def _run(self) -> None:
        while (record := self._waiting.get()) is not None:
            function = self.callbacks.of(record)
            assert function is not None
            name = name_of(function)
            try:
                answer = function(record)
            except BaseException as error:  # noqa: BLE001, a callback never ends the run
                self.num_failed[name] += 1
                if self.num_failed[name] == 1:
                    what = raised(f"callback {name}", error)
                    self.warn(f"step {record.step}: {what}\nThe run continues.")
                continue
            if answer is STOP:
                self.stop(f"callback {name} returned rlsys.STOP at step {record.step}")
