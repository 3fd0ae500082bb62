"""Rooflines, tables and collectives, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.planner.communication import (
    LINK_EFFICIENCY,
    Group,
    all_reduce_time,
    all_to_all_time,
    engine_all_reduce_time,
    gather_time,
    group_of,
    ring_time,
)
from rlsys.planner.hardware import GPUS, parse_cluster
from rlsys.planner.kernels import LAUNCH_S, KernelTable, kernels_of
from rlsys.planner.roofline import gemm_roofline

H100 = GPUS["H100"]
NODE = parse_cluster("8xH100")
TWO = parse_cluster("2x8xH100")
SIZES = st.integers(1, 65536)


def test_a_large_product_is_bound_by_arithmetic() -> None:
    expected = 2 * 8192**3 / 989e12
    assert gemm_roofline(H100, 8192, 8192, 8192, "bf16", 2.0) == pytest.approx(expected)
    assert gemm_roofline(H100, 8192, 8192, 8192, "fp8", 1.0) == pytest.approx(
        expected / 2, rel=1e-3
    )


def test_a_product_of_one_row_is_bound_by_its_weights() -> None:
    expected = (2 * (4096 * 4096 + 4096) + 2 * 4096) / 3.35e12
    assert gemm_roofline(H100, 1, 4096, 4096, "bf16", 2.0) == pytest.approx(expected)


def test_a_table_interpolates_and_clamps() -> None:
    table = KernelTable([(1, 4), (2, 8)], np.array([[0.0, 2.0], [4.0, 6.0]]))
    assert table.at(2, 4) == pytest.approx(3.0)  # both axes half way, in logarithms
    assert table.at(1, 2) == 0.0
    assert table.at(0.25, 100) == 2.0
    assert table.at(99, 0) == 4.0


@pytest.mark.parametrize("name", sorted(GPUS))
@given(m=SIZES, n=SIZES, k=SIZES)
def test_no_kernel_is_faster_than_the_roofline(name: str, m: int, n: int, k: int) -> None:
    gpu = GPUS[name]
    bound = gemm_roofline(gpu, m, n, k, "bf16", 2.0)
    seconds = kernels_of(gpu).gemm(m, n, k)
    assert math.isfinite(seconds)
    assert seconds >= max(bound, LAUNCH_S) * (1 - 1e-9)


@given(units=st.integers(1, 4096), context=st.integers(1, 200_000))
def test_decoding_attention_reads_the_whole_cache(units: int, context: int) -> None:
    num_bytes = 2 * units * context * 128 * 2
    assert kernels_of(H100).decode(units, context, 128) >= num_bytes / 3.35e12


def test_experts_read_those_that_rows_reach() -> None:
    weights = 3 * 4096 * 1536
    one = kernels_of(H100).experts(1, 1, 128, 1, weights, "bf16")
    many = kernels_of(H100).experts(256, 8, 128, 1, weights, "bf16")
    assert one >= 2 * weights * (1 - math.exp(-1 / 128)) * 128 / 3.35e12
    assert many > 20 * one


def test_an_all_gather_in_a_node() -> None:
    size = 1e9
    expected = size * 7 / 8 / (450e9 * LINK_EFFICIENCY) + 8 * 2e-6
    assert gather_time(NODE, Group(8, 8), size) == pytest.approx(expected)
    assert all_reduce_time(NODE, Group(8, 8), size) == pytest.approx(2 * expected)


def test_one_rank_needs_no_communication() -> None:
    alone = Group(1, 1)
    assert gather_time(TWO, alone, 1e9) == 0
    assert all_to_all_time(TWO, alone, 1e9) == 0
    assert ring_time(TWO, alone, 1e9) == 0
    assert engine_all_reduce_time(TWO, 1, 1e6) == 0


def test_groups_know_which_ranks_share_a_node() -> None:
    assert group_of(TWO, 16) == Group(16, 8)
    assert group_of(TWO, 8, stride=2) == Group(8, 4)
    assert group_of(TWO, 2, stride=8) == Group(2, 1)
    assert group_of(parse_cluster("64xGB200"), 64) == Group(64, 64)


@given(size=st.floats(1e3, 1e12), ranks=st.sampled_from([2, 4, 8, 16]))
def test_larger_messages_take_longer(size: float, ranks: int) -> None:
    group = group_of(TWO, ranks)
    for collective in (gather_time, all_reduce_time, all_to_all_time, ring_time):
        assert 0 < collective(TWO, group, size) < collective(TWO, group, 2 * size)


def test_the_network_is_slower_than_the_link() -> None:
    inside = gather_time(TWO, Group(8, 8), 1e9)
    assert gather_time(TWO, Group(16, 8), 1e9) > inside
    assert gather_time(TWO, Group(2, 1), 1e9) > 5 * inside


def test_all_reduces_of_an_engine_have_a_latency() -> None:
    small = engine_all_reduce_time(NODE, 8, 1024)
    assert 2e-6 < small < 50e-6
    assert engine_all_reduce_time(TWO, 16, 1024) > small
