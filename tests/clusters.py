"""Ray clusters of several nodes on this machine, for tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

# For a busy machine: Ray's own limit, five times ten seconds, takes a node that has no turn for
# dead, and its workers, of low priority, have none for minutes.
PATIENCE = {"health_check_timeout_ms": 60_000, "worker_niceness": 0}

NODE_OPTIONS = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


@contextmanager
def cluster_of_one(**head_options: Any) -> Iterator[Any]:
    """A cluster with a head node, in a temporary directory of its own; it ends with the block."""
    # Paths of sockets lie below it, and may have 107 characters.
    short = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
    with pytest.MonkeyPatch.context() as patch, short as directory:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        # Ray writes the address there, and does not make the folder itself.
        patch.setenv("RAY_TMPDIR", directory)
        Path(directory, "ray").mkdir()
        own = {"_system_config": PATIENCE, "temp_dir": directory}
        options = {**NODE_OPTIONS, **head_options, **own}
        cluster = Cluster(initialize_head=True, head_node_args=options)
        try:
            yield cluster
        finally:
            cluster.shutdown()


@contextmanager
def joined_cluster(test_file: str, *, num_cpus: int) -> Iterator[Any]:
    """A cluster of one that this process has joined; actors find what `test_file` defines."""
    directory = Path(test_file).parent
    environment = {"env_vars": {"PYTHONPATH": f"{Path(__file__).parents[1]}:{directory}"}}
    with cluster_of_one(num_cpus=num_cpus) as cluster:
        try:
            ray.init(
                address=cluster.address,
                logging_level="ERROR",
                log_to_driver=False,
                runtime_env=environment,
            )
            yield cluster
        finally:
            ray.shutdown()
