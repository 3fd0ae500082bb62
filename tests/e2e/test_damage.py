"""The same command again after files of its run were damaged or removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlsys.runs.audit import audit
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import Job, quickstart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def again(directory: Path, *arguments: str) -> Job:
    options = ["--resume", "auto", "--checkpoint-every", "1", *arguments]
    return quickstart(directory, *options, timeout_s=900)


def faults(run: Path) -> list[str]:
    evidence, unreadable = read_evidence(run)
    return [*unreadable, *audit(evidence).faults]


def test_a_damaged_finished_run_is_repaired_or_rejected(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    job = again(tmp_path)
    assert job.returncode == 0, job.output
    assert faults(run) == []

    weights = run / "hf" / "model.safetensors"
    exported = weights.read_bytes()
    weights.write_bytes(bytes([exported[0] ^ 1]) + exported[1:])
    (fault,) = faults(run)
    assert "model.safetensors" in fault
    job = again(tmp_path)
    assert job.returncode == 0, job.output
    assert "All 3 steps are trained." in job.output
    assert weights.read_bytes() == exported
    assert faults(run) == []

    records = (run / "rollouts.jsonl").read_bytes()
    (run / "rollouts.jsonl").write_bytes(records[: len(records) // 2])
    job = again(tmp_path, "--num-steps", "4")
    assert job.returncode == 1
    assert "rollouts.jsonl" in job.output
    assert "Starting Ray" not in job.output
    (run / "rollouts.jsonl").write_bytes(records)

    shutil.rmtree(run / "checkpoints" / "step_000003")
    job = again(tmp_path)
    assert job.returncode == 0, job.output
    assert "already has all 3 steps" in job.output
    assert "continue from step 2" in job.output
    job = again(tmp_path, "--num-steps", "4")
    assert job.returncode == 0, job.output
    assert "step_000002. Steps 3 to 3 are trained again." in job.output
    assert faults(run) == []
