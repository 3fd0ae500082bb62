"""Functions of the user that are called during a run."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rlsys
from rlsys.runs.callbacks import (
    STOP,
    Callbacks,
    CallbackThread,
    CheckpointRecord,
    EvaluationRecord,
    StepRecord,
    frozen,
)
from tests.errors import invalid

HERE = Path("/runs/one")


def step(number: int) -> StepRecord:
    return StepRecord(step=number, metrics=frozen({"step": number}), directory=HERE)


class Calls:
    """A thread with callbacks, its warnings and its stops."""

    def __init__(self, max_waiting: int = 256, **functions: Any) -> None:
        self.warnings: list[str] = []
        self.stops: list[str] = []
        self.thread = CallbackThread(
            callbacks=Callbacks(**functions),
            warn=self.warnings.append,
            stop=self.stops.append,
            max_waiting=max_waiting,
        )


def test_each_function_gets_its_records_in_order() -> None:
    got: list[Any] = []
    calls = Calls(on_step=got.append, on_checkpoint=got.append)
    evaluation = EvaluationRecord(step=1, metrics={}, is_best=True, directory=HERE)
    checkpoint = CheckpointRecord(step=2, path=HERE / "checkpoints", directory=HERE)
    for record in (step(1), evaluation, checkpoint, step(2)):
        calls.thread.hand_over(record)
    calls.thread.close()
    assert got == [step(1), checkpoint, step(2)]  # nothing for the evaluation
    assert (calls.warnings, calls.stops) == ([], [])


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_an_exception_of_any_kind_ends_no_other_callback(error: type[BaseException]) -> None:
    got: list[int] = []

    def fails_once(record: StepRecord) -> None:
        if record.step == 1:
            raise error
        got.append(record.step)

    calls = Calls(on_step=fails_once)
    calls.thread.hand_over(step(1))
    calls.thread.hand_over(step(2))
    calls.thread.close()
    assert got == [2]
    assert len(calls.warnings) == 1


def test_without_functions_there_is_no_thread() -> None:
    before = threading.active_count()
    calls = Calls()
    calls.thread.hand_over(step(1))
    assert threading.active_count() == before
    calls.thread.close()


def test_a_blocked_function_delays_nobody_and_lost_records_are_counted() -> None:
    began, goes_on = threading.Event(), threading.Event()
    got: list[int] = []

    def blocked(record: StepRecord) -> None:
        began.set()
        goes_on.wait()
        got.append(record.step)

    calls = Calls(on_step=blocked, max_waiting=3)
    calls.thread.hand_over(step(1))
    began.wait()
    start = time.perf_counter()
    for number in range(2, 1002):
        calls.thread.hand_over(step(number))
    per_call_s = (time.perf_counter() - start) / 1000
    assert per_call_s < 1e-3  # a few microseconds on a quiet machine
    assert calls.thread.num_dropped == 997
    calls.thread.close(0.01)
    (late, dropped) = calls.warnings
    assert "997 " in dropped
    assert "3" in late
    goes_on.set()


def test_a_function_that_raises_is_reported_once_and_called_again() -> None:
    got: list[int] = []

    def fails(record: StepRecord) -> None:
        got.append(record.step)
        if record.step < 3:
            raise (KeyError("x") if record.step == 1 else SystemExit(3))

    calls = Calls(on_step=fails)
    for number in (1, 2, 3):
        calls.thread.hand_over(step(number))
    calls.thread.close()
    assert got == [1, 2, 3]
    first, total = calls.warnings
    assert "fails" in first
    assert "KeyError" in first
    assert "2 times" in total


def test_a_function_may_stop_the_run() -> None:
    calls = Calls(on_step=lambda record: rlsys.STOP if record.step == 2 else "STOP")
    for number in (1, 2):
        calls.thread.hand_over(step(number))
    calls.thread.close()
    (reason,) = calls.stops
    assert "step 2" in reason
    assert repr(STOP) == "rlsys.STOP"


def test_a_record_cannot_be_changed() -> None:
    line = {"loss": 1.0}
    record = StepRecord(step=1, metrics=frozen(line), directory=HERE)
    line["loss"] = 2.0
    assert record.metrics["loss"] == 1.0
    with pytest.raises(TypeError):
        record.metrics["loss"] = 3.0  # type: ignore[index]


async def _later(record: StepRecord) -> None:
    pass


@pytest.mark.parametrize("function", [7, _later, lambda: None, lambda a, b: None])
def test_other_functions_are_refused(function: Any) -> None:
    with invalid("launch: on_step"):
        Callbacks(on_step=function)
