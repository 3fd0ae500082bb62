"""Mistakes of the user: one clear message with the option, the value and the fix; no process left.

Mistakes that are found before Ray starts are tested in the test's own process, which has the
imports.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import ray

from recipes import grpo_gsm8k
from recipes import quickstart as quickstart_recipe
from tests.e2e.job import SMALL_QUICKSTART, quickstart, run
from tests.tiers import rest_slow


@dataclass
class Starts:
    """Main functions of recipes, called as the command line calls them."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    runs: Path

    def quickstart(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and the output."""
        return self.of(quickstart_recipe, *SMALL_QUICKSTART, *arguments)

    def of(self, recipe: ModuleType, *arguments: str) -> tuple[int, str]:
        argv = [f"{recipe.__name__}.py", "--runs-dir", str(self.runs), *arguments]
        self.monkeypatch.setattr(sys, "argv", argv)
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


def assert_words(words: str, output: str) -> None:
    """Assert that an error message contains all words; options may be written in either form."""
    for word in words.split():
        assert word in output.replace("-", "_"), output


def dataset(directory: Path, num_rows: int, question: str = "How much is 1 + 1?") -> Path:
    path = directory / "data.jsonl"
    row = json.dumps({"question": question, "answer": "#### 2"})
    path.write_text(f"{row}\n" * num_rows)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer.learning-rat", "1"], "learning_rate"),
        (["--num-steps", "1.5"], "num_steps 1.5"),
        (["--trainer.layout", "dp3"], "prompts_per_step 4"),
        (["--trainer.layout", "dp1,dp2"], "dp1,dp2"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--rollout.tensor-parallel", "2"], "rollout.tensor_parallel 2 vllm"),
        (
            ["--rollout.engine=vllm", "--rollout.tensor-parallel=4", "--rollout.num-gpus=2"],
            "rollout.tensor_parallel 4 rollout.num_gpus 2",
        ),
        (["--warm-start-batch", "0"], "warm_start_batch 0 1"),
        (["--cluster.store-gib", "inf"], "cluster.store_gib inf"),
        (["--seed", str(2**64)], "seed 18446744073709551616"),
        (["--trainer.learning-rate", "1e30"], "trainer.learning_rate 1e+30"),
        (["--sampling.temperature", "inf"], "sampling.temperature inf"),
        (["--runs-dir", ""], "runs_dir"),
    ],
)
def test_a_wrong_option_ends_with_code_2(arguments: list[str], words: str, start: Starts) -> None:
    code, output = start.quickstart(*arguments)
    assert code == 2
    assert_words(words, output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    rest_slow(
        [
            (["--group-size", "1"], "group_size 1 grpo_advantage"),
            (["--model.path", "no/where"], "model.path no/where"),
            (["--prompts-per-step", "10000"], "8192"),
            (["--data.max-prompt-tokens", "3"], "max_prompt_tokens"),
            (["--data.source", "mine.jsonl"], "data.source mine.jsonl"),
            (["--sampling.max-tokens", "4096"], "sampling.max_tokens 4096"),
            (["--runs-dir", "/proc/runs"], "/proc/runs"),
            (["--runs-dir", "LICENSE"], "runs_dir LICENSE"),
            (["--resume"], "resume"),
            (["--trainer.layout", "dp1tp3"], "trainer.layout dp1tp3"),
            (["--trainer.layout", "pp3"], "trainer.layout pp3 num_hidden_layers"),
            (["--trainer.layout", "ep2"], "trainer.layout ep2 experts"),
            (["--trainer.layout", "dp4,dp1tp3"], "trainer.layout dp1tp3"),
            (["--rollout.engine=vllm", "--rollout.tensor-parallel=3"], "tensor_parallel 3"),
        ],
        first=8,
    ),
)
def test_settings_that_cannot_work_are_an_error_before_ray_starts(
    arguments: list[str], words: str, start: Starts
) -> None:
    code, output = start.quickstart("--model.path", "", *arguments)
    assert code == 1
    assert_words(words, output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trainer.layout", "dp2", "--trainer.num-cpus", "64"], "129 CPUs"),
        pytest.param(["--rollout.num-gpus", "8"], "GPU", marks=pytest.mark.slow),
    ],
)
def test_resources_that_no_node_has_are_an_error_at_the_start(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    job = quickstart(tmp_path, *arguments)
    assert job.returncode == 1
    assert_words(words, job.output)
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    ("num_rows", "words"), [(None, "data.jsonl"), (0, "data.jsonl"), (3, "prompts_per_step 4 3")]
)
def test_a_dataset_that_is_missing_empty_or_too_small(
    num_rows: int | None, words: str, tmp_path: Path, start: Starts
) -> None:
    path = tmp_path / "data.jsonl"
    if num_rows is not None:
        dataset(tmp_path, num_rows)
    code, output = start.of(grpo_gsm8k, "--data.source", str(path), "--prompts-per-step", "4")
    assert code == 1
    assert_words(words, output)


def test_a_prompt_longer_than_the_context(tmp_path: Path, start: Starts) -> None:
    path = dataset(tmp_path, 8, question="word " * 1000)
    code, output = start.of(grpo_gsm8k, "--data.source", str(path), "--prompts-per-step", "4")
    assert code == 1
    assert "data.max_prompt_tokens" in output


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ppo", "distill"])
def test_no_other_model_is_trained_before_a_mistake_is_found(recipe: str, tmp_path: Path) -> None:
    options = ["--data.source", "mine.jsonl", "--runs-dir", str(tmp_path)]
    job = run(f"recipes/{recipe}.py", options, tmp_path)
    assert job.returncode == 1
    assert job.output.startswith("error: data.source='mine.jsonl'")


@pytest.mark.slow
def test_dpo_learns_from_pairs_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "completions": ["2", "3"]}) + "\n")
    options = ["--data.source", str(path), "--dry-run", "--runs-dir", str(tmp_path)]
    job = run("recipes/dpo.py", [*options, "--prompts-per-step", "1"], tmp_path)
    assert job.returncode == 0
    assert "# data: 1 prompt " in job.output
    assert "completions" in job.output


@pytest.mark.slow
def test_a_critics_layout_is_checked_like_the_policys(tmp_path: Path) -> None:
    options = ["--critic.trainer.layout", "tp3", "--dry-run", "--runs-dir", str(tmp_path)]
    job = run("recipes/ppo.py", options, tmp_path)
    assert job.returncode == 1
    assert "critic.trainer.layout='tp3'" in job.output


def test_a_directory_that_holds_a_run(start: Starts) -> None:
    directory = start.runs / "quickstart"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    code, output = start.quickstart()
    assert code == 1
    assert_words("quickstart", output)


@pytest.mark.slow
def test_dry_run_prints_configuration_graph_placement_memory_and_prompt(tmp_path: Path) -> None:
    job = quickstart(tmp_path, "--dry-run")
    assert job.returncode == 0
    for text in ("learning_rate", "generate", "advantage", "rollout-0 (1 CPU)", "MiB"):
        assert text in job.output
    assert re.search(r"# data: 8,192 prompts .*\banswer\b.* 5 tokens:", job.output)
    assert not (tmp_path / "runs").exists()
    # The output is a file for --config.
    (tmp_path / "run.toml").write_text(job.output)
    again = quickstart(tmp_path, "--config", str(tmp_path / "run.toml"), "--dry-run")
    assert without_progress(again.output) == without_progress(job.output)


def without_progress(output: str) -> str:
    """Remove the progress lines that a slow machine prints on standard error."""
    return "".join(line for line in output.splitlines(True) if not line.endswith(" so far\n"))
