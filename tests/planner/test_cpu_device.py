"""Cores as devices: rates of a probe, constants, and predictions that follow from them."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.planner.cpu_device import CpuProbe, ProductTime, cpu_cluster, cpu_constants, cpu_core
from rlsys.planner.kernels import kernels_of
from rlsys.planner.lengths import fixed
from rlsys.planner.memory import FSDP_FP32, memory_of
from rlsys.planner.plans import GenerationPlan, TrainingPlan, Workload
from rlsys.planner.profiles import fitted_constants
from rlsys.planner.run_plan import Role, RunPlan, RunShape, step_time, training_seconds
from rlsys.planner.stored_values import restored
from tests.errors import invalid
from tests.planner.cpu_examples import RATE, ROWS, WIDTHS, cpu_probe, tiny_model

POLICY = Role(name="policy", model=tiny_model(), samples=True)
SHAPE = RunShape(
    roles=(POLICY,),
    workload=Workload(prompts=16, group_size=4, prompt_tokens=8, completions=fixed(16)),
    engine="torch",
)


def plan(*, ranks: int = 1, replicas: int = 1, max_staleness: int = 1) -> RunPlan:
    return RunPlan(
        placement="separate",
        max_staleness=max_staleness,
        generation=GenerationPlan(profile="torch-rl"),
        replicas=replicas,
        trainers={"policy": TrainingPlan(dp=ranks, row_tokens=4096)},
        frozen_gpus={},
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_measured_product_takes_its_time(rows: int, width: int) -> None:
    gemm = kernels_of(cpu_core(cpu_probe(), "float32")).gemm
    assert gemm(rows, width, width) == pytest.approx(2 * rows * width**2 / RATE)


@given(rows=st.floats(1, 1e5), n=st.integers(16, 50_000), k=st.integers(16, 4096))
def test_more_rows_take_longer(rows: float, n: int, k: int) -> None:
    gemm = kernels_of(cpu_core(cpu_probe(), "float32")).gemm
    assert 0 < gemm(rows, n, k) <= gemm(2 * rows, n, k)


def test_a_core_has_its_share_of_the_memory_and_the_peak_of_its_dtype() -> None:
    measured = cpu_probe(cores=4, dtypes=("float32", "bfloat16"))
    fast = replace(
        measured,
        products=tuple(
            replace(one, seconds=one.seconds / 8) if one.dtype == "bfloat16" else one
            for one in measured.products
        ),
    )
    single, half = cpu_core(fast, "float32"), cpu_core(fast, "bfloat16")
    assert single.memory_gib == 6.0
    assert single.peak("bf16") == pytest.approx(RATE)
    assert half.peak("bf16") == pytest.approx(8 * RATE)
    assert half.bandwidth == 2 * single.bandwidth  # half the bytes per value
    assert cpu_core(fast, "float16") == single  # not measured


def test_clusters_of_cores() -> None:
    assert str(cpu_cluster(cpu_probe(cores=4), "float32")) == "1x4xCPU"
    assert str(cpu_cluster(cpu_probe(cores=4), "float32", 2, 3)) == "2x3xCPU"
    with invalid("cluster", 0):
        cpu_cluster(cpu_probe(), "float32", 1, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"bandwidth": math.nan}, "probe.bandwidth"),
        ({"layer_forward_s": 0.0}, "probe.layer_forward_s"),
        ({"decode_tokens_s": "x"}, "probe.decode_tokens_s"),
        ({"cores": 10**6}, "probe.cores"),
        ({"products": cpu_probe().products[1:]}, "probe.products of float32"),
        ({"products": (ProductTime("bfloat16", 1, 64, 1e-6),)}, "probe.products"),
    ],
)
def test_a_damaged_probe_is_refused(change: dict[str, object], field: str) -> None:
    with invalid(field):
        restored(CpuProbe, {**asdict(cpu_probe()), **_plain(change)}, "probe")


def _plain(change: dict[str, object]) -> dict[str, object]:
    products = change.get("products")
    if not isinstance(products, tuple):
        return change
    return {"products": [asdict(one) for one in products]}


def test_a_probe_survives_a_dictionary() -> None:
    assert restored(CpuProbe, asdict(cpu_probe()), "probe") == cpu_probe()


def test_training_is_bound_by_products_and_the_host() -> None:
    cluster = cpu_cluster(cpu_probe(host_s=1e-9), "float32")
    constants = cpu_constants(fitted_constants(), cpu_probe(host_s=1e-9))
    seconds = training_seconds(POLICY, cluster, plan().trainers["policy"], SHAPE, constants)
    tokens = 16 * (8 + 4 * 16)
    products = 6 * tokens * POLICY.model.layer_parameters / RATE
    assert products < seconds < 2 * products
    slow_host = replace(cpu_probe(), layer_train_s=0.5)
    constants = cpu_constants(fitted_constants(), slow_host)
    slower = training_seconds(POLICY, cluster, plan().trainers["policy"], SHAPE, constants)
    assert slower - seconds == pytest.approx(4 * 0.5, rel=0.01)  # nothing overlaps on a core


def test_two_ranks_share_the_tokens_of_a_step() -> None:
    cluster = cpu_cluster(cpu_probe(), "float32")
    constants = cpu_constants(fitted_constants(), cpu_probe(host_s=1e-9))
    one, two = (
        training_seconds(POLICY, cluster, plan(ranks=ranks).trainers["policy"], SHAPE, constants)
        for ranks in (1, 2)
    )
    assert 0.4 * one < two < 0.7 * one


def test_more_processes_than_cores_take_turns() -> None:
    constants = cpu_constants(fitted_constants(), cpu_probe())
    wide = cpu_cluster(cpu_probe(cores=8), "float32")
    narrow = cpu_cluster(cpu_probe(cores=8), "float32", cores=1)
    free = step_time(SHAPE, wide, plan(), constants=constants)
    shared = step_time(SHAPE, narrow, plan(), constants=constants)
    assert "shared_cores" not in free.breakdown
    assert shared.breakdown["shared_cores"] > 0
    assert shared.seconds > free.seconds


def test_memory_in_float32_has_16_bytes_per_parameter() -> None:
    cluster = cpu_cluster(cpu_probe(), "float32")
    training = TrainingPlan(row_tokens=64)
    need = memory_of(POLICY.model, cluster, training, bytes_of=FSDP_FP32)
    states = sum(need.breakdown[name] for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(16 * POLICY.model.parameters)
    half = replace(cluster, gpu=replace(cluster.gpu, value_bytes=2.0))
    less = memory_of(POLICY.model, half, training, bytes_of=FSDP_FP32)
    assert need.breakdown["activations"] == pytest.approx(2 * less.breakdown["activations"])
