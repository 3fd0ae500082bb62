"""Runs whose rollouts are episodes, through deaths and a resume."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlsys.runs.audit import audit
from rlsys.runs.evaluation_log import read_evaluations
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from scripts.bench.environment_recipes import numbers_of
from tests.e2e.job import ROOT, Job, run, start

RECIPE = """
import sys
sys.path.insert(0, {root!r})
import os, time
from dataclasses import dataclass, field
import rlsys
from rlsys.algorithms import clipped_surrogate, token_mean, turn_advantage


def as_number(text):
    return int(text) if text.isdigit() else 0

@rlsys.environment(max_turns=4, turn_tokens=3, plain_text=True, format_reward=-1.0)
async def is_async(chat, task):
    number = as_number(await chat("?"))
    await chat.fork()("=")
    while number != task["number"] and not chat.done:
        chat.reward(-0.1)
        number = await chat("<" if number > task["number"] else ">", parse=int)
    return {{"right": float(number == task["number"])}}

@rlsys.environment(max_turns=3, turn_tokens=3, plain_text=True, format_reward=-1.0)
def is_plain(chat, task):
    if task["number"] == 1:
        chat("?")  # any reply: one that parse rejects would end the episode
        raise LookupError("no ones")
    number = chat("?", parse=int)
    return float(number == task["number"])

@dataclass(frozen=True, kw_only=True)
class Config(rlsys.RunConfig):
    name: str = "play"
    plain: bool = False
    num_steps: int = 4
    prompts_per_step: int = 4
    group_size: int = 4
    sampling: rlsys.SamplingConfig = field(
        default_factory=lambda: rlsys.SamplingConfig(max_tokens=24))
    trainer: rlsys.TrainerConfig = field(
        default_factory=lambda: rlsys.TrainerConfig(learning_rate=1e-3, micro_batch_tokens=512))

def graph(cfg):
    flow = rlsys.Dataflow()
    policy = flow.model("policy")
    tasks = rlsys.Prompts(config=cfg.data, rows=[{{"number": n}} for n in range(1, 10)])
    environment = is_plain if cfg.plain else is_async
    episodes = flow.play(policy, environment, tasks, group_size=cfg.group_size)
    (advantages,) = flow.per_batch(
        turn_advantage, episodes.turn_rewards, episodes.turns, per="token")
    flow.train(
        policy, episodes.rollouts, advantages,
        loss=clipped_surrogate(0.2, 0.2), aggregation=token_mean, watch=[episodes.reward])
    return flow

if __name__ == "__main__":
    cfg = rlsys.parse(Config).config
    model = rlsys.OwnModel(name="play", characters="0123456789?<>=", width=32, num_layers=2)
    held_out = rlsys.HeldOut(rows=[{{"number": n}} for n in (1, 2, 3)])
    rlsys.launch(cfg, graph(cfg), own_model=model, held_out=held_out)
