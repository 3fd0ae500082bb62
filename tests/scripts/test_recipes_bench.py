"""What scripts/bench/recipes.py tells of runs, and how scripts/plot_recipes.py draws them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsys.runs.observe.metrics_file import MetricsWriter
from scripts import plot_recipes
from scripts.bench import recipes


def run_of(directory: Path, *, metric: str, from_step: int = 1) -> None:
    """Twenty steps, over which the metric rises from 1/20 to 1; before `from_step` the run has
    only the usual reward, 0."""
    directory.mkdir(parents=True)
    writer = MetricsWriter(directory / "metrics.jsonl")
    for step in range(1, 21):
        line = {"step": step, "reward/mean": 0.0, "time/unix_s": 60.0 * step}
        writer.write(line | ({metric: step / 20} if step >= from_step else {}))
    writer.close()


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    run_of(tmp_path / "rloo", metric="reward/mean")
    run_of(tmp_path / "dapo", metric="reward/sampled_mean", from_step=3)
    run_of(tmp_path / "distill", metric="kl/teacher")
    run_of(tmp_path / "distill-teacher", metric="reward/mean")
    return tmp_path


def test_rewards_are_means_over_a_tenth_at_either_end(runs_dir: Path) -> None:
    found = recipes.results_of("rloo", runs_dir, {"rloo": 2.5})
    assert found == {"reward_first": 0.075, "reward_last": 0.975, "steps": 20, "minutes": 2.5}


def test_the_specified_recipes_have_their_names() -> None:
    specified = "grpo dr_grpo dapo rloo reinforce_pp gspo ppo reward_model decoupled_ppo llamarl "
    specified += "scalerl distill dpo swarm"
    assert set(recipes.RECIPES) == set(specified.split())
    for name, recipe in recipes.RECIPES.items():
        assert (recipes.ROOT / "recipes" / (recipe.script or f"{name}.py")).is_file()


@pytest.mark.parametrize("called", ["grpo", "quickstart"])
def test_grpo_trains_the_quickstart_in_a_directory_of_its_own_name(
    called: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        run_of(tmp_path / "grpo", metric="reward/mean")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["recipes.py", called, "--runs-dir", str(tmp_path)])
    recipes.main()
    (command,) = commands
    assert command[1:4] == ["recipes/quickstart.py", "--name", "grpo"]
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["grpo"]["reward_last"] == 0.975
    assert list(plot_recipes.curves(tmp_path)) == ["grpo"]


def test_refused_groups_count_in_the_results(runs_dir: Path) -> None:
    found = recipes.results_of("dapo", runs_dir, {})
    assert (found["reward_first"], found["reward_last"]) == (0.0, 0.975)
    assert found["trained"] == 0.0


def test_results_include_the_model_trained_first(runs_dir: Path) -> None:
    found = recipes.results_of("distill", runs_dir, {})
    assert (found["teacher_reward_last"], found["teacher_minutes"]) == (0.975, 19.0)
    assert found["kl_teacher"] == 0.975


def test_no_critic_can_explain_what_the_tokens_so_far_leave_open() -> None:
    """The first of two tokens decides. Before it, four scores of 1, 1, -1, -1 have a variance of
    4/3 (unbiased); after it, of none. Over all eight tokens that is 2/3, of 1."""
    rollouts = [
        {"group_id": 7, "token_ids": [first, 9], "columns": {"score": score}}
        for first, score in [(1, 1.0), (1, 1.0), (2, -1.0), (2, -1.0)]
    ]
    assert recipes.explainable_variance(rollouts) == pytest.approx(1 / 3)
    # Another group of one rollout, whose prompt may determine its score.
    alone = {"group_id": 8, "token_ids": [3, 3], "columns": {"score": 0.0}}
    spread, left = 8 / 10, 4 / 3 * 4 / 10
    assert recipes.explainable_variance([*rollouts, alone]) == pytest.approx(1 - left / spread)


def test_results_of_a_run_without_rewards_are_those_of_preferences(runs_dir: Path) -> None:
    path = runs_dir / "ppo-reward_model"
    path.mkdir()
    lines = [{"step": n, "preference/accuracy": n / 20, "time/unix_s": 60.0 * n} for n in (1, 20)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_of(runs_dir / "ppo", metric="score/mean")
    rollouts = [
        {"step": step, "group_id": 1, "token_ids": [5], "columns": {"score": float(score)}}
        for step, score in [(10, 9), (11, 1), (20, 2)]
    ]
    (runs_dir / "ppo/rollouts.jsonl").write_text("\n".join(map(json.dumps, rollouts)))
    found = recipes.results_of("ppo", runs_dir, {})
    assert (found["reward_model_reward_last"], found["reward_model_minutes"]) == (1.0, 19.0)
    assert found["score"] == 0.975
    assert found["explainable_variance"] == -1.0  # of the last ten steps: 1 - (1/2) / (1/4)


def test_results_of_a_swarm_count_the_samples_of_its_nodes(tmp_path: Path) -> None:
    for node in range(4):
        run_of(tmp_path / f"swarm-{node}", metric="reward/sampled_mean", from_step=11)
        run_of(tmp_path / f"alone-{node}", metric="reward/mean", from_step=20)
    found = recipes.results_of("swarm", tmp_path, {"swarm": 9.0})
    assert found["cumulative_reward"] == pytest.approx(4 * sum(range(11, 21)) / 20)
    assert found["alone_cumulative_reward"] == 4.0
    assert (found["reward_first"], found["reward_last"], found["minutes"]) == (0.0, 0.975, 9.0)
    drawn = plot_recipes.curves(tmp_path)
    assert list(drawn) == ["swarm", "alone"]
    assert drawn["swarm"][0][-1] == pytest.approx(1.0)
    (tmp_path / "alone-3" / "metrics.jsonl").unlink()
    assert list(plot_recipes.curves(tmp_path)) == ["swarm"]


def test_one_line_of_json_comes_last(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[tuple[str, str, list[str]]] = []

    def train(name: str, run: str, _: Path, options: list[str]) -> float:
        trained.append((name, run, options))
        return 1.0

    monkeypatch.setattr(recipes, "train", train)
    run_of(runs_dir / "decoupled_ppo", metric="reward/mean")
    run_of(runs_dir / "eta8", metric="reward/mean", from_step=20)
    run_of(runs_dir / "interpolated", metric="reward/mean")
    arguments = ["dapo", "decoupled_ppo", "--runs-dir", str(runs_dir), "--num-steps", "20"]
    monkeypatch.setattr(sys, "argv", ["recipes.py", *arguments])
    recipes.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found) == ["dapo", "decoupled_ppo"]
    assert found["decoupled_ppo"]["reward_last"] == 0.975
    assert found["decoupled_ppo"]["eta8_reward_last"] == 0.5
    runs = [("dapo", "dapo"), *(("decoupled_ppo", run) for run in ("decoupled_ppo", "eta8"))]
    runs.append(("decoupled_ppo", "interpolated"))
    assert trained == [(*run, ["--num-steps", "20"]) for run in runs]


def test_every_recipe_that_is_asked_for_is_there() -> None:
    for name in recipes.RECIPES:
        assert (recipes.ROOT / "recipes" / f"{name}.py").is_file()


def test_a_picture_of_all_runs_is_drawn(runs_dir: Path) -> None:
    assert list(plot_recipes.curves(runs_dir)) == ["rloo", "dapo", "distill"]
    plot_recipes.main([str(runs_dir)])
    assert (runs_dir / "recipes.svg").read_bytes().startswith(b"<?xml")


def test_a_directory_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no run of a recipe"):
        plot_recipes.main([str(tmp_path)])
