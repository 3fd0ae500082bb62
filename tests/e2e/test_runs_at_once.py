"""Runs that share a machine, a runs directory and the initial model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsys.runs.audit import audit
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import SMALL_QUICKSTART, start

NUM_RUNS = 8


@pytest.mark.slow
def test_eight_runs_started_at_once_all_finish(tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    arguments = [*SMALL_QUICKSTART, "--runs-dir", str(runs_dir), "--num-steps", "10"]
    jobs = [
        start("recipes/quickstart.py", [*arguments, "--name", f"run-{number}"], tmp_path)
        for number in range(NUM_RUNS)
    ]
    try:
        codes = [job.wait(timeout_s=900) for job in jobs]
        assert codes == [0] * NUM_RUNS, "\n".join(job.output[-2000:] for job in jobs)
        assert [job.left_behind() for job in jobs] == [{}] * NUM_RUNS
    finally:
        for job in jobs:
            job.end()
    for number in range(NUM_RUNS):
        evidence, damages = read_evidence(runs_dir / f"run-{number}")
        verdict = audit(evidence)
        assert [*damages, *verdict.faults] == []
        assert verdict.finished
    assert len(list((runs_dir / ".models").iterdir())) == 1
