"""The planner reads a running Ray cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from actors.cluster.cluster_nodes import live_nodes
from rlsys.launcher.cluster_choice import chosen_cluster, cluster_of_nodes
from rlsys.planner.cpu_probe import save_probe
from tests.clusters import NODE_OPTIONS, cluster_of_one
from tests.errors import invalid
from tests.planner.cpu_examples import cpu_probe


@pytest.mark.slow
def test_a_running_cluster_is_planned_by_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_probe(cpu_probe())
    gpus = {"num_gpus": 8, "resources": {"accelerator_type:H100": 1}}
    with cluster_of_one(num_cpus=2) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        assert str(chosen_cluster("ray", None, live_nodes)[0]) == "1x2xCPU"
        for _ in range(2):
            cluster.add_node(num_cpus=1, **gpus, **NODE_OPTIONS)
        assert cluster_of_nodes(live_nodes(cluster.address)) == "2x8xH100"
        assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["", "local"])
def test_an_address_of_no_cluster_is_refused(address: str) -> None:
    with invalid("RAY_ADDRESS", address):
        live_nodes(address)
