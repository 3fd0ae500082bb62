"""The quickstart end to end, small: files, resume, repeatability, failures while it runs."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.dataflow.ledger import Ledger, read_events
from rlsys.observe.metrics import read_metrics, without_times
from tests.e2e.job import ROOT, SMALL_QUICKSTART, quickstart, run, start


def test_a_run_leaves_what_it_promises_and_resumes(tmp_path: Path) -> None:
    job = quickstart(tmp_path, "--checkpoint-every", "2", "--observe.wandb", "offline")
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "quickstart"
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["staleness/max"] <= 1 for line in metrics)
    assert abs(metrics[0]["kl/sampler_trainer"]) < 1e-6
    records = [json.loads(line) for line in (directory / "rollouts.jsonl").open()]
    assert {"prompt", "completion", "reward", "policy_versions"} <= records[0].keys()
    for actor in ("trainer-0", "rollout-0", "reward-0"):
        assert metrics[-1][f"time/work_s/{actor}"] > 0
        assert metrics[-1][f"time/wait_s/{actor}"] >= 0
    assert {"queue/score", "queue/train", "time/wait_s/train/groups"} <= metrics[-1].keys()
    trace = {event["name"] for event in json.loads((directory / "trace.json").read_text())}
    assert {"waits for groups", "queue/train", "accumulate", "update_weights"} <= trace
    assert (directory / "wandb").is_dir()
    AutoModelForCausalLM.from_pretrained(directory / "hf")
    AutoTokenizer.from_pretrained(directory / "hf")

    job = quickstart(tmp_path, "--resume", "--num-steps", "5", "--checkpoint-every", "2")
    assert job.returncode == 0, job.output
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    ledger = Ledger.replay(read_events(directory / "ledger.jsonl"), lambda event: None)
    assert (ledger.num_trained, ledger.open_groups) == (20, [])


def test_two_runs_on_policy_give_the_same_numbers(tmp_path: Path) -> None:
    arguments = ["--asynchrony.max-staleness", "0", "--num-steps", "10", "--prompts-per-step", "8"]
    lines = []
    for name in ("first", "second"):
        job = quickstart(tmp_path, *arguments, "--name", name)
        assert job.returncode == 0, job.output
        lines.append(read_metrics(tmp_path / "runs" / name / "metrics.jsonl"))
    first, second = ([without_times(line) for line in run_lines] for run_lines in lines)
    assert len(first) == 10
    assert first == second
    assert max(line["staleness/max"] for line in first) == 0
    assert max(abs(line["kl/sampler_trainer"]) for line in first) <= 1e-6


def test_two_ranks_and_two_replicas(tmp_path: Path) -> None:
    options = "--trainer.num-ranks 2 --rollout.num-replicas 2 --trainer.num-cpus 0.5"
    job = quickstart(tmp_path, *options.split(), "--rollout.num-cpus", "0.5")
    assert job.returncode == 0, job.output
    assert len(read_metrics(tmp_path / "runs" / "quickstart" / "metrics.jsonl")) == 3


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_gsm8k_runs_with_either_engine(engine: str, tmp_path: Path) -> None:
    options = (
        "--num-steps 2 --prompts-per-step 4 --group-size 2 --sampling.max-tokens 16 "
        f"--rollout.engine {engine} --rollout.kv-cache-gib 0.25 --name {engine}"
    )
    job = run(
        "recipes/grpo_gsm8k.py",
        [*options.split(), "--runs-dir", str(tmp_path / "runs")],
        tmp_path,
        timeout_s=240,
    )
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / engine
    assert len(read_metrics(directory / "metrics.jsonl")) == 2
    prompt = json.loads((directory / "rollouts.jsonl").open().readline())["prompt"]
    assert prompt.startswith("system: Solve the problem")


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
    arguments = [*SMALL_QUICKSTART, "--runs-dir", str(tmp_path / "runs"), "--reward.timeout-s", "1"]
    job = run(str(script), arguments, tmp_path)
    assert job.returncode == 1
    assert "groups in a row were dropped because of reward 'broken'" in job.output
    ledger = read_events(tmp_path / "runs" / "quickstart" / "ledger.jsonl")
    assert {e["reason"] for e in ledger if e["event"] == "dropped"} == {f"reward {kind}"}


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


@pytest.mark.parametrize(
    ("actor", "message"),
    [("RolloutActor", "rollout-0 died"), ("TrainerActor", "trainer-0 died")],
)
def test_a_killed_process_ends_the_run_with_its_name(
    actor: str, message: str, tmp_path: Path
) -> None:
    arguments = [*SMALL_QUICKSTART, "--num-steps", "100000", "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path)
    try:
        job.wait_for_output("stale avg/max", timeout_s=120)
        (pid,) = (pid for pid, name in job.processes().items() if name.startswith(f"ray::{actor}"))
        os.kill(pid, signal.SIGKILL)
        assert job.wait(timeout_s=60) == 1
        assert message in job.output
        assert job.left_behind() == {}
    finally:
        job.end()


def test_the_rollouts_of_a_dead_replica_go_on_elsewhere(tmp_path: Path) -> None:
    options = "--rollout.num-replicas 2 --trainer.num-cpus 0.5 --rollout.num-cpus 0.5 "
    options += "--asynchrony.weight-update delayed --num-steps 60"
    arguments = [*SMALL_QUICKSTART, *options.split(), "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path)
    try:
        job.wait_for_output("stale avg/max", timeout_s=120)
        replicas = [
            p for p, name in job.processes().items() if name.startswith("ray::RolloutActor")
        ]
        assert len(replicas) == 2
        os.kill(replicas[0], signal.SIGKILL)
        assert job.wait(timeout_s=120) == 0, job.output
        assert re.search(r"warning: rollout-[01] died.* rollouts go on elsewhere", job.output)
        assert job.left_behind() == {}
    finally:
        job.end()
    directory = tmp_path / "runs" / "quickstart"
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [*range(1, 61)]
    assert max(line["staleness/max"] for line in metrics) <= 1
    ledger = Ledger.replay(read_events(directory / "ledger.jsonl"), lambda event: None)
    assert (ledger.num_trained, ledger.open_groups) == (60 * 4, [])


def test_interrupt_ends_every_process(tmp_path: Path) -> None:
    arguments = [*SMALL_QUICKSTART, "--num-steps", "100000", "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path)
    try:
        job.wait_for_output("stale avg/max", timeout_s=120)
        job.process.send_signal(signal.SIGINT)
        assert job.wait(timeout_s=60) == 130
        assert "Interrupted: " in job.output
        assert "Traceback" not in job.output
        assert job.left_behind() == {}
    finally:
        job.end()
