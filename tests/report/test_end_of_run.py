"""The files that a run leaves when it ends."""

from __future__ import annotations

from pathlib import Path

from actors.run.run_end import record_end
from rlsys.runs.run_files import RunFiles
from rlsys.runs.run_outcome import read_outcome
from tests.report.synthetic_runs import SyntheticRun, write_run


def test_the_end_is_recorded_with_a_page(tmp_path: Path) -> None:
    files = RunFiles(write_run(tmp_path / "run", SyntheticRun(num_steps=3, outcome=None)))
    assert record_end(files, "failed", reason="out of memory") == []
    ended = read_outcome(files.outcome)
    assert ended is not None
    assert (ended.outcome, ended.reason) == ("failed", "out of memory")
    assert "out of memory" in files.report.read_text()


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    files = RunFiles(write_run(tmp_path / "run", SyntheticRun(num_steps=3, outcome=None)))
    files.report.mkdir()
    (warning,) = record_end(files, "finished")
    assert "report" in warning
    assert read_outcome(files.outcome) is not None
    gone = RunFiles(tmp_path / "deleted")
    assert len(record_end(gone, "finished")) == 1
