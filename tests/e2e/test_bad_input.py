"""A user's mistakes: one clear message with the value, the rule and the fix; no process left.

Those that are told before Ray starts are met in the test's own process, which has the imports.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import ray

from recipes import grpo_gsm8k
from recipes import quickstart as quickstart_recipe
from tests.e2e.job import SMALL_QUICKSTART, quickstart, run


@dataclass
class Starts:
    """Recipes' main functions, called here as the command line calls them."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    runs: Path

    def quickstart(self, *arguments: str) -> tuple[int, str]:
        """The exit code, and what it prints."""
        return self.of(quickstart_recipe, *SMALL_QUICKSTART, *arguments)

    def of(self, recipe: ModuleType, *arguments: str) -> tuple[int, str]:
        given = [f"{recipe.__name__}.py", "--runs-dir", str(self.runs), *arguments]
        self.monkeypatch.setattr(sys, "argv", given)
        with pytest.raises(SystemExit) as ended:
            recipe.main()
        assert isinstance(ended.value.code, int)
        assert not ray.is_initialized()
        return ended.value.code, "".join(self.capsys.readouterr())


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Starts:
    return Starts(monkeypatch, capsys, tmp_path / "runs")


def dataset(directory: Path, num_rows: int, question: str = "How much is 1 + 1?") -> Path:
    path = directory / "data.jsonl"
    row = json.dumps({"question": question, "answer": "#### 2"})
    path.write_text(f"{row}\n" * num_rows)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--group-size", "1"],
            "group_size=1 makes every advantage of grpo_advantage zero; use group_size",
        ),
        (["--trainer.learning-rat", "1"], "learning-rate"),
        (["--num-steps", "1.5"], "--num-steps='1.5': "),
        (["--trainer.layout", "dp3"], "prompts_per_step=4: "),
        (["--trainer.layout", "dp1,dp2"], "trainer.layout='dp1,dp2': "),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--rollout.tensor-parallel", "2"], "rollout.tensor_parallel=2: "),
        (
            ["--rollout.engine=vllm", "--rollout.tensor-parallel=4", "--rollout.num-gpus=2"],
            "rollout.tensor_parallel=4: a replica has only rollout.num_gpus=2",
        ),
        (["--warm-start-batch", "0"], "warm_start_batch=0 teaches nothing; use at least 1"),
        (["--cluster.store-gib", "inf"], "cluster.store_gib=inf: "),
        (["--seed", str(2**64)], "seed=18446744073709551616: "),
        (["--trainer.learning-rate", "1e30"], "trainer.learning_rate=1e+30: "),
        (["--sampling.temperature", "inf"], "sampling.temperature=inf: "),
        (["--runs-dir", ""], "runs_dir='': "),
    ],
)
def test_a_wrong_option_ends_with_code_2(arguments: list[str], message: str, start: Starts) -> None:
    code, output = start.quickstart(*arguments)
    assert code == 2
    assert message in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.path", "no/where"], "model.path='no/where' holds no model"),
        (["--prompts-per-step", "10000"], "has only 8192 prompts that can be used"),
        (["--data.max-prompt-tokens", "3"], "max_prompt_tokens"),
        (["--data.source", "mine.jsonl"], "data.source='mine.jsonl' would not be read"),
        (["--sampling.max-tokens", "4096"], "leaves no room for a prompt"),
        (["--runs-dir", "/proc/runs"], "/proc/runs"),
        (["--runs-dir", "LICENSE"], "runs_dir='LICENSE': LICENSE is a file; give a directory"),
        (["--resume"], "nothing to resume"),
        (["--trainer.layout", "dp1tp3"], "trainer.layout='dp1tp3': tp = 3 does not divide"),
        (["--trainer.layout", "pp3"], "pp = 3 does not divide num_hidden_layers=4"),
        (["--trainer.layout", "ep2"], "trainer.layout='ep2': this model has no experts"),
        (["--trainer.layout", "dp4,dp1tp3"], "trainer.layout='dp1tp3': tp = 3 does not divide"),
        (["--rollout.engine=vllm", "--rollout.tensor-parallel=3"], "rollout.tensor_parallel=3: "),
    ],
)
def test_what_cannot_work_is_told_before_anything_waits(
    arguments: list[str], message: str, start: Starts
) -> None:
    code, output = start.quickstart("--model.path", "", *arguments)
    assert code == 1
    assert message in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.layout", "dp2", "--trainer.num-cpus", "64"], "the run needs 129 CPUs"),
        pytest.param(["--rollout.num-gpus", "8"], "GPU", marks=pytest.mark.slow),
    ],
)
def test_what_no_node_has_is_told_before_anything_waits(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    job = quickstart(tmp_path, *arguments)
    assert job.returncode == 1
    assert message in job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    ("num_rows", "message"),
    [
        (None, "is no file"),
        (0, "is an empty file"),
        (3, "prompts_per_step=4, but"),
    ],
)
def test_a_dataset_that_is_missing_empty_or_too_small(
    num_rows: int | None, message: str, tmp_path: Path, start: Starts
) -> None:
    path = tmp_path / "data.jsonl"
    if num_rows is not None:
        dataset(tmp_path, num_rows)
    code, output = start.of(grpo_gsm8k, "--data.source", str(path), "--prompts-per-step", "4")
    assert code == 1
    assert message in output


