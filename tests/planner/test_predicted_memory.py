"""Memory of training and generation, by hand and against ZeRO's formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.planner.hardware import cluster_of, gpu_named, parse_cluster
from rlsys.planner.lengths import fixed, lognormal, measured
from rlsys.planner.memory import (
    generation_memory_of,
    kv_capacity,
    layer_activations,
    memory_of,
    state_bytes,
    weight_bytes,
)
from rlsys.planner.model_config import named_model
from rlsys.planner.plans import GenerationPlan, TrainingPlan
from tests.errors import invalid

LLAMA = named_model("Llama-3.1-8B")
H100 = parse_cluster("8xH100")


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_are_those_of_zero(zero: int, gigabytes: float) -> None:
    """Figure 1 of 1910.02054: 7.5 B parameters on 64 ranks."""
    assert state_bytes(7.5e9, 64, zero) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_states_of_a_plan_by_hand() -> None:
    plan = TrainingPlan(dp=8, shard="parameters")
    parts = memory_of(LLAMA, H100, plan).breakdown
    assert parts["weights"] == pytest.approx(2 * LLAMA.parameters / 8)
    assert parts["gradients"] == pytest.approx(2 * LLAMA.parameters / 8)
    assert parts["optimizer"] == pytest.approx(12 * LLAMA.parameters / 8)
    parts = memory_of(LLAMA, H100, replace(plan, shard="optimizer")).breakdown
    assert parts["weights"] == pytest.approx(2 * LLAMA.parameters)
    assert parts["optimizer"] == pytest.approx(12 * LLAMA.parameters / 8)


def test_full_recomputation_keeps_the_input_of_each_layer() -> None:
    plan = TrainingPlan(row_tokens=1000, micro_batch=2, recompute="full")
    assert layer_activations(LLAMA, plan) == 2 * 2000 * 4096


def test_logits_count_by_token_or_by_chunk() -> None:
    plan = TrainingPlan(row_tokens=1000, micro_batch=2)
    whole = memory_of(LLAMA, H100, plan, logit_bytes=10).breakdown["logits"]
    assert whole == 10 * 2000 * LLAMA.vocab
    chunked = memory_of(LLAMA, H100, plan, logit_bytes=10, loss_chunk=500).breakdown["logits"]
    assert chunked == whole / 4


@settings(max_examples=40)
@given(
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "optimizer", "parameters"]),
    st.sampled_from(["none", "selective", "full"]),
)
def test_splitting_never_needs_more(dp: int, tp: int, shard: str, recompute: str) -> None:
    plan = TrainingPlan(
        dp=dp,
        tp=tp,
        shard=shard,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        row_tokens=8192,
    )
    need = memory_of(LLAMA, cluster_of(gpu_named("H100"), plan.num_gpus), plan)
    assert sum(need.breakdown.values()) == pytest.approx(need.total)
    wider = replace(plan, tp=2 * tp)
    assert memory_of(LLAMA, H100, wider).total < need.total
    longer = replace(plan, row_tokens=16384)
    assert memory_of(LLAMA, H100, longer).total > need.total


def test_a_model_that_is_too_large_does_not_fit() -> None:
    large = named_model("Llama-3.1-70B")
    plan = TrainingPlan(dp=8, recompute="full")
    assert not memory_of(large, H100, plan).fits(H100)
    assert memory_of(LLAMA, H100, plan).fits(H100)


def test_weights_of_a_replica() -> None:
    whole = weight_bytes(LLAMA, GenerationPlan())
    assert whole == pytest.approx(2 * LLAMA.parameters, rel=1e-3)
    assert weight_bytes(LLAMA, GenerationPlan(tp=2)) == pytest.approx(whole / 2, rel=1e-3)
    quantised = weight_bytes(LLAMA, GenerationPlan(weights="fp8"))
    embedding = 2 * 2 * LLAMA.vocab * LLAMA.hidden
    assert quantised == pytest.approx((whole - embedding) / 2 + embedding, rel=1e-3)


def test_the_cache_of_a_small_model_is_the_one_that_vllm_reports() -> None:
    """377,024 tokens of Qwen3-8B on one H100 at 0.9 of its memory (silybench)."""
    found = kv_capacity(named_model("Qwen3-8B"), parse_cluster("H100"), GenerationPlan())
    assert found == pytest.approx(377_024, rel=0.06)


def test_weights_that_do_not_fit_leave_no_cache() -> None:
    assert kv_capacity(named_model("Llama-3.1-70B"), H100, GenerationPlan()) == 0


def test_a_batch_needs_its_cache() -> None:
    plan = GenerationPlan()
    one = generation_memory_of(LLAMA, H100, plan, 1, 1000)
    two = generation_memory_of(LLAMA, H100, plan, 2, 1000)
    cache = two.breakdown["kv_cache"] - one.breakdown["kv_cache"]
    assert cache == 1000 * 32 * 8 * 256 * 2


# Lengths


@given(
    maximum=st.integers(512, 32768),  # shorter completions end at one token
    share=st.floats(0.05, 0.9),
    spread=st.floats(0.2, 1.2),
)
def test_log_normal_lengths_have_their_mean(maximum: int, share: float, spread: float) -> None:
    mean = max(1.0, share * maximum)
    found = lognormal(mean, maximum, spread, count=200)
    assert found.mean == pytest.approx(mean, rel=0.03)
    assert min(found.quantiles) >= 1
    assert max(found.quantiles) <= maximum


def test_a_sample_spreads_over_the_lengths() -> None:
    sample = measured([10, 20, 30]).sample(300)
    assert sample.mean() == pytest.approx(20, rel=0.02)
    assert (sample.min(), sample.max()) == (10, 30)
    assert set(fixed(7).sample(5)) == {7}


def test_lengths_that_cannot_be_are_refused() -> None:
    with invalid("completion_tokens.mean", 100):
        lognormal(100, 50)
    with invalid("completion_tokens.max", 0):
        lognormal(1, 0)
    for values in ([], [1.0, float("nan")], [0.0]):
        with invalid("completion_tokens", len(values)):
            measured(values)
