"""A run whose trainer loses a node and gets another one: fewer ranks, then all again.

A rank takes 2 CPUs. The head has 3, with the replica, and the second node has 2, so each has a
rank. Both have a copy of the state.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlsys.runs.audit import audit
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.run_history import read_evidence
from tests.clusters import NODE_OPTIONS, cluster_of_one
from tests.e2e.job import SMALL_QUICKSTART, start

NUM_STEPS = 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_node_is_lost_and_another_joins(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "quickstart"
    with cluster_of_one(num_cpus=3) as cluster:
        second = cluster.add_node(num_cpus=2, **NODE_OPTIONS)
        options = ["--trainer.layout", "dp2x1,dp1", "--trainer.num-cpus", "2"]
        options += ["--runs-dir", str(tmp_path / "runs"), "--cluster.address", cluster.address]
        options += ["--num-steps", str(NUM_STEPS), "--checkpoint-every", "10000"]
        job = start("recipes/quickstart.py", [*SMALL_QUICKSTART, *options], tmp_path)
        try:
            job.wait_for_step(directory, 3)
            cluster.remove_node(second, allow_graceful=False)
            job.wait_for_output("policy changed its layout from dp2x1 to dp1; ")
            done = job.wait_for_step(directory, 3)
            job.wait_for_step(directory, done + 3)
            cluster.add_node(num_cpus=2, **NODE_OPTIONS)
            job.wait_for_output("policy changed its layout from dp1 to dp2x1; ")
            assert job.wait() == 0, job.output
        finally:
            job.end()
    assert "there are places for more ranks of policy" in job.output
    printed = [int(step) for step in re.findall(r"^ *(\d+)/300 ", job.output, re.MULTILINE)]
    # Both states came from memory, so no step was repeated.
    assert printed == [*range(1, NUM_STEPS + 1)]
    assert "Traceback" not in job.output
    lines = read_metrics(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, NUM_STEPS + 1)]
    evidence, damages = read_evidence(directory)
    assert [*damages, *audit(evidence).faults] == []
