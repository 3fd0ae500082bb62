"""Requests for a checkpoint, with the lock and the files of a real run directory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsys.runs.checkpoint_request import (
    CheckpointRequest,
    Outcome,
    is_active,
    request_checkpoints,
)
from rlsys.runs.run_files import LOCK_FILE, REQUEST_FILE


class Time:
    """A clock that `sleep` advances. It calls `at` once, at its time."""

    def __init__(self, at_s: float = float("inf"), at: object = None) -> None:
        self.now_s = 0.0
        self.at_s, self.at = at_s, at

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        if self.now_s >= self.at_s and callable(self.at):
            self.at()
            self.at_s = float("inf")


@pytest.fixture
def active(tmp_path: Path) -> Iterator[Path]:
    """Return a directory whose lock is held, as by a run."""
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path


def ask(run: Path, time: Time) -> Outcome:
    (outcome,) = request_checkpoints([run], 100.0, clock=time.clock, sleep=time.sleep).values()
    return outcome


def test_all_runs_write_at_the_same_time(active: Path, tmp_path: Path) -> None:
    """One is complete after 20 s, one is not active, and a file is no run."""
    idle, file = tmp_path / "idle", tmp_path / "notes.txt"
    file.write_text("")
    time = Time(20.0, CheckpointRequest(active).end)
    outcomes = request_checkpoints([active, idle, file], 100.0, clock=time.clock, sleep=time.sleep)
    assert outcomes == {
        active: Outcome.WRITTEN,
        idle: Outcome.NOT_ACTIVE,
        file: Outcome.NOT_ACTIVE,
    }
    assert 20.0 <= time.now_s < 21.0


def test_the_request_ends_when_the_run_removes_it(active: Path) -> None:
    request = CheckpointRequest(active)
    assert not request.is_pending()
    seen: list[bool] = []

    def written() -> None:
        seen.append(request.is_pending())
        request.end()

    time = Time(30.0, written)
    assert ask(active, time) is Outcome.WRITTEN
    assert seen == [True]
    assert 30.0 <= time.now_s < 31.0
    assert not request.is_pending()
    request.end()  # idempotent


def test_a_checkpoint_that_takes_too_long_stays_requested(active: Path) -> None:
    time = Time()
    assert ask(active, time) is Outcome.TIMEOUT
    assert 100.0 <= time.now_s < 101.0
    assert CheckpointRequest(active).is_pending()


def test_nobody_waits_for_a_run_that_is_not_active(tmp_path: Path) -> None:
    time = Time()
    assert ask(tmp_path / "none", time) is Outcome.NOT_ACTIVE
    assert ask(tmp_path, time) is Outcome.NOT_ACTIVE
    (tmp_path / LOCK_FILE).write_text("process 1 on a node\n")  # of a run that has ended
    assert ask(tmp_path, time) is Outcome.NOT_ACTIVE
    assert not (tmp_path / REQUEST_FILE).exists()
    assert time.now_s == 0.0


def test_a_run_that_ends_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert is_active(tmp_path)
        time = Time(10.0, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
        assert ask(tmp_path, time) is Outcome.NOT_ACTIVE
    assert time.now_s < 11.0
