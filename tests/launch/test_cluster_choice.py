"""Names of clusters: cores, nodes of a running Ray cluster, GPUs of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.run.capacity import cluster_of_dry_run
from recipes import ppo
from rlsys.config import RoleConfig, RolloutConfig, TrainerConfig
from rlsys.config.machine import Device, Machine
from rlsys.launcher import cluster_choice, step_prediction
from rlsys.launcher.cluster_choice import (
    chosen_cluster,
    cluster_of_devices,
    cluster_of_nodes,
    cores_named,
)
from rlsys.planner.cpu_probe import save_probe, saved_probe
from tests.errors import invalid
from tests.planner.cpu_examples import cpu_probe

H100_NODE = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "memory": 1e12}
HEAD = {"CPU": 16.0, "node:__internal_head__": 1.0}


def no_nodes(address: str) -> Sequence[Mapping[str, float]]:
    raise AssertionError(f"{address} was asked")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    without_gpus = Machine(name="this machine", devices=())
    monkeypatch.setattr(cluster_choice, "this_machine", lambda with_devices: without_gpus)
    save_probe(cpu_probe(cores=4))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ppo.Config(), "cores"),
        (ppo.Config(reward_model=RoleConfig(num_gpus=1)), "cores"),
        (ppo.Config(trainer=TrainerConfig(num_gpus=1)), "1x2xL4"),
        (ppo.Config(rollout=RolloutConfig(num_gpus=1)), "1x2xL4"),
    ],
)
def test_a_dry_run_predicts_for_the_devices_of_the_policy(
    config: ppo.Config, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_prediction, "cores_of_this_machine", lambda: "cores")
    cards = Machine(name="this machine", devices=(Device(name="NVIDIA L4", num_bytes=1),) * 2)
    assert cluster_of_dry_run(config, True, [cards]) == expected
    assert cluster_of_dry_run(config, True, None) == ""
    named = "" if expected == "cores" else "2xL4"
    assert cluster_of_dry_run(config, "2xL4", None) == named


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu", (1, None)),
        ("CPU", (1, None)),
        ("2xCPU", (1, 2)),
        ("1x2xCPU", (1, 2)),
        ("3x8xcpu", (3, 8)),
        ("8xH100", None),
        ("cpus", None),
    ],
)
def test_names_of_cores(text: str, expected: tuple[int, int | None] | None) -> None:
    assert cores_named(text) == expected


def test_no_cores() -> None:
    with invalid("cluster", "1x0xCPU"):
        cores_named("1x0xCPU")


def test_nodes_of_a_ray_cluster() -> None:
    assert cluster_of_nodes([H100_NODE, H100_NODE]) == "2x8xH100"
    assert cluster_of_nodes([HEAD, H100_NODE]) == "1x8xH100"
    assert cluster_of_nodes([HEAD, HEAD]) == "2x16xCPU"
    a100 = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:A100-40G": 1.0}
    assert cluster_of_nodes([a100]) == "1x4xA100-40GB"


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [H100_NODE, {**H100_NODE, "GPU": 4.0}],
        [H100_NODE, {"CPU": 8.0, "GPU": 8.0, "accelerator_type:A100": 1.0}],
        [{"CPU": 8.0, "GPU": 8.0}],
        [{"GPU": 0.0}],
    ],
)
def test_clusters_that_cannot_be_planned(nodes: list[dict[str, float]]) -> None:
    with invalid("--cluster"):
        cluster_of_nodes(nodes)


def test_gpus_of_a_machine() -> None:
    assert cluster_of_devices([]) == "CPU"
    assert cluster_of_devices(["NVIDIA H100 80GB HBM3"] * 8) == "1x8xH100"
    with invalid("--cluster"):
        cluster_of_devices(["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"])
    with invalid("--cluster", "Voodoo 2"):
        cluster_of_devices(["Voodoo 2"])


def test_cores_need_a_probe_and_gpus_do_not() -> None:
    cluster, probe = chosen_cluster("1x2xCPU", None, no_nodes)
    assert (str(cluster), probe) == ("1x2xCPU", saved_probe())
    assert str(chosen_cluster("cpu", None, no_nodes)[0]) == "1x4xCPU"
    assert chosen_cluster("2x8xH100", None, no_nodes)[1] is None


def test_the_running_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def nodes(address: str) -> Sequence[Mapping[str, Any]]:
        asked.append(address)
        return [H100_NODE] * 3

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for name in ("ray", "auto"):
        assert str(chosen_cluster(name, None, nodes)[0]) == "3x8xH100"
    chosen_cluster("auto", None, nodes, address="10.0.0.2:6379")
    assert asked == ["10.0.0.1:6379", "10.0.0.1:6379", "10.0.0.2:6379"]


def test_a_machine_without_gpus_and_ray_is_its_cores() -> None:
    assert str(chosen_cluster("auto", None, no_nodes)[0]) == "1x4xCPU"


def test_a_damaged_probe_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    assert saved_probe(file) is None
    file.write_text('{"cores": 2}')
    assert saved_probe(file) is None
    save_probe(cpu_probe(), file)
    assert saved_probe(file) == cpu_probe()


@pytest.mark.parametrize("text", ["8xRTX9999", "8x24GiB", "2xxCPU", "٢xCPU", "٢xH100"])
def test_a_name_that_is_refused_is_shown_as_the_user_wrote_it(text: str) -> None:
    with invalid("cluster", text):
        chosen_cluster(f" {text} ", None, no_nodes)
