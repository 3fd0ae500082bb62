"""Failures while the quickstart runs: rewards that break, processes that die, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest

from rlsys.dataflow.scheduling.ledger import Ledger, read_events
from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import ROOT, SMALL_QUICKSTART, run, start, start_command

BROKEN_REWARD = """
import sys
sys.path.insert(0, {root!r})
import time
import recipes.quickstart as recipe
import rlsys

@rlsys.reward
def broken(rollout: rlsys.Rollout):
    {body}

recipe.correct = broken
recipe.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("raise KeyError('no such column')", "exception"),
        ("return float('nan')", "nan"),
        ("return 'high'", "type"),
        ("time.sleep(3600)", "timeout"),
    ],
)
def test_a_reward_that_never_works_ends_the_run(body: str, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    script.write_text(BROKEN_REWARD.format(root=str(ROOT), body=body))
    limit_s = "1" if kind == "timeout" else "60"
    limits = ["--reward.timeout-s", limit_s]
    job = run(
        str(script), [*SMALL_QUICKSTART, "--runs-dir", str(tmp_path / "runs"), *limits], tmp_path
    )
    assert job.returncode == 1
    assert "'broken'" in job.output
    if kind == "type":  # found by the trial before the run
        assert not (tmp_path / "runs" / "quickstart").exists()
        return
    ledger = read_events(tmp_path / "runs" / "quickstart" / "ledger.jsonl")
    assert {e["reason"] for e in ledger if e["event"] == "dropped"} == {f"reward {kind}"}


@pytest.mark.slow  # covered below
def test_a_reward_that_sometimes_fails_is_counted_and_dropped(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    body = "assert rollout.group_id % 3, 'every third'; return 1.0"
    script.write_text(BROKEN_REWARD.format(root=str(ROOT), body=body))
    job = run(str(script), [*SMALL_QUICKSTART, "--runs-dir", str(tmp_path / "runs")], tmp_path)
    assert job.returncode == 0, job.output
    lines = read_metrics(tmp_path / "runs" / "quickstart" / "metrics.jsonl")
    assert lines[-1]["rollouts/dropped"] >= 2 * 4
    assert sum(line["rewards/failed"] for line in lines) >= 4
    assert lines[-1]["reward/mean"] == 1.0


@pytest.mark.slow
def test_a_reward_that_cannot_be_pickled_is_rejected_before_ray_starts(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    text = BROKEN_REWARD.format(root=str(ROOT), body="return float(lock.locked())")
    script.write_text(text.replace("import time\n", "import threading\nlock = threading.Lock()\n"))
    job = run(str(script), [*SMALL_QUICKSTART, "--runs-dir", str(tmp_path / "runs")], tmp_path)
    assert job.returncode == 1
    assert "'broken'" in job.output
    assert "'lock'" in job.output
    assert "Starting Ray" not in job.output


@pytest.mark.slow
def test_rewards_that_misbehave_in_every_way_are_counted_by_reason(tmp_path: Path) -> None:
    # In the order of issue: otherwise the run may end before groups with a hanging call.
    sizes = ["--num-steps", "12", "--prompts-per-step", "8", "--order", "issued"]
    job = run("scripts/bench/rewards.py", sizes, tmp_path, timeout_s=900)
    assert job.returncode == 0, job.output
    failed = json.loads(job.output.splitlines()[-1])["failed"]
    assert failed["memory"] == failed["crash"] == 1
    assert failed["timeout"] >= 1 + 5
    assert failed["exception"] >= 5


@pytest.mark.slow  # tests/scripts/test_chaos.py and tests/actors cover the parts
def test_a_run_survives_the_death_of_each_process(tmp_path: Path) -> None:
    # They are killed one after the other, with two steps between them.
    arguments = [*SMALL_QUICKSTART, "--num-steps", "300", "--runs-dir", str(tmp_path / "runs")]
    directory = tmp_path / "runs" / "quickstart"
    job = start("recipes/quickstart.py", arguments, tmp_path)
    try:
        for actor in (
            "RewardActor",
            "RolloutActor",
            "TrainerActor",
            "SnapshotHolder",
            "StoreShard",
        ):
            step = job.wait_for_step(directory, 2)
            (pid,) = (p for p, name in job.processes().items() if name.startswith(f"ray::{actor}"))
            os.kill(pid, signal.SIGKILL)
            job.wait_for_step(directory, step + 2)
        assert job.wait() == 0, job.output
        assert "rollout-0 died" in job.output
        assert "trainer-0 died" in job.output
        assert "reward-0 died" in job.output
        assert re.search(r"store shard store-\w+-0 died", job.output)
        assert job.left_behind() == {}
    finally:
        job.end()
    evidence, damages = read_evidence(directory)
    assert [*damages, *audit(evidence).faults] == []


@pytest.mark.slow
def test_the_rollouts_of_a_dead_replica_continue_on_another(tmp_path: Path) -> None:
    options = "--rollout.num-replicas 2 --trainer.num-cpus 0.5 --rollout.num-cpus 0.5 "
    options += "--asynchrony.weight-update delayed --num-steps 60"
    arguments = [*SMALL_QUICKSTART, *options.split(), "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path)
    try:
        job.wait_for_step(tmp_path / "runs" / "quickstart", 1)
        replicas = [
            p for p, name in job.processes().items() if name.startswith("ray::RolloutActor")
        ]
        assert len(replicas) == 2
        os.kill(replicas[0], signal.SIGKILL)
        assert job.wait() == 0, job.output
        assert re.search(r"warning: rollout-[01] died", job.output)
        assert job.left_behind() == {}
    finally:
        job.end()
    directory = tmp_path / "runs" / "quickstart"
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [*range(1, 61)]
    assert max(line["staleness/max"] for line in metrics) <= 1
    ledger = Ledger.replay(
        read_events(directory / "ledger.jsonl"), lambda event: None, groups_per_step=4
    )
    assert (ledger.num_trained, ledger.open_groups) == (60 * 4, [])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_whose_directory_is_deleted_fails(tmp_path: Path) -> None:
    arguments = [*SMALL_QUICKSTART, "--num-steps", "100000", "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path)
    try:
        job.wait_for_step(tmp_path / "runs" / "quickstart", 1)
        shutil.rmtree(tmp_path / "runs" / "quickstart", ignore_errors=True)
        assert job.wait() == 1
        assert f"{tmp_path}/runs/quickstart" in job.output.splitlines()[-1]
        assert "Traceback" not in job.output
        assert job.left_behind() == {}
    finally:
        job.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_whose_output_is_closed_ends_quietly_with_its_processes(tmp_path: Path) -> None:
    arguments = [*SMALL_QUICKSTART, "--num-steps", "100000", "--runs-dir", str(tmp_path / "runs")]
    command = shlex.join([sys.executable, "recipes/quickstart.py", *arguments])
    job = start_command(["bash", "-c", f"{command} | head -n 12"], tmp_path)
    try:
        assert job.wait() == 0
        assert job.left_behind() == {}
        assert "Traceback" not in job.output
        assert "rror" not in job.output
    finally:
        job.end()


@pytest.mark.slow
def test_interrupt_ends_every_process(tmp_path: Path) -> None:
    arguments = [*SMALL_QUICKSTART, "--num-steps", "100000", "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path)
    try:
        job.wait_for_step(tmp_path / "runs" / "quickstart", 1)
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 130
        assert "Interrupted" in job.output
        assert "Traceback" not in job.output
        assert job.left_behind() == {}
    finally:
        job.end()
