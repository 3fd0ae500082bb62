"""A run whose environment three models play: the policy, another trained model and a frozen one."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.runs.audit import audit
from rlsys.runs.export_seal import export_faults
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import ROOT, run, start

RECIPE = """
import sys
sys.path.insert(0, {root!r})
from dataclasses import dataclass, field
import rlsys
from rlsys.algorithms import clipped_surrogate, prompt_mean, token_mean, turn_advantage

DIGITS = "0123456789"

@rlsys.environment(seats=("first", "second", "third"), turn_tokens=3, plain_text=True)
async def game(chat, task):
    one, two, three = chat, chat.seat("second"), chat.seat("third")
    move = await one("?")
    one.reward(len(move))
    hint = await three("=" + str(sum(map(ord, move)) % 10))
    three.reward(-100.0)
    answer = await two("<" + "".join(c for c in hint if c in DIGITS))
    two.reward(sum(c in DIGITS for c in answer))
    reply = await one(">" + str(len(answer)))
    return {{"turns": float(len(reply))}}

@dataclass(frozen=True, kw_only=True)
class Config(rlsys.RunConfig):
    name: str = "seats"
    rival: rlsys.TrainedRoleConfig = field(
        default_factory=lambda: rlsys.TrainedRoleConfig(trainer=rlsys.TrainerConfig(
            learning_rate=1e-2, micro_batch_tokens=512, num_cpus=0.25)))
    opponent: rlsys.RoleConfig = field(
        default_factory=lambda: rlsys.RoleConfig(num_cpus=0.25))
    num_steps: int = 3
    prompts_per_step: int = 4
    group_size: int = 4
    sampling: rlsys.SamplingConfig = field(
        default_factory=lambda: rlsys.SamplingConfig(max_tokens=32))
    rollout: rlsys.RolloutConfig = field(
        default_factory=lambda: rlsys.RolloutConfig(num_cpus=0.25))
    trainer: rlsys.TrainerConfig = field(
        default_factory=lambda: rlsys.TrainerConfig(
            learning_rate=1e-2, micro_batch_tokens=512, num_cpus=0.25))

def graph(cfg):
    flow = rlsys.Dataflow()
    policy, rival = flow.model("policy"), flow.model("rival", cfg.rival)
    opponent = flow.model("opponent", cfg.opponent)
    tasks = rlsys.Prompts(config=cfg.data, rows=[{{"number": n}} for n in range(1, 10)])
    episodes = flow.play(
        policy, game, tasks, group_size=cfg.group_size,
        seats={{"second": rival, "third": opponent}})
    (advantages,) = flow.per_batch(
        turn_advantage, episodes.turn_rewards, episodes.turns, episodes.seats, per="token")
    loss = clipped_surrogate(0.2, 0.2)
    flow.train(
        policy, episodes.rollouts, advantages,
        loss=loss, aggregation=token_mean, watch=[episodes.reward])
    flow.train(rival, episodes.rollouts, advantages, loss=loss, aggregation=prompt_mean)
    return flow

if __name__ == "__main__":
    cfg = rlsys.parse(Config).config
    model = rlsys.OwnModel(name="seats", characters="0123456789?<>=", width=32, num_layers=2)
    rlsys.launch(cfg, graph(cfg), own_model=model)
