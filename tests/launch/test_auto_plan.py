"""--plan auto: a recipe is planned, then started with the plan; a resumed run keeps its plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import rlsys
from recipes.grpo import GRPOConfig, grpo
from rlsys.common.safe_json import dump_json
from rlsys.config.machine import Machine
from rlsys.config.plan_session import (
    check_served,
    current_session,
    plan_session,
    planned_settings,
)
from rlsys.launcher import auto_plan, cluster_choice, launching
from rlsys.planner.cpu_probe import save_probe
from rlsys.planner.run_record import RecordedRole, RunRecord, record_text
from rlsys.runs.run_files import RunFiles
from tests.errors import invalid
from tests.planner.cpu_examples import TINY_CONFIG, cpu_probe

OPTIONS = ["--prompts-per-step", "4", "--group-size", "2", "--sampling.max-tokens", "8"]


@pytest.fixture(autouse=True)
def two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    without_gpus = Machine(name="this machine", devices=())
    monkeypatch.setattr(cluster_choice, "this_machine", lambda with_devices: without_gpus)
    monkeypatch.setattr(auto_plan, "NUM_SIMULATED", 1)
    # its model has no tokenizer
    monkeypatch.setattr(auto_plan, "mean_prompt_tokens", lambda config, flow: 6.0)
    save_probe(cpu_probe())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[GRPOConfig]:
    """Keep the configurations that would start, instead of starting them."""
    found: list[GRPOConfig] = []

    class Start:
        @staticmethod
        def launch(config: GRPOConfig, flow: Any, **_: Any) -> None:
            found.append(config)

    monkeypatch.setattr(launching, "actors_module", lambda name: Start)
    return found


def model_directory(tmp_path: Path) -> str:
    path = tmp_path / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(dump_json(TINY_CONFIG))
    return str(path)


def run_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Call a recipe with options and return the number of calls of its function."""
    calls = 0

    @rlsys.main
    def recipe() -> None:
        nonlocal calls
        calls += 1
        parsed = rlsys.parse(GRPOConfig)
        flow = grpo(parsed.config, [lambda rollout: 0.0])
        rlsys.launch(parsed.config, flow, dry_run=parsed.dry_run)

    common = ["--model.path", model_directory(tmp_path), "--runs-dir", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["recipe.py", *OPTIONS, *common, *options])
    recipe()
    return calls


def test_a_run_starts_with_its_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[GRPOConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_recipe(tmp_path, monkeypatch, "--plan", "auto") == 2
    (config,) = started
    assert "1x2xCPU" in capsys.readouterr().out
    ranks = config.trainer.parallel.num_ranks
    used = max(ranks, config.rollout.num_replicas)
    if config.placement == "separate":
        used = ranks + config.rollout.num_replicas
    assert used == 2
    assert config.rollout.engine == "torch"
    assert current_session() is None


def test_options_of_the_user_win_over_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[GRPOConfig]
) -> None:
    options = ["--plan", "auto", "--placement", "separate", "--asynchrony.max-staleness", "2"]
    run_recipe(tmp_path, monkeypatch, *options)
    (config,) = started
    assert (config.placement, config.asynchrony.max_staleness) == ("separate", 2)


def test_without_the_option_a_recipe_is_called_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[GRPOConfig]
) -> None:
    assert run_recipe(tmp_path, monkeypatch) == 1
    assert run_recipe(tmp_path, monkeypatch, "--plan", "none") == 1
    assert len(started) == 2


def resumable(tmp_path: Path, cluster: str, settings: dict[str, Any]) -> None:
    """Write what a run with a plan leaves: its record and a checkpoint."""
    files = RunFiles(tmp_path / "runs" / GRPOConfig(name="planned").name)
    (files.checkpoints / "step_000001").mkdir(parents=True)
    role = RecordedRole(name="policy", model="tiny", config=TINY_CONFIG, samples=True)
    record = RunRecord(cluster=cluster, prompt_tokens=4.0, roles=(role,), settings=settings)
    files.plan.write_text(record_text(record))


KEPT = {
    "placement": "separate",
    "asynchrony.max_staleness": 3,
    "trainer.layout": "dp1",
    "rollout.num_replicas": 1,
}
RESUME = ["--name", "planned", "--resume", "auto", "--plan"]


def test_a_resumed_run_keeps_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[GRPOConfig]
) -> None:
    resumable(tmp_path, "1x2xCPU", KEPT)
    assert run_recipe(tmp_path, monkeypatch, *RESUME, "auto") == 2
    assert started[0].asynchrony.max_staleness == 3


def test_a_run_of_another_cluster_is_planned_again_only_on_demand(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[GRPOConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    resumable(tmp_path, "1x8xCPU", KEPT)
    with pytest.raises(SystemExit):
        run_recipe(tmp_path, monkeypatch, *RESUME, "auto")
    assert "1x8xCPU" in capsys.readouterr().err
    assert started == []
    run_recipe(tmp_path, monkeypatch, *RESUME, "again")
    # the staleness bound belongs to the experiment; layout and replicas may change
    assert started[0].asynchrony.max_staleness == 3
    assert started[0].placement == "separate"


def test_a_wrong_value_and_a_missing_decorator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[GRPOConfig]
) -> None:
    with pytest.raises(SystemExit):
        run_recipe(tmp_path, monkeypatch, "--plan", "perhaps")
    assert started == []
    planned_settings("auto", {})
    with invalid("--plan", "auto"):
        check_served()
    planned_settings(None, {})
    check_served()
    with plan_session() as session, invalid("--plan", "perhaps"):
        planned_settings("perhaps", {})
    assert not session.must_plan
