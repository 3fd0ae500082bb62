"""Runs whose environments have seats of other models."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rlsys.audit import audit
from rlsys.history import read_evidence
from rlsys.observe.metrics import read_metrics
from rlsys.tiny_models import build_tiny_model
from tests.e2e.job import ROOT, run, start

RECIPE = """
import sys
sys.path.insert(0, {root!r})
from dataclasses import dataclass, field
import rlsys
from rlsys.algorithms import clipped_surrogate, token_mean, turn_advantage

@rlsys.environment(seats=("first", "second"), turn_tokens=3, plain_text=True)
async def game(chat, task):
    one, two = chat.seat("first"), chat.seat("second")
    move = await one("?")
    answer = await two("=" + str(sum(map(ord, move)) % 10))
    one.reward(len(move))
    two.reward(-100.0)
    reply = await one("".join(c for c in answer if c in "0123456789") or "<")
    return {{"said": float(len(reply) + len(answer))}}

@dataclass(frozen=True, kw_only=True)
class Config(rlsys.RunConfig):
    name: str = "seats"
    opponent: rlsys.RoleConfig = field(default_factory=rlsys.RoleConfig)
    num_steps: int = 3
    prompts_per_step: int = 4
    group_size: int = 4
    sampling: rlsys.SamplingConfig = field(
        default_factory=lambda: rlsys.SamplingConfig(max_tokens=24))
    trainer: rlsys.TrainerConfig = field(
        default_factory=lambda: rlsys.TrainerConfig(learning_rate=1e-3, micro_batch_tokens=512))

def graph(cfg):
    flow = rlsys.Dataflow()
    policy, opponent = flow.model("policy"), flow.model("opponent", cfg.opponent)
    tasks = rlsys.Prompts(config=cfg.data, rows=[{{"number": n}} for n in range(1, 10)])
    episodes = flow.play(
        policy, game, tasks, group_size=cfg.group_size, seats={{"second": opponent}})
    (advantages,) = flow.per_batch(
        turn_advantage, episodes.turn_rewards, episodes.turns, episodes.seats, per="token")
    flow.train(
        policy, episodes.rollouts, advantages,
        loss=clipped_surrogate(0.2, 0.2), aggregation=token_mean, watch=[episodes.reward])
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


def records_of(directory: Path) -> list[dict[str, Any]]:
    with (directory / "rollouts.jsonl").open() as file:
        return [json.loads(line) for line in file]


def audited(directory: Path) -> None:
    evidence, damages = read_evidence(directory)
    verdict = audit(evidence)
    assert [*damages, *verdict.faults] == []
    assert verdict.finished


def test_a_frozen_opponent_of_another_vocabulary_plays_a_seat(tmp_path: Path) -> None:
    directory, opponent = tmp_path / "runs" / "seats", tmp_path / "opponent"
    build_tiny_model(opponent, characters="ab9876543210=", width=32, num_layers=2)
    options = ["--runs-dir", str(tmp_path / "runs"), "--asynchrony.max-staleness", "0"]
    options += ["--opponent.model.path", str(opponent)]
    job = run(recipe(tmp_path), options, tmp_path)
    assert job.returncode == 0, job.output
    audited(directory)
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(line["kl/sampler_trainer"] < 1e-4 for line in lines)
    records = records_of(directory)
    assert records
    for record in records:
        said = {(turn["seat"], turn["branch"]) for turn in record["turns"]}
        assert said == {("first", 0), ("second", 1)}
        theirs = [turn for turn in record["turns"] if turn["seat"] == "second"]
        assert [turn["role"] for turn in theirs] == ["user", "assistant"]
        assert not any(turn["sampled"] for turn in theirs)
        assert theirs[0]["text"][0] == "="
        assert not set(theirs[1]["text"].replace("<eos>", "")) - set("ab9876543210=")
        assert record["reward"] >= 0, "the opponent's reward counts"


@pytest.mark.slow
def test_a_run_outlives_the_engine_of_an_opponent(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "seats"
    options = ["--runs-dir", str(tmp_path / "runs"), "--num-steps", "60"]
    job = start(recipe(tmp_path), options, tmp_path)
    try:
        step = job.wait_for_step(directory, 2)
        engines = [p for p, command in job.processes().items() if "RolloutActor" in command]
        assert len(engines) == 2
        os.kill(max(engines), signal.SIGKILL)
        job.wait_for_step(directory, step + 3)
        assert job.wait() == 0, job.output
        assert "rollout-0 died" in job.output
        assert job.left_behind() == {}
    finally:
        job.end()
    audited(directory)