"""


def recipe(tmp_path: Path) -> str:
    script = tmp_path / "recipe.py"
    script.write_text(RECIPE.format(root=str(ROOT)))
    return str(script)


def audited(directory: Path) -> None:
    evidence, damages = read_evidence(directory)
    verdict = audit(evidence)
    assert [*damages, *verdict.faults] == []
    assert verdict.finished


def records_of(directory: Path) -> list[dict[str, Any]]:
    with (directory / "rollouts.jsonl").open() as file:
        return [json.loads(line) for line in file]


def kill(job: Job, *names: str) -> None:
    for pid, command in job.processes().items():
        if command.startswith(tuple(f"ray::{name}" for name in names)):
            os.kill(pid, signal.SIGKILL)


def arguments(tmp_path: Path, *more: str) -> Sequence[str]:
    return ["--runs-dir", str(tmp_path / "runs"), *more]


@pytest.mark.slow
def test_a_run_of_episodes_survives_the_deaths_of_its_actors(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "play"
    job = start(recipe(tmp_path), arguments(tmp_path, "--num-steps", "60"), tmp_path)
    try:
        job.wait_for_step(directory, 1)
        for actors in (["EnvironmentActor"], ["RolloutActor"], ["TrainerActor"]):
            step = job.wait_for_step(directory, 2)
            kill(job, *actors)  # the standby environment worker too
            job.wait_for_step(directory, step + 2)
        assert job.wait() == 0, job.output
        assert re.search(r"another worker replays \d+ episode", job.output)
        assert "rollout-0 died" in job.output
        assert job.left_behind() == {}
    finally:
        job.end()
    audited(directory)
    records = records_of(directory)
    trees = [one for one in records if any(turn["branch"] for turn in one["turns"])]
    assert trees, "no episode forked"
    for record in records:
        assert set(record["rewards"]) <= {"turns", "right", "final"}
        assert record["reward"] == pytest.approx(sum(record["rewards"].values()), abs=1e-5)
        transcript = "".join(turn["text"] for turn in record["turns"] if turn["branch"] == 0)
        assert record["prompt"] == "?"
        shown = record["prompt"] + record["completion"]
        # The end of each turn is part of the rollout's text, but not of the turn's.
        assert shown.replace("<eos>", "").startswith(transcript.replace("<eos>", ""))
    lines = read_metrics(directory / "metrics.jsonl")
    assert max(line["staleness/max"] for line in lines) <= 1


@pytest.mark.slow
def test_a_killed_run_of_episodes_resumes(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "play"
    options = arguments(tmp_path, "--num-steps", "40", "--checkpoint-every", "5")
    job = start(recipe(tmp_path), options, tmp_path)
    try:
        job.wait_for_step(directory, 12)
        job.wait_for_checkpoint(directory)
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)
    finally:
        job.end()
    job = run(recipe(tmp_path), [*options, "--resume", "true"], tmp_path)
    assert job.returncode == 0, job.output
    audited(directory)
    assert [line["step"] for line in read_metrics(directory / "metrics.jsonl")] == [*range(1, 41)]


@pytest.mark.slow  # tests/actors/test_evaluating.py covers the parts
def test_held_out_tasks_are_played_during_training(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "play"
    options = ["--evaluation.every", "2", "--evaluation.num-samples", "2"]
    job = run(recipe(tmp_path), arguments(tmp_path, *options), tmp_path)
    assert job.returncode == 0, job.output
    assert job.left_behind() == {}
    audited(directory)
    lines = read_evaluations(directory / "evaluations.jsonl")
    assert [line["step"] for line in lines] == [0, 2, 4]
    for line in lines:
        assert line["eval/prompts"] == 3
        parts = [line.get(f"eval/{name}/mean", 0.0) for name in ("right", "turns", "final")]
        assert line["eval/mean@2"] == pytest.approx(sum(parts), abs=1e-5)
    assert "held-out, step 4: mean@" in job.output


@pytest.mark.slow
def test_a_plain_environment_that_fails_drops_its_groups(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "play"
    evaluated = ["--evaluation.every", "4", "--evaluation.num-samples", "2"]
    job = run(recipe(tmp_path), arguments(tmp_path, "--plain", "true", *evaluated), tmp_path)
    assert job.returncode == 0, job.output
    assert "no ones" in job.output
    assert "evaluation of step 4: the reward of 2 samples failed" in job.output
    lines = read_evaluations(directory / "evaluations.jsonl")
    assert [(line["eval/failed"], line["eval/prompts"]) for line in lines] == [(2, 2)] * 2
    audited(directory)
    last = read_metrics(directory / "metrics.jsonl")[-1]
    assert last["rollouts/dropped/environment exception"] > 0
    assert not [one for one in records_of(directory) if one["row"]["number"] == 1]


@pytest.mark.slow
def test_sampling_turns_is_work_of_the_replica(tmp_path: Path) -> None:
    job = run(recipe(tmp_path), arguments(tmp_path, "--num-steps", "12"), tmp_path)
    assert job.returncode == 0, job.output
    lines = read_metrics(tmp_path / "runs" / "play" / "metrics.jsonl")
    measured = [line for line in lines if "time/work_s/rollout-0" in line]
    # On a busy machine, a step may be trained on groups that were ready before it began.
    assert sum(line["time/work_s/rollout-0"] for line in measured) > 0
    # The start of the replica, which takes seconds, is no waiting.
    waited_s = sum(line["time/wait_s/rollout-0"] for line in measured)
    assert waited_s < sum(line["time/step_s"] for line in lines)


@pytest.mark.slow
def test_guessing_is_learned_from_random_weights(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "guess"
    job = run("recipes/guess.py", arguments(tmp_path, "--num-steps", "60"), tmp_path)
    assert job.returncode == 0, job.output
    audited(directory)
    found = [line["found/mean"] for line in read_metrics(directory / "metrics.jsonl")]
    assert max(found[:3]) < 0.3
    assert min(found[-5:]) > 0.8
    assert numbers_of("guess", job.output)["guess_found_greedy"] > 0.9


@pytest.mark.slow
def test_the_calculator_recipe_runs(tmp_path: Path) -> None:
    options = arguments(tmp_path, "--num-steps", "2", "--warm-start-steps", "2")
    job = run("recipes/calculator.py", options, tmp_path)
    assert job.returncode == 0, job.output
    audited(tmp_path / "runs" / "calculator")
    assert numbers_of("calculator", job.output)["calculator_hard_without_tool"] < 0.1
