"""A run whose rollouts are an agent's requests to the endpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.e2e.job import run


@pytest.mark.slow  # tests/environments/test_endpoint.py covers the parts
def test_an_agent_behind_the_endpoint_is_trained(tmp_path: Path) -> None:
    options = ["--num-steps", "2", "--prompts-per-step", "9", "--observe.record-groups", "9"]
    job = run("recipes/agent.py", [*options, "--runs-dir", str(tmp_path / "runs")], tmp_path)
    assert job.returncode == 0, job.output
    directory = tmp_path / "runs" / "agent"
    evidence, damages = read_evidence(directory)
    verdict = audit(evidence)
    assert [*damages, *verdict.faults] == []
    assert verdict.finished
    assert [line["step"] for line in read_metrics(directory / "metrics.jsonl")] == [1, 2]

    records = [json.loads(line) for line in (directory / "rollouts.jsonl").open()]
    assert len(records) == 2 * 9 * 16
    for one in records:
        turns = one["turns"]
        roles = [turn["role"] for turn in turns]
        assert roles in (["user", "assistant"], ["user", "assistant"] * 2)
        assert [turn["sampled"] for turn in turns] == [role == "assistant" for role in roles]
        assert {turn["branch"] for turn in turns} == {0}
        assert one["prompt"] == turns[0]["text"] == "?"
        text = "".join(turn["text"] for turn in turns[1:])
        assert one["completion"] == re.sub("(<eos>|<pad>)*$", "", text)
        # The hint is the one token that the policy has not sampled.
        injected = [
            token
            for token, version in zip(one["token_ids"], one["policy_versions"], strict=True)
            if version < 0
        ]
        assert len(injected) == len(turns) // 2 - 1
        replies = [turn["text"].removesuffix("<eos>") for turn in turns if turn["sampled"]]
        assert one["reward"] == float(replies[-1] == str(one["row"]["number"]))
