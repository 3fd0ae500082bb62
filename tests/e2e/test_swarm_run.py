"""Nodes that share rollouts: two at once, and one that is killed and resumed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsys.data.swarm.external_log import read_external
from rlsys.dataflow.scheduling.ledger import read_events
from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.data.test_peers import records, written
from tests.e2e.job import run, start

pytestmark = pytest.mark.timeout(2400)

SMALL = shlex.split(
    "--warm-start-steps 60 --warm-start-batch 64 --prompts-per-step 8 --external-groups 4 "
    "--group-size 4"
)


def faults(directory: Path) -> list[str]:
    evidence, unreadable = read_evidence(directory)
    return [*unreadable, *audit(evidence).faults]


def rollouts(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "rollouts.jsonl").open()]


@pytest.mark.slow
def test_two_nodes_share_their_rollouts(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    options = [*SMALL, "--num-steps", "12", "--runs-dir", str(runs), "--num-nodes", "2"]
    job = run("recipes/swarm.py", options, tmp_path, timeout_s=1500)
    logs = "".join(log.read_text() for log in runs.glob("*.log"))
    assert job.returncode == 0, job.output + logs
    assert "all: cumulative reward" in job.output
    sharing = 0
    for own, peer in (("swarm-0", "swarm-1"), ("swarm-1", "swarm-0")):
        assert faults(runs / own) == []
        external = [one for one in rollouts(runs / own) if one["shared_by"]]
        sharing += len(external) > 0
        theirs = {(one["prompt"], one["completion"]) for one in rollouts(runs / peer)}
        assert all(one["shared_by"] == peer for one in external)
        assert {(one["prompt"], one["completion"]) for one in external} <= theirs
        for line in read_metrics(runs / own / "metrics.jsonl"):
            assert 0 <= line.get("groups/external_frac", 0) <= 0.5
            assert abs(line["kl/sampler_trainer"]) < 0.5
    assert sharing  # both share, unless one had ended before the other started


@pytest.mark.slow
def test_a_killed_node_reuses_its_external_groups(tmp_path: Path) -> None:
    # The peer, here only a growing file, is gone by then, and replaced by a backup of the node
    # itself. The vocabulary of the node's model cannot express half of the peer's groups.
    runs, directory = tmp_path / "runs", tmp_path / "runs" / "node"
    runs.mkdir()
    peer = written(runs / "peer")
    options = [*SMALL, "--name", "node", "--peers", "peer", "--runs-dir", str(runs)]
    options += ["--checkpoint-every", "2", "--num-steps", "12"]
    job = start("recipes/swarm.py", options, tmp_path)
    try:
        for step in range(1, 6):
            for number in range(8 * step, 8 * step + 8):
                offered = records(step, number, size=4, prompt="2+2=")
                if number % 2:
                    offered = [replace(one, completion=f"{number}") for one in offered]
                peer.write(offered)
            job.wait_for_step(directory, step, 600)
        job.wait_for_checkpoint(directory)
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait(300)
        assert job.left_behind() == {}
    finally:
        job.end()
        peer.close()
    before = read_external(directory / "external.jsonl")
    assert any(before.values())
    assert all(group is None or group.group_id % 2 for group in before.values())
    shutil.rmtree(runs / "peer")
    shutil.copytree(directory, runs / "peer")
    sampled = [one for one in rollouts(directory) if not one["shared_by"]]
    (run_id,) = {one["run_id"] for one in sampled}
    assert len({one["reward"] for one in sampled}) > 1

    job = run("recipes/swarm.py", [*options, "--resume"], tmp_path, timeout_s=900)
    assert job.returncode == 0, job.output
    assert faults(directory) == []
    assert {one["run_id"] for one in rollouts(directory)} == {run_id}
    after = read_external(directory / "external.jsonl")
    assert {index: after[index] for index in before} == before
    assert not any(group for index, group in after.items() if index not in before)
    events = read_events(directory / "ledger.jsonl")
    prompts = {event["group"]: event["prompt"] for event in events if event["event"] == "issued"}
    (resumed_at,) = [event["step"] for event in events if event["event"] == "resumed"]
    num_found_again = 0
    for one in rollouts(directory):
        group = after.get(prompts[one["group_id"]])
        assert one["shared_by"] == ("" if group is None else "peer")
        if group is not None:
            assert one["completion"] == group.completions[one["index"]].text
            num_found_again += one["step"] > resumed_at
    assert num_found_again > 0
