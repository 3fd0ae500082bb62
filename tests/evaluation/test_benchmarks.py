"""Benchmarks by lm-eval, on a tiny model and a local task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsys.config import DataConfig, FrozenModelConfig
from rlsys.evaluation.benchmarks import BenchmarkScore, evaluate_tasks, scores_of
from rlsys.evaluation.model_evaluation import EvaluationConfig
from tests.errors import invalid

TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["a", "b", "c"]
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def test_metrics_are_read_with_their_filters_and_errors() -> None:
    found = {
        "results": {
            "gsm8k": {
                "alias": "gsm8k",
                "exact_match,strict-match": 0.5,
                "exact_match_stderr,strict-match": 0.1,
                "sample_len": 12,
            },
            "mmlu": {"acc,none": 0.25, "acc_stderr,none": "N/A"},
        },
        "n-samples": {"gsm8k": {"original": 1319, "effective": 20}},
    }
    assert scores_of(found) == [
        BenchmarkScore(
            task="gsm8k",
            metric="exact_match",
            answer_filter="strict-match",
            value=0.5,
            stderr=0.1,
            num_samples=20,
        ),
        BenchmarkScore(
            task="mmlu",
            metric="acc",
            answer_filter="",
            value=0.25,
            stderr=None,
            num_samples=None,
        ),
    ]


@pytest.mark.parametrize(
    "other", [{"rewards": ("numeric_answer",)}, {"environment": "game.py:game"}]
)
def test_tasks_bring_their_own_scores(other: dict[str, Any]) -> None:
    with invalid("tasks"):
        EvaluationConfig(model=FrozenModelConfig(path="x"), tasks=("gsm8k",), **other)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    config = EvaluationConfig(model=FrozenModelConfig(path="x"), tasks=("gsm8k",))
    with invalid("tasks"):
        evaluate_tasks(config)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (rlsys[benchmarks])")
    from rlsys.launcher.tiny_models import build_tiny_model

    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(path, seed=3)
    return path


@pytest.fixture(scope="module")
def task(model: Path) -> Path:
    rows = [{"question": f"{n} and {n * n}: ", "answer": n % 3} for n in range(24)]
    data = model.parent / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = model.parent / "letters.yaml"
    path.write_text(TASK.format(data=data))
    return path


def accuracy(model: Path, rows: list[dict[str, Any]]) -> float:
    """Return the share of rows whose answer is the most likely of the three letters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc"]
    right = 0
    for row in rows:
        tokens = torch.tensor([tokenizer.encode(row["question"], add_special_tokens=False)])
        with torch.no_grad():
            logits = network(tokens).logits[0, -1, letters]
        right += int(logits.argmax()) == row["answer"]
    return right / len(rows)


@pytest.mark.slow
def test_the_command_evaluates_a_local_task(model: Path, task: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlsys", "evaluate", str(model), "--tasks", str(task)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (score,) = report["scores"]
    assert (score["task"], score["metric"], score["num_samples"]) == ("letters", "acc", 24)
    rows = [json.loads(line) for line in (task.parent / "rows.jsonl").read_text().splitlines()]
    assert score["value"] == pytest.approx(accuracy(model, rows))


@pytest.mark.slow
def test_a_limit_and_an_unknown_task(model: Path, task: Path) -> None:
    path = FrozenModelConfig(path=str(model))
    limited = EvaluationConfig(model=path, tasks=(str(task),), num_prompts=6)
    report = json.loads(evaluate_tasks(limited).splitlines()[-1])
    assert report["scores"][0]["num_samples"] == 6
    for name in ("gsm9k", "missing.yaml"):
        with invalid("tasks", name):
            evaluate_tasks(EvaluationConfig(model=path, tasks=(name,)))
    assert "gsm8k" in evaluate_tasks(
        EvaluationConfig(model=path, tasks=("gsm8k",), data=DataConfig(split="test")),
        only_check=True,
    )
