"""Replicas of two vLLM processes that share the devices of two trainer ranks, in turns."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rlsys.metrics import without_times
from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import SMALL_QUICKSTART, Job, quickstart, start

SPLIT = shlex.split(
    "--rollout.engine vllm --rollout.tensor-parallel 2 --rollout.kv-cache-gib 0.1 "
    "--trainer.num-cpus 0.5 --rollout.num-cpus 1"
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_replicas_over_two_ranks_change_no_number(tmp_path: Path) -> None:
    # One completion at a time: the last bits of vLLM's results depend on those of its batch.
    options = shlex.split(
        "--trainer.layout dp2 --asynchrony.max-staleness 0 --asynchrony.stream false "
        "--rollout.max-running 1"
    )
    lines = []
    for placement in ("separate", "colocated"):
        where = ["--placement", placement, "--name", placement]
        job = quickstart(tmp_path, *SPLIT, *options, *where, timeout_s=1800)
        assert job.returncode == 0, job.output
        lines.append(read_metrics(tmp_path / "runs" / placement / "metrics.jsonl"))
    separate, colocated = ([without_times(line) for line in run_lines] for run_lines in lines)
    assert len(colocated) == 3
    assert colocated == separate
    assert max(abs(line["kl/sampler_trainer"]) for line in colocated) < 1e-6
    assert all(line["time/wait_s/train/devices"] > 0 for line in lines[1])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_rank_and_a_replica_that_share_devices_die_and_the_run_resumes(tmp_path: Path) -> None:
    options = [*SPLIT, *shlex.split("--trainer.layout dp1tp2 --resume auto --checkpoint-every 2")]
    options += ["--placement", "colocated"]
    directory = tmp_path / "runs" / "quickstart"
    where = ["--runs-dir", str(tmp_path / "runs"), "--num-steps", "1000"]
    job = start("recipes/quickstart.py", [*SMALL_QUICKSTART, *where, *options], tmp_path)
    try:
        for process in ("ray::TrainerActor", "VLLM::Worker"):
            step = job.wait_for_step(directory, 2)
            os.kill(first_of(job, process), signal.SIGKILL)
            job.wait_for_step(directory, step + 2)
        job.wait_for_checkpoint(directory)
    finally:
        job.end()
    assert "trainer-" in job.output
    assert "rollout-0 died" in job.output
    assert job.left_behind() == {}
    num_steps = len(read_metrics(directory / "metrics.jsonl")) + 2
    job = quickstart(tmp_path, *options, "--num-steps", str(num_steps), timeout_s=1800)
    assert job.returncode == 0, job.output
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [*range(1, num_steps + 1)]
    assert all(line["staleness/max"] <= 1 for line in metrics)
    evidence, unreadable = read_evidence(directory)
    verdict = audit(evidence)
    assert [*unreadable, *verdict.faults] == []
    assert verdict.finished
    AutoModelForCausalLM.from_pretrained(directory / "hf")


def first_of(job: Job, name: str) -> int:
    """Return the first process of a job whose command begins so."""
    return min(pid for pid, command in job.processes().items() if command.startswith(name))
