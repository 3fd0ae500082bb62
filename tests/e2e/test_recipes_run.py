"""Recipes as a user starts them, small: metrics of each algorithm are in the run's metrics."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from rlsys.dataflow.scheduling.ledger import read_events
from rlsys.runs.observe.metrics_file import read_metrics
from tests.e2e.job import ROOT, SMALL_QUICKSTART, run
from tests.small_recipes import SMALL_RECIPES

# Advantages over the step for groups with different rewards: both stages in one graph.
CHOSEN_GROUPS = """
import sys
sys.path.insert(0, {root!r})
import rlsys
from recipes.arithmetic import MODEL, problems
from recipes.quickstart import QuickstartConfig
from rlsys.algorithms import (
    cispo, dr_grpo_advantage, dynamic_sampling, prompt_mean, scale_rl_advantage
)

@rlsys.reward
def even(rollout: rlsys.Rollout) -> float:
    return float(sum(rollout.token_ids) % 2)

cfg = rlsys.parse(QuickstartConfig).config
flow = rlsys.Dataflow()
policy = flow.model("policy")
prompts = rlsys.Prompts(config=cfg.data, rows=problems(cfg))
rollouts = flow.generate(policy, prompts, group_size=cfg.group_size)
reward = flow.score(rollouts, [even])
centred = flow.per_group(dynamic_sampling(dr_grpo_advantage), reward, name="centred")
advantages = flow.per_batch(scale_rl_advantage, centred)
flow.train(policy, rollouts, *advantages, loss=cispo(5.0), aggregation=prompt_mean)
rlsys.launch(cfg, flow, own_model=MODEL)
"""


@pytest.mark.slow
def test_advantages_over_a_step_of_chosen_groups(tmp_path: Path) -> None:
    script = tmp_path / "recipe.py"
    script.write_text(CHOSEN_GROUPS.format(root=str(ROOT)))
    job = run(str(script), [*SMALL_QUICKSTART, "--runs-dir", str(tmp_path / "runs")], tmp_path)
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "quickstart"
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    # One of two rollouts has an even sum and one an odd one; other groups are dropped.
    assert all(line["reward/mean"] == 0.5 for line in lines)
    assert all(line["groups/zero_advantage_frac"] == 0 for line in lines)
    reasons = [e["reason"] for e in read_events(directory / "ledger.jsonl") if "reason" in e]
    assert "refused" in reasons
    assert 0 < lines[-1]["reward/sampled_mean"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL_RECIPES if name != "distill"])
def test_a_recipe_runs(name: str, tmp_path: Path) -> None:
    options = shlex.split(
        "--num-steps 4 --prompts-per-step 16 --group-size 4 --warm-start-steps 60 "
        "--warm-start-batch 64"
    )
    job = run(f"recipes/{name}.py", [*options, "--runs-dir", str(tmp_path / "runs")], tmp_path)
    assert job.returncode == 0, job.output
    lines = read_metrics(tmp_path / "runs" / name / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["grad_norm"] > 0 for line in lines)


@pytest.mark.slow
def test_distillation_trains_a_teacher_unless_one_is_configured(tmp_path: Path) -> None:
    options = shlex.split(
        "--num-steps 2 --teacher-steps 1 --prompts-per-step 64 --warm-start-steps 2 "
        "--warm-start-batch 8"
    )
    where = ["--runs-dir", str(tmp_path / "runs")]
    job = run("recipes/distill.py", [*options, *where], tmp_path)
    assert job.returncode == 0, job.output
    teacher = tmp_path / "runs" / "distill-teacher" / "hf"
    lines = read_metrics(tmp_path / "runs" / "distill" / "metrics.jsonl")
    assert len(lines) == 2
    assert {"kl/teacher", "reward/mean"} <= lines[-1].keys()
    written = os.stat(teacher / "config.json").st_mtime_ns

    given = ["--name", "second", "--teacher.model.path", str(teacher)]
    job = run("recipes/distill.py", [*options, *where, *given], tmp_path)
    assert job.returncode == 0, job.output
    assert not (tmp_path / "runs" / "second-teacher").exists()
    assert os.stat(teacher / "config.json").st_mtime_ns == written
