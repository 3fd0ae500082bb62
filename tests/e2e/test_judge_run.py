"""A run that learns from a judge: from sampled tokens to its text, and back to the step."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.run.factories import JudgeFactory
from rlsys.config import FrozenModelConfig, JudgeConfig, RunConfig
from rlsys.data.prompts import load_tokenizer
from rlsys.dataflow.graph.stages import JudgeStage
from rlsys.dataflow.scheduling.ledger import read_events
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from rlsys.types import FinishReason, Rollout
from tests.e2e.job import ROOT, SMALL_QUICKSTART, run

RECIPE = """
import sys
sys.path.insert(0, {root!r})
from dataclasses import dataclass, field
import rlsys
from recipes.arithmetic import MODEL, problems
from recipes.quickstart import QuickstartConfig
from rlsys.algorithms import cispo, dr_grpo_advantage, token_mean

@dataclass(frozen=True, kw_only=True)
class Config(QuickstartConfig):
    judge: rlsys.JudgeConfig = field(default_factory=rlsys.JudgeConfig)

def ask(rollout):
    if int(rollout.metadata["answer"]) % 3 == 0:
        raise LookupError("no threes")
    text = f"Is {{rollout.prompt_text}}{{rollout.completion_text}} right?"
    return [{{"role": "user", "content": text}}]

def parse(reply):
    return sum(map(ord, reply)) / 1000

def judged(cfg):
    flow = rlsys.Dataflow()
    policy, judge = flow.model("policy"), flow.model("judge", cfg.judge)
    prompts = rlsys.Prompts(config=cfg.data, rows=problems(cfg))
    rollouts = flow.generate(policy, prompts, group_size=cfg.group_size)
    score = flow.judge(judge, rollouts, ask=ask, parse=parse, max_tokens=8, temperature=1.0)
    advantages = flow.per_group(dr_grpo_advantage, score)
    flow.train(policy, rollouts, advantages, loss=cispo(5.0), aggregation=token_mean)
    return flow

if __name__ == "__main__":
    cfg = rlsys.parse(Config).config
    rlsys.launch(cfg, judged(cfg), own_model=MODEL)
"""


@pytest.mark.slow
def test_a_judge_with_another_vocabulary_scores_the_trained_rollouts(tmp_path: Path) -> None:
    script, model = tmp_path / "recipe.py", tmp_path / "judge"
    script.write_text(RECIPE.format(root=str(ROOT)))
    build_tiny_model(model, width=32, num_layers=2, max_context=256)
    options = [*SMALL_QUICKSTART, "--num-steps", "2"]
    where = ["--runs-dir", str(tmp_path / "runs"), "--judge.model.path", str(model)]
    job = run(str(script), [*options, *where], tmp_path)
    assert job.returncode == 0, job.output
    assert "'score'" in job.output
    assert "LookupError" in job.output

    directory = tmp_path / "runs" / "quickstart"
    evidence, damages = read_evidence(directory)
    verdict = audit(evidence)
    assert [*damages, *verdict.faults] == []
    assert verdict.finished
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["score/mean"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert lines[-1]["rollouts/dropped/reward exception"] > 0
    reasons = {e["reason"] for e in read_events(directory / "ledger.jsonl") if "reason" in e}
    assert "reward exception" in reasons

    with (directory / "rollouts.jsonl").open() as file:
        records = [json.loads(line) for line in file]
    assert records
    assert not [one for one in records if int(one["row"]["answer"]) % 3 == 0]
    config = json.loads((directory / "config.json").read_text())
    scores = judged_again(script, model, records, seed=config["config"]["seed"])
    assert [one["columns"]["score"] for one in records] == scores


def judged_again(
    script: Path, model: Path, records: list[dict[str, Any]], *, seed: int
) -> list[Any]:
    """Return the scores of the same judge, computed in this process at once."""
    spec = importlib.util.spec_from_file_location("judged_recipe", script)
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipe  # dataclasses look up annotations there
    spec.loader.exec_module(recipe)
    role = JudgeConfig(model=FrozenModelConfig(path=str(model)))
    stage = recipe.judged(recipe.Config(judge=role)).stage(JudgeStage)
    tokenizer = load_tokenizer(str(model))
    judge = JudgeFactory(
        config=RunConfig(seed=seed), stage=stage, path=str(model), tokenizer=tokenizer
    )().engine
    rollouts = [
        Rollout(
            group_id=one["group_id"],
            index=one["index"],
            prompt_text=one["prompt"],
            completion_text=one["completion"],
            prompt_token_ids=np.empty(0, np.int32),
            token_ids=np.array(one["token_ids"], np.int32),
            finish_reason=FinishReason(one["finish_reason"]),
            metadata=one["row"],
        )
        for one in records
    ]
    try:
        return judge.judge(rollouts)
    finally:
        judge.close()
