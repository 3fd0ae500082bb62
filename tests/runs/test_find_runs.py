from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsys.errors import NOT_GIVEN
from rlsys.runs.find_runs import checked_run, is_run, newest_run, runs_of
from tests.errors import invalid


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs, of which the second was written last, and directories that are none."""
    directory = tmp_path / "runs"
    for name, file, written_s in (
        ("first", "config.json", 100),
        ("second", "metrics.jsonl", 300),
        ("third", "config.json", 200),
        (".models", "contents.txt", 400),
    ):
        (directory / name).mkdir(parents=True)
        (directory / name / file).touch()
        os.utime(directory / name / file, (written_s, written_s))
    (directory / "file").touch()
    return directory


def test_the_newest_run_is_the_one_that_was_written_last(runs: Path) -> None:
    assert newest_run(runs) == runs / "second"
    ledger = runs / "first" / "ledger.jsonl"
    ledger.touch()
    os.utime(ledger, (400, 400))
    assert newest_run(runs) == runs / "first"


def test_runs_are_told_from_other_directories(runs: Path) -> None:
    assert [is_run(path) for path in sorted(runs.iterdir())] == [False, False, True, True, True]
    assert checked_run(runs / "third") == runs / "third"


def test_a_directory_of_runs_means_all_of_them(runs: Path) -> None:
    """Other directories, such as a cache of models, are left out."""
    assert runs_of(runs) == [runs / "first", runs / "second", runs / "third"]
    (runs / "third" / "best").mkdir()
    (runs / "third" / "best" / "config.json").touch()  # a model in a run is not a run
    assert runs_of(runs / "third") == [runs / "third"]
    with invalid("RUN", str(runs / ".models")):
        runs_of(runs / ".models")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("runs/secnd", "runs/second"),
        ("second", "runs/second"),
        ("runs", "runs/first"),
        ("runs/.models", "runs/"),
        ("runs/file", "runs/"),
        ("elsewhere/zzz", "runs/quickstart"),
    ],
)
def test_what_is_no_run_is_refused(
    given: str, named: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    with invalid("RUN", given) as error:
        checked_run(Path(given))
    assert named in error.value.fix


def test_a_project_without_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / ".models").mkdir(parents=True)
    for directory in (tmp_path / "runs", tmp_path / "nowhere"):
        with invalid("RUN", NOT_GIVEN):
            newest_run(directory)
