"""The quickstart end to end, small: files, resume, repeatability, engines."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from statistics import fmean

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.arithmetic import correct, held_out
from recipes.quickstart import QuickstartConfig
from rlsys.config.fields import from_dict
from rlsys.dataflow.scheduling.ledger import Ledger, read_events
from rlsys.evaluation.held_out import evaluation_config
from rlsys.evaluation.model_evaluation import evaluate_model
from rlsys.evaluation.pass_at_k import as_metrics
from rlsys.metrics import without_times
from rlsys.runs.audit import audit
from rlsys.runs.evaluation_log import read_evaluations
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.observe.trackers.tracker_protocol import Position
from rlsys.runs.observe.trackers.tracker_state import TrackerState, state_file
from rlsys.runs.run_files import RunFiles, read_config
from rlsys.runs.run_history import read_evidence
from rlsys.runs.run_outcome import read_outcome
from tests.e2e.job import SMALL_QUICKSTART, quickstart, run, start


# The default tier covers the graph in tests/controller/test_controller_graphs.py.
@pytest.mark.slow
def test_remax_by_name_trains_on_no_greedy_rollout(tmp_path: Path) -> None:
    # Advantage, loss and aggregation by name.
    names = ["--advantage", "remax_advantage", "--loss", "gmpo()", "--aggregation", "sequence_mean"]
    job = quickstart(tmp_path, *names, "--observe.record-groups=4")
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "quickstart"
    records = [json.loads(line) for line in (directory / "rollouts.jsonl").open()]
    assert len(records) == 3 * 4 * 2
    greedy = {(one["step"], one["group_id"]): one for one in records if one["is_greedy"]}
    assert len(greedy) == 3 * 4
    for record in records:
        baseline = greedy[record["step"], record["group_id"]]
        assert record["advantage"] == record["reward"] - baseline["reward"]
        assert record["is_greedy"] == (record["index"] == 1)
        assert {version >= 0 for version in record["policy_versions"]} == {not record["is_greedy"]}
    for line in read_metrics(directory / "metrics.jsonl"):
        sampled = [one for one in records if one["step"] == line["step"] and not one["is_greedy"]]
        assert line["reward/mean"] == pytest.approx(fmean(one["reward"] for one in sampled))
        lengths = [len(one["token_ids"]) for one in sampled]
        assert line["completion/tokens_mean"] == pytest.approx(fmean(lengths))
        assert abs(line["kl/sampler_trainer"]) < 1e-6
        assert 0 <= line["staleness/mean"] <= line["staleness/max"] <= 1
    evidence, faults = read_evidence(directory)
    assert faults == []
    assert audit(evidence).faults == []


@pytest.mark.slow
def test_a_killed_run_on_shared_devices_resumes(tmp_path: Path) -> None:
    options = ["--resume", "auto", "--checkpoint-every", "2", "--placement", "colocated"]
    directory = tmp_path / "runs" / "quickstart"
    where = ["--runs-dir", str(tmp_path / "runs"), "--num-steps", "1000"]
    job = start("recipes/quickstart.py", [*SMALL_QUICKSTART, *where, *options], tmp_path)
    try:
        job.wait_for_step(directory, 3)
        job.wait_for_checkpoint(directory)
    finally:
        job.end()
    assert job.left_behind() == {}
    num_steps = len(read_metrics(directory / "metrics.jsonl")) + 2
    job = quickstart(tmp_path, *options, "--num-steps", str(num_steps))
    assert job.returncode == 0, job.output
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [*range(1, num_steps + 1)]
    assert all(line["staleness/max"] <= 1 for line in metrics)
    assert abs(metrics[0]["kl/sampler_trainer"]) < 1e-6
    # A step whose groups are ready takes no devices back.
    assert any("time/wait_s/train/devices" in line for line in metrics)
    evidence, unreadable = read_evidence(directory)
    verdict = audit(evidence)
    assert [*unreadable, *verdict.faults] == []
    assert verdict.finished
    assert "1 resume," in verdict.summary
    AutoModelForCausalLM.from_pretrained(directory / "hf")


@pytest.mark.slow
def test_a_run_writes_its_files_and_resumes(tmp_path: Path) -> None:
    options = ["--resume", "auto", "--checkpoint-every", "2"]
    job = quickstart(tmp_path, *options, "--trackers", "wandb-offline")
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "quickstart"
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["staleness/max"] <= 1 for line in metrics)
    assert abs(metrics[0]["kl/sampler_trainer"]) < 1e-6
    records = [json.loads(line) for line in (directory / "rollouts.jsonl").open()]
    assert {"prompt", "completion", "reward", "policy_versions", "row"} <= records[0].keys()
    assert records[0]["row"].keys() == {"answer"}
    for actor in ("trainer-0", "rollout-0", "reward-0"):
        # A late report is in a later line, or in none.
        assert any(line.get(f"time/work_s/{actor}", 0) > 0 for line in metrics)
        assert all(line.get(f"time/wait_s/{actor}", 0) >= 0 for line in metrics)
    assert {"queue/score", "queue/train", "time/wait_s/train/groups"} <= metrics[-1].keys()
    trace = {event["name"] for event in json.loads((directory / "trace.json").read_text())}
    assert {"waits for groups", "queue/train", "accumulate", "update_weights"} <= trace
    tracked = TrackerState.read(state_file(directory, "wandb"))
    assert tracked.position == Position(metrics=3, samples=1), job.output
    assert any("engine/running/rollout-0" in line for line in metrics)
    ended = read_outcome(directory / "outcome.json")
    assert ended is not None
    assert ended.outcome == "finished"
    assert '"state":"finished"' in (directory / "report.html").read_text()
    AutoModelForCausalLM.from_pretrained(directory / "hf")
    AutoTokenizer.from_pretrained(directory / "hf")

    modes = {file.stat().st_mode & 0o777 for file in (directory / "hf").iterdir()}
    assert modes == {(directory / "hf").stat().st_mode & 0o666}

    job = quickstart(tmp_path, *options, "--num-steps", "5")
    assert job.returncode == 0, job.output
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    ledger = Ledger.replay(
        read_events(directory / "ledger.jsonl"), lambda event: None, groups_per_step=4
    )
    assert (ledger.num_trained, ledger.open_groups) == (20, [])

    before = (directory / "ledger.jsonl").read_bytes()
    job = quickstart(tmp_path, *options, "--num-steps", "5")
    assert job.returncode == 0, job.output
    assert "already has all 5 steps" in job.output
    assert "Starting Ray" not in job.output
    assert (directory / "ledger.jsonl").read_bytes() == before


@pytest.mark.slow
def test_models_are_evaluated_during_training_and_the_best_one_is_kept(tmp_path: Path) -> None:
    options = ["--resume", "auto", "--evaluation.every", "2", "--evaluation.num-samples", "4"]
    for num_steps in ("3", "5"):
        job = quickstart(tmp_path, *options, "--num-steps", num_steps)
        assert job.returncode == 0, job.output
    files = RunFiles(tmp_path / "runs" / "quickstart")
    lines = read_evaluations(files.evaluations)
    assert [line["step"] for line in lines] == [0, 2, 3, 4, 5]
    assert "held-out, step 5: mean@" in job.output
    assert not list(files.evaluating.iterdir())
    best = json.loads((files.best / "evaluation.json").read_text())
    assert best.pop("run_id") == files.run_id
    assert best in lines
    assert best["eval/mean@4"] == max(line["eval/mean@4"] for line in lines)
    config = from_dict(QuickstartConfig, read_config(files.config))
    found = asyncio.run(
        evaluate_model(evaluation_config(config, files.best), [correct], rows=held_out().rows)
    )
    assert as_metrics(found.estimates).items() <= best.items()


@pytest.mark.slow
def test_adapters_are_trained_and_resumed(tmp_path: Path) -> None:
    options = [
        "--model.lora",
        "r4",
        "--checkpoint-every",
        "2",
        "--evaluation.every",
        "2",
        "--resume",
        "auto",
    ]
    directory = tmp_path / "runs" / "quickstart"
    for num_steps in ("3", "5"):
        job = quickstart(tmp_path, *options, "--num-steps", num_steps)
        assert job.returncode == 0, job.output
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    # The sampler has merged weights and the trainer does not: before and after the resume.
    for number in (0, 3):
        assert abs(metrics[number]["kl/sampler_trainer"]) < 1e-6
    evaluations = read_evaluations(directory / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2, 3, 4, 5]
    (base,) = (tmp_path / "runs" / ".models").iterdir()
    merged = AutoModelForCausalLM.from_pretrained(directory / "hf")
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), directory / "hf" / "adapter"
    )
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
def test_vllm_gets_adapters_unmerged(tmp_path: Path) -> None:
    """Expect equal log-probabilities after each update, all on-policy."""
    options = (
        "--model.lora r4 --trainer.learning-rate 1e-2 --asynchrony.max-staleness 0 "
        "--rollout.engine vllm --rollout.kv-cache-gib 0.25 --rollout.vllm.enable-lora "
        "--prompts-per-step 32 --group-size 8 --warm-start-steps 60 --warm-start-batch 64"
    )
    job = quickstart(tmp_path, *options.split())
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "quickstart"
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert any(line["grad_norm"] > 0 for line in metrics[:2])  # equal rewards give 0
    assert max(abs(line["kl/sampler_trainer"]) for line in metrics) < 1e-6
    evidence, faults = read_evidence(directory)
    assert [*faults, *audit(evidence).faults] == []


@pytest.mark.slow
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


# The default tier covers this in test_controller_shared.py and test_release.py.
@pytest.mark.slow
def test_sharing_devices_changes_no_number(tmp_path: Path) -> None:
    # Trainer and replica share devices in turns, or have their own.
    arguments = shlex.split(
        "--asynchrony.max-staleness 0 --asynchrony.stream false --checkpoint-every 2"
    )
    lines = []
    for placement in ("separate", "colocated"):
        job = quickstart(tmp_path, *arguments, "--placement", placement, "--name", placement)
        assert job.returncode == 0, job.output
        lines.append(read_metrics(tmp_path / "runs" / placement / "metrics.jsonl"))
    separate, colocated = ([without_times(line) for line in run_lines] for run_lines in lines)
    assert len(colocated) == 3
    assert colocated == separate
    assert all(line["time/wait_s/train/devices"] > 0 for line in lines[1])
    trace = json.loads((tmp_path / "runs" / "colocated" / "trace.json").read_text())
    assert {"release", "waits for devices"} <= {event["name"] for event in trace}


@pytest.mark.slow
def test_borrowing_devices_changes_no_number(tmp_path: Path) -> None:
    # Two ranks whose devices two more replicas use while the trainer waits. Replicas sample one
    # rollout at a time, so the trainer waits on a busy machine too.
    arguments = shlex.split(
        "--asynchrony.max-staleness 0 --num-steps 8 --prompts-per-step 8 --group-size 8 "
        "--trainer.layout dp2 --rollout.num-replicas 2 --trainer.num-cpus 0.5 "
        "--rollout.num-cpus 0.5 --rollout.max-running 1 --checkpoint-every 4"
    )
    lines = []
    for borrow in ("0", "2"):
        job = quickstart(tmp_path, *arguments, "--rollout.borrow", borrow, "--name", f"b{borrow}")
        assert job.returncode == 0, job.output
        lines.append(read_metrics(tmp_path / "runs" / f"b{borrow}" / "metrics.jsonl"))
    alone, lent = ([without_times(line) for line in run_lines] for run_lines in lines)
    assert len(lent) == 8
    assert lent == alone
    assert sum(line.get("lending/hand_overs", 0) for line in lines[1]) > 0
    assert all("lending/lent_s" in line or reasons_of(line) for line in lines[1])


def reasons_of(line: dict[str, float]) -> list[str]:
    return [name for name in line if name.startswith("lending/not_lent/")]


@pytest.mark.slow
def test_sharing_devices_continues_over_turns_and_runs(tmp_path: Path) -> None:
    # Two ranks and two replicas of vLLM, with unfinished completions of later steps when the
    # devices change hands; and a resume, including an evaluation of the initial model.
    options = (
        "--placement colocated --rollout.engine vllm --rollout.kv-cache-gib 0.25 --resume auto "
        "--trainer.layout dp2 --rollout.num-replicas 2 --trainer.num-cpus 0.5 "
        "--rollout.num-cpus 0.5 --asynchrony.max-staleness 2 --checkpoint-every 2 "
        "--evaluation.every 2 --evaluation.num-samples 2"
    )
    directory = tmp_path / "runs" / "quickstart"
    for num_steps in ("3", "6"):
        job = quickstart(tmp_path, *options.split(), "--num-steps", num_steps)
        assert job.returncode == 0, job.output
    metrics = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(line["staleness/max"] <= 2 for line in metrics)
    evidence, unreadable = read_evidence(directory)
    assert [*unreadable, *audit(evidence).faults] == []


@pytest.mark.slow  # tests/scripts/test_chaos.py covers this with failures
def test_two_ranks_and_two_replicas(tmp_path: Path) -> None:
    options = "--trainer.layout dp2 --rollout.num-replicas 2 --trainer.num-cpus 0.5"
    job = quickstart(tmp_path, *options.split(), "--rollout.num-cpus", "0.5")
    assert job.returncode == 0, job.output
    assert len(read_metrics(tmp_path / "runs" / "quickstart" / "metrics.jsonl")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp1tp2", "pp2"])
def test_a_model_is_cut_over_two_ranks(layout: str, tmp_path: Path) -> None:
    # Each weight or layer is on one rank; the sampler has all of them.
    job = quickstart(tmp_path, "--trainer.layout", layout)
    assert job.returncode == 0, job.output
    metrics = read_metrics(tmp_path / "runs" / "quickstart" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert {f"time/work_s/trainer-{rank}" for rank in range(2)} <= metrics[-1].keys()
    assert abs(metrics[0]["kl/sampler_trainer"]) < 1e-6
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "quickstart" / "hf")


@pytest.mark.slow
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
    )
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / engine
    assert len(read_metrics(directory / "metrics.jsonl")) == 2
    prompt = json.loads((directory / "rollouts.jsonl").open().readline())["prompt"]
    assert prompt.startswith("system: Solve the problem")