"""


def recipe(tmp_path: Path) -> str:
    script = tmp_path / "recipe.py"
    script.write_text(RECIPE.format(root=str(ROOT)))
    return str(script)


def options(tmp_path: Path, *more: str) -> list[str]:
    return ["--runs-dir", str(tmp_path / "runs"), "--asynchrony.max-staleness", "0", *more]


def records_of(directory: Path) -> list[dict[str, Any]]:
    with (directory / "rollouts.jsonl").open() as file:
        return [json.loads(line) for line in file]


def audited(directory: Path) -> None:
    evidence, damages = read_evidence(directory)
    verdict = audit(evidence)
    assert [*damages, *verdict.faults] == []
    assert verdict.finished


def check_trained(directory: Path, num_steps: int) -> None:
    """Assert that each policy was sampled with its newest weights, trained, and exported."""
    audited(directory)
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, num_steps + 1)]
    for of_model in ("", "rival/"):
        # In the first steps only: soon all episodes are alike.
        assert all(line[f"{of_model}grad_norm"] > 0 for line in lines[:2])
        # On policy: the tokens of its seats are sampled with the weights that train on them.
        assert max(line[f"{of_model}kl/sampler_trainer"] for line in lines) < 1e-5
        assert max(line[f"{of_model}staleness/max"] for line in lines) == 0
    exports = [directory / "hf", directory / "hf-rival"]
    run_id = json.loads((directory / "config.json").read_text())["run_id"]
    assert [export_faults(one, run_id=run_id) for one in exports] == [[], []]
    own, rivals = (load_file(one / "model.safetensors") for one in exports)
    assert any((own[name] != rivals[name]).any() for name in own)


@pytest.mark.slow
def test_three_models_play_and_two_of_them_learn(tmp_path: Path) -> None:
    directory, opponent = tmp_path / "runs" / "seats", tmp_path / "opponent"
    build_tiny_model(opponent, characters="ab9876543210=", width=32, num_layers=2)
    job = run(recipe(tmp_path), options(tmp_path, "--opponent.model.path", str(opponent)), tmp_path)
    assert job.returncode == 0, job.output
    check_trained(directory, 3)
    records = records_of(directory)
    assert records
    for record in records:
        turns = [(turn["branch"], turn["seat"], turn["role"]) for turn in record["turns"]]
        assert turns == [
            *[(0, "first", role) for role in ("user", "assistant") * 2],
            *[(1, "second", role) for role in ("user", "assistant")],
            *[(2, "third", role) for role in ("user", "assistant")],
        ]
        sampled = {turn["seat"] for turn in record["turns"] if turn["sampled"]}
        assert sampled == {"first", "second"}
        hint = re.sub("<[a-z]+>", "", record["turns"][-1]["text"])  # but for special tokens
        assert not set(hint) - set("ab9876543210=")
        assert record["reward"] >= 0, "the opponent's reward counts"


@pytest.mark.slow
def test_two_policies_with_adapters_share_an_engine(tmp_path: Path) -> None:
    """Kill the actor of the shared engine too, which serves both policies."""
    directory, model = tmp_path / "runs" / "seats", tmp_path / "model"
    build_tiny_model(model, characters="0123456789?<>=", num_layers=2)
    adapters = (
        f"--model.path {model} --model.lora r8 --rival.model.lora r4 --rollout.engine vllm "
        "--rollout.kv-cache-gib 0.125 --rollout.vllm.enable-lora --num-steps 6"
    )
    job = start(recipe(tmp_path), options(tmp_path, *adapters.split()), tmp_path)
    try:
        job.wait_for_step(directory, 2)
        actors = [pid for pid, name in job.processes().items() if "RolloutActor" in name]
        assert len(actors) == 2  # that of both policies, and the opponent's
        (of_vllm,) = [pid for pid in actors if psutil.Process(pid).children()]
        os.kill(of_vllm, signal.SIGKILL)
        assert job.wait() == 0, job.output
        assert job.left_behind() == {}
    finally:
        job.end()
    check_trained(directory, 6)


@pytest.mark.slow
def test_a_run_survives_the_deaths_of_its_engines_and_of_a_trainer(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "seats"
    job = start(recipe(tmp_path), options(tmp_path, "--num-steps", "80"), tmp_path)
    try:
        step = job.wait_for_step(directory, 2)
        for number in range(3):
            engines = sorted(p for p, c in job.processes().items() if "RolloutActor" in c)
            assert len(engines) == 3
            os.kill(engines[number], signal.SIGKILL)
            step = job.wait_for_step(directory, step + 3)
        trainers = sorted(p for p, c in job.processes().items() if "TrainerActor" in c)
        assert len(trainers) == 2
        os.kill(trainers[1], signal.SIGKILL)
        assert job.wait() == 0, job.output
        assert job.output.count("rollout-0") >= 3
        assert job.left_behind() == {}
    finally:
        job.end()
    check_trained(directory, 80)


@pytest.mark.slow
def test_a_killed_run_of_two_policies_resumes(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "seats"
    arguments = options(tmp_path, "--num-steps", "30", "--checkpoint-every", "5")
    job = start(recipe(tmp_path), arguments, tmp_path)
    try:
        job.wait_for_step(directory, 12)
        job.wait_for_checkpoint(directory)
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)
    finally:
        job.end()
    job = run(recipe(tmp_path), [*arguments, "--resume", "true"], tmp_path)
    assert job.returncode == 0, job.output
    check_trained(directory, 30)