def test_a_prompt_longer_than_the_context(tmp_path: Path, start: Starts) -> None:
    path = dataset(tmp_path, 8, question="word " * 1000)
    code, output = start.of(grpo_gsm8k, "--data.source", str(path), "--prompts-per-step", "4")
    assert code == 1
    assert "data.max_prompt_tokens" in output


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ppo", "distill"])
def test_no_other_model_is_trained_before_a_mistake_is_told(recipe: str, tmp_path: Path) -> None:
    options = ["--data.source", "mine.jsonl", "--runs-dir", str(tmp_path)]
    job = run(f"recipes/{recipe}.py", options, tmp_path)
    assert job.returncode == 1
    assert job.output.startswith("error: data.source='mine.jsonl' would not be read")


@pytest.mark.slow
def test_pairs_of_ones_own_are_what_dpo_learns(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "completions": ["2", "3"]}) + "\n")
    options = ["--data.source", str(path), "--dry-run", "--runs-dir", str(tmp_path)]
    job = run("recipes/dpo.py", [*options, "--prompts-per-step", "1"], tmp_path)
    assert job.returncode == 0
    assert "data: 1 prompts, each with completions beside it" in job.output


@pytest.mark.slow
def test_a_critics_layout_is_checked_as_the_policys_is(tmp_path: Path) -> None:
    options = ["--critic.trainer.layout", "tp3", "--dry-run", "--runs-dir", str(tmp_path)]
    job = run("recipes/ppo.py", options, tmp_path)
    assert job.returncode == 1
    assert "critic.trainer.layout='tp3': tp = 3 does not divide" in job.output


def test_a_directory_that_holds_a_run(start: Starts) -> None:
    directory = start.runs / "quickstart"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    code, output = start.quickstart()
    assert code == 1
    assert "two runs never share a directory" in output


def test_dry_run_prints_configuration_graph_placement_memory_and_prompt(tmp_path: Path) -> None:
    job = quickstart(tmp_path, "--dry-run")
    assert job.returncode == 0
    for text in ("learning_rate", "generate", "advantage", "rollout-0 (1 CPU)", "MiB"):
        assert text in job.output
    assert "8,192 prompts, each with answer beside it; the first one has 5 tokens:" in job.output
    assert not (tmp_path / "runs").exists()
    # What it prints is a file for --config.
    (tmp_path / "run.toml").write_text(job.output)
    again = quickstart(tmp_path, "--config", str(tmp_path / "run.toml"), "--dry-run")
    assert without_progress(again.output) == without_progress(job.output)


def without_progress(output: str) -> str:
    """Less the lines on standard error that a slow machine gets."""
    return "".join(line for line in output.splitlines(True) if not line.endswith(" so far\n"))
