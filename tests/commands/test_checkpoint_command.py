"""`rlsys checkpoint`: the runs that it asks, and its exit code."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from rlsys.commands.checkpoint_command import main
from rlsys.runs.run_files import LOCK_FILE, REQUEST_FILE
from tests.errors import invalid


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that no process trains, next to a cache of models."""
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").touch()
    (tmp_path / "runs" / "huggingface").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("given", "num"), [([], 1), (["runs/first"], 1), (["runs"], 2), (["runs", "runs/first"], 2)]
)
def test_runs_that_no_process_trains_have_nothing_to_save(
    runs: Path, given: list[str], num: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 0
    assert len(capsys.readouterr().out.splitlines()) == num
    assert not [*runs.rglob(REQUEST_FILE)]


def test_a_checkpoint_that_is_not_complete_in_time(runs: Path) -> None:
    """Only the run that a process trains is asked."""
    with (runs / "second" / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["runs", "--timeout", "0"]) == 1
    assert [*runs.rglob(REQUEST_FILE)] == [runs / "second" / REQUEST_FILE]


def test_what_cannot_be_asked_is_refused(runs: Path) -> None:
    for path in ("runs/huggingface", "elsewhere"):
        with invalid("RUN", path):
            main([path])
    with invalid("--timeout", -1.0):
        main(["runs/first", "--timeout", "-1"])
