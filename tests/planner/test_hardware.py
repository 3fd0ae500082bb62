"""Cluster strings and the table of GPUs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.planner.hardware import GPUS, Cluster, cluster_of, find_gpu, gpu_named, parse_cluster
from tests.errors import invalid


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "gpu"),
    [
        ("8x8 H100", 8, 8, "H100"),
        ("2x8xH100", 2, 8, "H100"),
        ("8xL40S", 1, 8, "L40S"),
        ("H200", 1, 1, "H200"),
        ("16 H100", 2, 8, "H100"),
        ("64xGB200", 16, 4, "GB200"),
        (" 2 x 4 x a100-80gb ", 2, 4, "A100"),
    ],
)
def test_a_cluster_is_named(text: str, nodes: int, per_node: int, gpu: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.num_nodes, cluster.per_node, cluster.gpu.name) == (nodes, per_node, gpu)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "0xH100",
        "2x0xH100",
        "-1xH100",
        "8 H100 extra",
        "8xxH100",
        "2x8xxH100",
        "٢xH100",
        "xH100",
        "8xRTX9999",
        "8x24GiB",
    ],
)
def test_a_text_that_names_no_cluster_is_refused(text: str) -> None:
    with invalid("cluster", text):
        parse_cluster(text)


def test_too_many_gpus_are_refused() -> None:
    with invalid("cluster"):
        parse_cluster("9999999x8xH100")


def test_an_unknown_gpu_is_refused() -> None:
    with invalid("cluster", "8xFOO"):
        parse_cluster("8xFOO")
    with invalid("gpu", "H1000"):
        gpu_named("H1000")


@given(st.sampled_from(sorted(GPUS)), st.integers(1, 999), st.integers(1, 999))
def test_a_cluster_prints_what_it_parses(name: str, nodes: int, per_node: int) -> None:
    cluster = Cluster(gpu=GPUS[name], num_nodes=nodes, per_node=per_node)
    assert parse_cluster(str(cluster)) == cluster


@given(st.sampled_from(sorted(GPUS)), st.integers(1, 5000))
def test_nodes_hold_all_gpus(name: str, count: int) -> None:
    cluster = cluster_of(GPUS[name], count)
    assert count <= cluster.num_gpus < count + cluster.per_node


def test_a_rack_is_one_fast_domain() -> None:
    assert parse_cluster("64xGB200").domain == 72
    assert parse_cluster("64xB200").domain == 8


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", None),
    ],
)
def test_a_device_name_names_a_gpu(device: str, name: str | None) -> None:
    found = find_gpu(device)
    assert (found and found.name) == name


def test_a_missing_precision_runs_at_the_next_wider_rate() -> None:
    assert GPUS["A100"].peak("fp8") == GPUS["A100"].peak("bf16") == 312e12
    assert GPUS["H100"].peak("fp4") == GPUS["H100"].peak("fp8") == 1979e12
    assert GPUS["B200"].peak("fp4") == 2 * GPUS["B200"].peak("fp8")
