"""A checkpoint on request, of a run in another process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlsys.runs.run_files import REQUEST_FILE
from tests.commands.rlsys_process import RLSYS
from tests.e2e.job import ROOT, SMALL_QUICKSTART, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_requested_checkpoint_is_complete_while_the_run_continues(tmp_path: Path) -> None:
    options = ("--num-steps", "200", "--checkpoint-every", "1h", "--runs-dir", str(tmp_path))
    job = start("recipes/quickstart.py", [*SMALL_QUICKSTART, *options], tmp_path)
    run = tmp_path / "quickstart"
    try:
        job.wait_for_step(run, 2)
        asked = subprocess.run(
            [*RLSYS, "checkpoint", str(run), "--timeout", "300"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert asked.returncode == 0, asked.stdout + asked.stderr + job.output
        assert "complete" in asked.stdout
        (saved,) = (run / "checkpoints").glob("step_*")
        assert (run / ".checkpointed").read_text().strip() == saved.name
        assert not (run / REQUEST_FILE).exists()
        step = int(saved.name.removeprefix("step_"))
        assert job.wait_for_step(run, step + 2) < 200
    finally:
        job.end()
