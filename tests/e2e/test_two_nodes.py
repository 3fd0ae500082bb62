"""A run over two Ray nodes of this machine: the trainer on one, the replica on the other.

The head has 1 CPU, the second node 2, and the replica needs 2: only one placement exists.
"""

from __future__ import annotations

import re
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.cluster_checks import connected
from rlsys.config import ClusterConfig
from rlsys.runs.observe.metrics_file import read_metrics
from tests.clusters import NODE_OPTIONS, cluster_of_one
from tests.e2e.job import MARK, PATIENCE_S, SMALL_QUICKSTART, Job, marked_processes, start
from tests.errors import invalid


@dataclass(kw_only=True)
class TwoNodes:
    cluster: Any
    second: Any  # the node with 2 CPUs
    mark: str  # in the environment of the processes of both nodes, including actors

    def start_job(self, directory: Path, *arguments: str) -> Job:
        where = ["--runs-dir", str(directory / "runs"), "--cluster.address", self.cluster.address]
        arguments = (*SMALL_QUICKSTART, "--rollout.num-cpus", "2", *where, *arguments)
        return start("recipes/quickstart.py", arguments, directory)

    def actors(self) -> dict[str, int]:
        """Return the class of each actor of a job with the process id of its node's raylet."""
        found = {}
        for pid, command in marked_processes(self.mark).items():
            if actor := re.match(r"ray::(\w+(?:Actor|Shard))\b", command):
                found[actor[1]] = _parent(pid)
        return found

    @property
    def second_raylet(self) -> int:
        raylet: int = self.second.all_processes["raylet"][0].process.pid
        return raylet


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1  # gone


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        with cluster_of_one(num_cpus=1) as cluster:
            second = cluster.add_node(num_cpus=2, **NODE_OPTIONS)
            yield TwoNodes(cluster=cluster, second=second, mark=mark)


def wait_until(holds: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, job.output
        time.sleep(0.1)  # other processes give no notice


def test_trainer_and_replica_on_different_nodes(two_nodes: TwoNodes, tmp_path: Path) -> None:
    job = two_nodes.start_job(tmp_path)
    try:
        wait_until(lambda: {"TrainerActor", "RolloutActor"} <= two_nodes.actors().keys(), job)
        nodes = two_nodes.actors()
        assert nodes["RolloutActor"] == two_nodes.second_raylet
        assert nodes["TrainerActor"] not in (two_nodes.second_raylet, -1)
        assert job.wait() == 0, job.output
        wait_until(lambda: not two_nodes.actors(), job)
    finally:
        job.end()
    lines = read_metrics(tmp_path / "runs" / "quickstart" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    # The replica samples with the trainer's weights, and the trainer reads its rollouts.
    assert abs(lines[0]["kl/sampler_trainer"]) <= 1e-6
    assert max(line["staleness/max"] for line in lines) == 1
    assert (tmp_path / "runs" / "quickstart" / "hf" / "config.json").is_file()


def test_an_address_without_a_listener_is_rejected_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with invalid("cluster.address", address), connected(ClusterConfig(address=address)):
            pass


@pytest.mark.slow
def test_the_error_of_a_cluster_that_is_too_small_names_what_it_lacks(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    job = two_nodes.start_job(tmp_path, "--trainer.layout", "dp2")
    try:
        assert job.wait() == 1
    finally:
        job.end()
    assert "4 CPUs (2 x trainer (1 CPU), rollout-0 (2 CPU))" in job.output
    assert "2 node(s)" in job.output
    assert "Lower trainer.layout" in job.output
    assert "Traceback" not in job.output


@pytest.mark.slow
def test_room_held_by_another_run_and_a_node_that_is_replaced(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    # One test for both, because starting a run takes long. It must be the last test of the module,
    # because it removes the second node.
    first = two_nodes.start_job(tmp_path, "--num-steps", "100000", "--name", "first")
    directory = tmp_path / "runs" / "first"
    try:
        first.wait_for_output("Starting rollout-0")
        second = two_nodes.start_job(tmp_path, "--cluster.start-timeout-s", "2", "--name", "second")
        try:
            assert second.wait() == 1
        finally:
            second.end()
        assert "2 s (cluster.start_timeout_s)" in second.output

        first.wait_for_step(directory, 2)
        two_nodes.cluster.remove_node(two_nodes.second, allow_graceful=False)
        first.wait_for_output("warning: rollout-0 died")
        done = first.wait_for_step(directory, 2, timeout_s=1)
        two_nodes.cluster.add_node(num_cpus=2, **NODE_OPTIONS)
        # Steps with rollouts of a new replica, not the last ones of the old replica.
        first.wait_for_step(directory, done + 5)
        first.process.send_signal(signal.SIGINT)
        assert first.wait() == 130, first.output
        assert "Traceback" not in first.output
        wait_until(lambda: not two_nodes.actors(), first)
    finally:
        first.end()
