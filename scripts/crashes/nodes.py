"""A Ray cluster of two nodes on this machine, whose second node may die and be replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from scripts.crashes.processes import MARK, Process, below

STORE_BYTES = 80 * 2**20

# On a busy machine, Ray's default of five times ten seconds declares a starved node dead, and its
# workers of low priority may get no CPU for minutes.
PATIENCE = {"health_check_timeout_ms": 20_000, "worker_niceness": 0}


class TwoNodes:
    """Two Ray nodes, with `mark` in the environment of all their processes."""

    def __init__(self, cluster: Any, mark: str, options: Mapping[str, Any]) -> None:
        self._cluster = cluster
        self._mark = mark
        self._options = options
        self._second = cluster.add_node(**options)
        self._lost: list[Process] = []

    @property
    def address(self) -> str:
        """Return the address of the cluster."""
        return str(self._cluster.address)

    def second(self) -> list[Process]:
        """Return all processes of the second node."""
        return [
            process
            for started in self._second.all_processes.values()
            for info in started
            for process in below(info.process.pid, self._mark)
        ]

    def lose_second(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the second node.

        SIGKILL acts like a loss of power, SIGSTOP like a loss of the network.
        """
        victims = self.second()
        self._lost += victims
        for victim in victims:
            victim.send(number)
        self._cluster.worker_nodes.discard(self._second)

    def end_lost(self) -> None:
        """Kill the processes of stopped nodes."""
        for process in self._lost:
            process.send(signal.SIGKILL)

    def add(self) -> None:
        """Start another second node."""
        self._second = self._cluster.add_node(wait=False, **self._options)


@contextmanager
def two_nodes(mark: str, directory: Path, *, store_bytes: int = STORE_BYTES) -> Iterator[TwoNodes]:
    """Yield a cluster whose files are in `directory`.

    Keep the path short: paths of sockets below it may have 107 characters. `store_bytes` is the
    size of each node's object store.
    """
    options = {"num_cpus": 2, "object_store_memory": store_bytes, "include_dashboard": False}
    environment = {
        MARK: mark,
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(directory),  # Ray writes the address below it
        "TMPDIR": str(directory / "tmp"),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    (directory / "ray").mkdir(parents=True, exist_ok=True)
    (directory / "tmp").mkdir(exist_ok=True)
    cluster = None
    try:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**options, "_system_config": PATIENCE, "temp_dir": str(directory)},
        )
        yield TwoNodes(cluster, mark, options)
    finally:
        try:
            if cluster is not None:
                cluster.shutdown()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
