"""Placement of processes on machines, with sums computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.common.available_memory import total_bytes
from rlsys.config import RunConfig
from rlsys.config.command_line import parse
from rlsys.config.machine import CARDS, GIB, Device, Machine, parse_machines
from rlsys.launcher.machine_fit import Demand, lay_out
from rlsys.planner.hardware import parse_cluster
from tests.errors import invalid


def gpus(count: int, gib: float, **settings: int) -> Machine:
    device = Device(name="card", num_bytes=int(gib * GIB))
    return Machine(name="this machine", devices=(device,) * count, **settings)


def test_whole_gpus_and_shares_are_summed_per_device() -> None:
    """A rank has GPU 0, and two replicas have half of GPU 1 each."""
    rank = Demand(name="trainer-0", fix="", num_gpus=1, device_bytes=9 * GIB, host_bytes=GIB)
    half = Demand(name="rollout-0", fix="", num_gpus=0.5, device_bytes=4 * GIB, host_bytes=2 * GIB)
    layout = lay_out([half, half, rank], [gpus(2, 10)], every_node_bytes=3 * GIB)
    (node,) = layout.nodes
    assert [device.used_bytes for device in node.devices] == [9 * GIB, 8 * GIB]
    assert node.host_bytes == (3 + 1 + 2 + 2) * GIB
    assert layout.fits


def test_a_fraction_of_a_device_is_relative_to_its_size() -> None:
    """85 % of 80 GiB and 20 GiB are 88 GiB."""
    vllm = Demand(name="rollout-0", fix="", num_gpus=0.5, device_frac=0.85)
    role = Demand(name="reference-0", fix="", num_gpus=0.5, device_bytes=20 * GIB)
    (shortage,) = lay_out([vllm, role], [gpus(1, 80)], every_node_bytes=0).shortages
    assert "88.0 GiB" in shortage.message
    assert "8.0 GiB are missing" in shortage.message
    assert shortage.demand is vllm


def test_models_that_take_turns_count_once() -> None:
    turns = [
        Demand(name=f"{name}-0", fix="", num_gpus=0.5, device_bytes=num * GIB, takes_turns=True)
        for name, num in (("reference", 6), ("teacher", 9))
    ]
    (node,) = lay_out(turns, [gpus(1, 10)], every_node_bytes=0).nodes
    assert node.devices[0].used_bytes == 9 * GIB


def test_a_missing_gpu_is_a_shortage() -> None:
    ranks = [Demand(name=f"trainer-{k}", fix="trainer.layout", num_gpus=1) for k in range(4)]
    layout = lay_out(ranks, [gpus(3, 10)], every_node_bytes=0)
    assert [one.name for one in layout.unplaced] == ["trainer-3"]
    assert "4 GPUs" in layout.shortages[0].message
    assert not lay_out(ranks, [gpus(0, 10)], every_node_bytes=0).fits


def test_host_memory_is_summed_on_its_node() -> None:
    demands = [Demand(name=f"rollout-{k}", fix="", host_bytes=5 * GIB) for k in range(4)]
    one = gpus(0, 1, host_bytes=12 * GIB)
    assert not lay_out(demands, [one], every_node_bytes=GIB).fits
    assert lay_out(demands, [one, one], every_node_bytes=2 * GIB).fits  # 5 + 5 + 2 on each
    assert not lay_out(demands, [one, one], every_node_bytes=3 * GIB).fits


@given(
    st.lists(st.sampled_from([0, 0.25, 0.5, 1, 2]), max_size=8),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
)
def test_no_gpu_is_reserved_twice(reserved: list[float], nodes: list[int]) -> None:
    demands = [
        Demand(name=f"one-{k}", fix="", num_gpus=num, device_bytes=1, host_bytes=1)
        for k, num in enumerate(reserved)
    ]
    layout = lay_out(demands, [gpus(count, 1) for count in nodes], every_node_bytes=0)
    placed = [demand for node in layout.nodes for demand in node.demands]
    assert len(placed) + len(layout.unplaced) == len(demands)
    for node in layout.nodes:
        for device in node.devices:
            assert sum(min(1, demand.num_gpus) for demand in device.demands) <= 1
    assert layout.fits == (not layout.unplaced)


@pytest.mark.parametrize(
    ("text", "counts", "gib"),
    [
        ("8xH100", [8], CARDS["H100"]),
        ("h200", [1], CARDS["H200"]),
        ("4x24GiB", [4], 24),
        ("16x24GiB", [16], 24),
        ("2xA100-40G", [2], CARDS["A100-40G"]),
        ("0.5GiB", [1], 0.5),
        ("2x8xH100", [8, 8], CARDS["H100"]),
        ("3x2x24GiB", [2, 2, 2], 24),
        ("16xH100", [8, 8], CARDS["H100"]),
        ("20xL40S", [8, 8, 4], CARDS["L40S"]),
    ],
)
def test_machines_are_named_by_cards_or_memory(text: str, counts: list[int], gib: float) -> None:
    nodes = parse_machines(text)
    assert [len(node.devices) for node in nodes] == counts
    sizes = {device.num_bytes for node in nodes for device in node.devices}
    assert sizes == {int(gib * GIB)}
    assert len({node.name for node in nodes}) == len(nodes)


TEXTS = ["", "0xH100", "8x", "H1000", "-1xH100", "8xH100x2", "0GiB", "2x0xH100", "0x8xH100"]


@pytest.mark.parametrize(
    "text", [*TEXTS, "2x2x8xH100", "99999x99999xH100", "5000x24GiB", "\u0668xH100"]
)
def test_other_texts_are_refused(text: str) -> None:
    with invalid("machine", text):
        parse_machines(text)


@pytest.mark.parametrize("text", ["H100", "8xH100", "2x8xH100", "16xH200", "64xA100", "4x2xL40S"])
def test_the_planner_takes_the_same_names_for_the_same_nodes(text: str) -> None:
    nodes, cluster = parse_machines(text), parse_cluster(text)
    assert [len(node.devices) for node in nodes] == [cluster.per_node] * cluster.num_nodes


def test_a_replica_is_placed_on_one_node() -> None:
    """16 GPUs in two nodes hold two replicas of 8, and not one of 16."""
    halves = [Demand(name=f"rollout-{n}", fix="", num_gpus=8, host_bytes=GIB) for n in range(2)]
    assert lay_out(halves, parse_machines("2x8xH100"), every_node_bytes=0).fits
    whole = Demand(name="rollout-0", fix="rollout.tensor_parallel", num_gpus=16)
    (shortage,) = lay_out([whole], parse_machines("2x8xH100"), every_node_bytes=0).shortages
    assert shortage.demand is whole
    assert "8 on each" in shortage.message
    assert lay_out([whole], parse_machines("16x80GiB"), every_node_bytes=0).fits


def test_memory_is_printed_per_node() -> None:
    """Each node has a replica; the rank is on the first one, with its own host memory."""
    rank = Demand(name="trainer-0", fix="", num_gpus=1, device_bytes=9 * GIB, host_bytes=GIB)
    replica = Demand(name="rollout-0", fix="", num_gpus=1, device_bytes=GIB, host_bytes=2 * GIB)
    demands = [rank, replica, replica, replica, replica, replica]
    layout = lay_out(demands, [gpus(2, 10)] * 3, every_node_bytes=3 * GIB)
    assert [*layout.describe()] == [
        "node 0: host memory 6.0 GiB",
        "  GPU 0: 9.0 GiB of 10.0 GiB  trainer",
        "  GPU 1: 1.0 GiB of 10.0 GiB  rollout",
        "nodes 1 to 2, each: host memory 7.0 GiB",
        "  GPUs 0 to 1, each: 1.0 GiB of 10.0 GiB  rollout",
    ]


def test_a_node_without_enough_host_memory_is_named() -> None:
    nodes = [gpus(1, 10, host_bytes=4 * GIB), gpus(1, 10, host_bytes=2 * GIB)]
    demands = [Demand(name=f"rollout-{n}", fix="", num_gpus=1, host_bytes=GIB) for n in range(2)]
    layout = lay_out(demands, nodes, every_node_bytes=2 * GIB)
    assert len(layout.shortages) == 1
    assert "1.0 GiB are missing" in layout.shortages[0].message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], False),
        (["--dry-run"], True),
        (["--dry-run", "false"], False),
        (["--dry-run", "yes"], True),
        (["--dry-run", "8xH100", "--num-steps", "3"], "8xH100"),
        (["--dry-run=4x24GiB"], "4x24GiB"),
        (["--dry-run", "2x8xH100"], "2x8xH100"),
        (["--dry-run", "--num-steps", "3"], True),
    ],
)
def test_a_dry_run_may_name_a_machine(arguments: list[str], expected: bool | str) -> None:
    assert parse(RunConfig, arguments).dry_run == expected


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    assert total_bytes(tmp_path) == 1_024_000
    box = tmp_path / "sys/fs/cgroup/box"
    box.mkdir(parents=True)
    (box / "memory.max").write_text("max\n")
    assert total_bytes(tmp_path) == 1_024_000
    (box / "memory.max").write_text("4096\n")
    assert total_bytes(tmp_path) == 4096
