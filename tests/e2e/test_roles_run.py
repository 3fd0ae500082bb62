"""Runs with more models than a sampled policy: reward models, preferences, PPO."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import statistics
import sys
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from recipes.arithmetic import CHARACTERS
from rlsys.launcher.tiny_models import build_tiny_model, build_tokenizer
from rlsys.runs.audit import Verdict, audit
from rlsys.runs.evaluation_log import read_evaluations
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import run, start, start_command
from tests.engines.scalar_models import scalar_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

TRAINER = "ray::TrainerActor"
FROZEN = "ray::InferenceActor"
SMALL_PAIRS = shlex.split("--prompts-per-step 8 --num-steps 3 --checkpoint-every 2 --resume auto")
SMALL_WARM_START = shlex.split("--warm-start-steps 2 --warm-start-batch 8")


def audited(directory: Path) -> Verdict:
    evidence, damages = read_evidence(directory)
    verdict = audit(evidence)
    assert [*damages, *verdict.faults] == []
    return verdict


def test_a_reward_model_is_trained_alone_and_resumes(tmp_path: Path) -> None:
    options = [*SMALL_PAIRS, "--runs-dir", str(tmp_path / "runs")]
    directory = tmp_path / "runs" / "reward_model"
    job = run("recipes/reward_model.py", options, tmp_path)
    assert job.returncode == 0, job.output
    assert "(dataset)" in job.output
    job = run("recipes/reward_model.py", [*options, "--num-steps", "5"], tmp_path)
    assert job.returncode == 0, job.output

    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["preference/margin"] == 0  # the head is initialized with zeros
    assert lines[-1]["preference/margin"] != 0
    assert {"score/mean", "preference/accuracy"} <= lines[-1].keys()
    assert "kl/sampler_trainer" not in lines[-1]
    assert audited(directory).finished
    records = [json.loads(line) for line in (directory / "rollouts.jsonl").open()]
    first, second = records[:2]
    assert (first["index"], second["index"]) == (0, 1)
    assert [first["completion"], second["completion"]] == first["row"]["completions"]
    model = AutoModelForSequenceClassification.from_pretrained(directory / "hf")
    assert model.config.num_labels == 1


def test_supervised_fine_tuning_lowers_the_held_out_loss_and_resumes(
    tmp_path: Path,
) -> None:
    options = shlex.split(
        "--prompts-per-step 64 --num-steps 20 --resume auto --evaluation.every 10"
    )
    options += ["--runs-dir", str(tmp_path / "runs")]
    directory = tmp_path / "runs" / "sft"
    for more in ([], ["--num-steps", "30", "--trainer.layout", "dp2"]):
        job = run("recipes/sft.py", [*options, *more], tmp_path)
        assert job.returncode == 0, job.output
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 31)]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    evaluations = read_evaluations(directory / "evaluations.jsonl")
    losses = [line["eval/loss"] for line in evaluations]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    assert all("eval/pass@1" in line for line in evaluations)
    assert audited(directory).finished
    AutoModelForCausalLM.from_pretrained(directory / "best")


def test_chats_train_on_their_replies(tmp_path: Path) -> None:
    # The tiny model's vocabulary covers any text; its template ends replies.
    model = build_tiny_model(tmp_path / "model", width=32, num_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}"
        "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer.save_pretrained(model)
    texts = ["how many?", "two", "and now?", "three"]
    chat = [
        {"role": "assistant" if turn % 2 else "user", "content": text}
        for turn, text in enumerate(texts)
    ]
    for name in ("train.jsonl", "test.jsonl"):
        row = json.dumps({"messages": chat})
        (tmp_path / name).write_text(f"{row}\n" * 8)
    options = shlex.split(
        f"--data.source {tmp_path}/train.jsonl --evaluation.source {tmp_path}/test.jsonl "
        "--data.prompt-column messages "
        "--completion-column messages --data.chat-template true --sampling.max-tokens 64 "
        "--prompts-per-step 8 --num-steps 20 --evaluation.every 20"
    )
    where = ["--model.path", str(model), "--runs-dir", str(tmp_path / "runs")]
    job = run("recipes/sft.py", [*options, *where], tmp_path)
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "sft"
    first, last = read_evaluations(directory / "evaluations.jsonl")
    assert last["eval/loss"] < first["eval/loss"]
    assert not [name for name in last if "pass@" in name]
    assert audited(directory).finished
    with (directory / "rollouts.jsonl").open() as file:
        record = json.loads(next(file))
    assert record["completion"] == "two<eos>\nu:and now?\na:three<eos>"


def test_dpo_trains_a_policy_with_a_reference(tmp_path: Path) -> None:
    options = shlex.split("--prompts-per-step 64 --num-steps 10 --trainer.learning-rate 1e-3")
    options += [*SMALL_WARM_START, "--runs-dir", str(tmp_path / "runs")]
    job = run("recipes/dpo.py", options, tmp_path)
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "dpo"
    lines = read_metrics(directory / "metrics.jsonl")
    # At the first step policy and reference are equal, so the margin is 0 up to rounding.
    assert abs(lines[0]["preference/margin"]) < 1e-3
    assert abs(lines[0]["loss"] - 0.6931) < 1e-3
    assert statistics.mean(line["loss"] for line in lines[-3:]) < 0.69
    assert "kl/sampler_trainer" not in lines[-1]
    assert audited(directory).finished
    AutoModelForCausalLM.from_pretrained(directory / "hf")


def test_ppo_survives_the_deaths_of_its_trainers_and_resumes(tmp_path: Path) -> None:
    # Ranks of policy and critic are killed, with two steps between, until both were killed.
    where = ["--runs-dir", str(tmp_path / "runs")]
    job = run("recipes/reward_model.py", [*SMALL_PAIRS, *where], tmp_path)
    assert job.returncode == 0, job.output
    judge = str(tmp_path / "runs" / "reward_model" / "hf")
    options = shlex.split(
        f"--prompts-per-step 4 --group-size 2 --resume auto --reward-model.model.path {judge}"
    )
    options += [*SMALL_WARM_START, *where]
    directory = tmp_path / "runs" / "ppo"
    job = start("recipes/ppo.py", [*options, "--num-steps", "60"], tmp_path)
    try:
        step = job.wait_for_step(directory, 2)
        chance = random.Random(0)
        while not {"trainer-0", "critic-0"} <= dead_workers(job.output):
            # Their processes have the same name, and both restart when one of them dies.
            pids = [p for p, name in job.processes().items() if name.startswith(TRAINER)]
            assert len(pids) == 2, job.processes()
            os.kill(chance.choice(pids), signal.SIGKILL)
            step = job.wait_for_step(directory, step + 2)
        assert job.wait() == 0, job.output
        assert job.left_behind() == {}
    finally:
        job.end()

    job = run("recipes/ppo.py", [*options, "--num-steps", "62"], tmp_path)
    assert job.returncode == 0, job.output
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 63)]
    wanted = {"reward/mean", "score/mean", "critic/loss", "critic/value/mean"}
    assert wanted <= lines[-1].keys()
    verdict = audited(directory)
    assert verdict.finished
    assert "1 resume," in verdict.summary


def test_ppo_survives_the_deaths_of_its_frozen_models_and_resumes_after_a_kill(
    tmp_path: Path,
) -> None:
    # Workers of reward model and reference are killed, with three steps between, until both were
    # killed; then the driver's whole process group at once.
    judge = scalar_model(tmp_path / "judge", "qwen3")
    build_tokenizer(CHARACTERS).save_pretrained(judge)
    options = shlex.split(
        f"--prompts-per-step 4 --group-size 2 --resume auto --reward-model.model.path {judge} "
        f"--checkpoint-every 2 --num-steps 40 --runs-dir {tmp_path}/runs"
    )
    command = [sys.executable, "recipes/ppo.py", *options, *SMALL_WARM_START]
    directory = tmp_path / "runs" / "ppo"
    job = start_command(["setsid", *command], tmp_path)
    try:
        step = job.wait_for_step(directory, 2)
        chance = random.Random(0)
        while not {"reward_model-0", "reference-0"} <= dead_workers(job.output):
            # Their processes have the same name.
            pids = [p for p, name in job.processes().items() if name.startswith(FROZEN)]
            assert len(pids) == 2, job.processes()
            os.kill(chance.choice(pids), signal.SIGKILL)
            step = job.wait_for_step(directory, step + 3)  # the rows of two steps may exist already
        job.wait_for_checkpoint(directory)
        os.killpg(job.process.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert job.left_behind() == {}
    finally:
        job.end()
    num_before = len(read_metrics(directory / "metrics.jsonl"))
    assert 2 <= num_before < 40

    job = start_command(command, tmp_path)
    try:
        assert job.wait() == 0, job.output
        assert job.left_behind() == {}
    finally:
        job.end()
    assert "died" not in job.output
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 41)]
    assert {"score/mean", "critic/loss", "critic/value/mean"} <= lines[-1].keys()
    # The recipe's critic has twice the learning rate, on a schedule of its own updates: neither
    # model started over.
    policys = [line["learning_rate"] for line in lines]
    assert [line["critic/learning_rate"] / 2 for line in lines] == pytest.approx(policys)
    verdict = audited(directory)
    assert verdict.finished
    assert "1 resume," in verdict.summary


def dead_workers(output: str) -> set[str]:
    return set(re.findall(r"warning: (\S+) died", output))
