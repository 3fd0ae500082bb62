"""A run that trains the head of speculation along with the policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from rlsys.engines.models.eagle_head import HeadWeights
from rlsys.engines.training.draft_training import SAVED_AS
from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import quickstart

OPTIONS = (
    "--rollout.engine vllm --rollout.kv-cache-gib 0.25 --rollout.speculation.method eagle3 "
    "--rollout.speculation.trained-along true --rollout.speculation.learning-rate 0.003 "
    "--rollout.speculation.num-tokens 2 --warm-start-steps 30 --warm-start-batch 32 "
    "--prompts-per-step 8 --observe.trace true --observe.record-groups 8 --resume auto "
    "--checkpoint-every 4"
)


@pytest.mark.slow
def test_a_trained_head_is_accepted_more_often(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "quickstart"
    for num_steps in ("8", "12"):
        job = quickstart(tmp_path, *OPTIONS.split(), "--num-steps", num_steps)
        assert job.returncode == 0, job.output
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 13))
    acceptance = [
        next(v for name, v in line.items() if name.startswith("engine/draft_acceptance/"))
        for line in lines
        if any(name.startswith("engine/draft_acceptance/") for name in line)
    ]
    assert acceptance[-1] > acceptance[0]
    assert lines[-1]["draft/loss"] < lines[0]["draft/loss"]
    assert lines[-1]["draft/agreement"] > lines[0]["draft/agreement"]
    assert abs(lines[0]["kl/sampler_trainer"]) < 1e-5  # later rollouts are staler
    records = [json.loads(line) for line in (directory / "rollouts.jsonl").open()]
    for record in records:
        versions = record["policy_versions"]
        assert versions == sorted(versions)
        assert all(record["step"] - 2 <= version < record["step"] for version in versions)
    evidence, unreadable = read_evidence(directory)
    assert [*unreadable, *audit(evidence).faults] == []
    policy = AutoConfig.from_pretrained(directory / "hf")
    head = HeadWeights.read(str(directory / "hf" / SAVED_AS), policy)
    assert head.sizes.width == policy.hidden_size
