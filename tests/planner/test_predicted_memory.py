"""Memory of training and generation, by hand and against ZeRO's formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.engines.models import token_policy
from rlsys.planner.hardware import cluster_of, gpu_named, parse_cluster
from rlsys.planner.lengths import fixed, lognormal, measured
from rlsys.planner.memory import (
    GPU_MAX_LOGITS,
    MAX_LOGITS,
    adapter_parameters,
    generation_memory_of,
    kv_capacity,
    layer_activations,
    memory_of,
    rank_memory,
    rank_states,
    state_bytes,
    weight_bytes,
)
from rlsys.planner.model_config import named_model
from rlsys.planner.plans import GenerationPlan, TrainingPlan
from rlsys.planner.profiles import fitted_constants
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


@pytest.mark.parametrize(
    ("name", "rank", "targets", "expected"),
    [
        # q and o 4096+4096 each, k and v 4096+1024, gate, up and down 4096+12288, 36 layers
        ("Qwen3-8B", 16, None, 43_646_976),
        ("Qwen2.5-7B", 16, None, 16 * 28 * (2 * 7168 + 2 * 4096 + 3 * 22528)),
        ("Qwen3-8B", 8, ("q_proj", "self_attn.v_proj"), 8 * 36 * (8192 + 5120)),
        # 32 heads of 128 and 4 KV heads on a width of 2048; experts have no adapters
        ("Qwen3-30B-A3B", 1, None, 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))),
    ],
)
def test_adapters_have_an_a_and_a_b_for_each_linear_layer(
    name: str, rank: int, targets: tuple[str, ...] | None, expected: int
) -> None:
    assert adapter_parameters(named_model(name), rank, targets) == expected


@pytest.mark.parametrize(
    ("changes", "bytes_per_parameter"),
    [
        ({}, 16),
        ({"moment_bytes": 4.0}, 12),
        ({"offload_optimizer": True}, 8),
        ({"offload_optimizer": True, "moment_bytes": 4.0}, 8),
    ],
)
def test_states_of_a_rank_are_those_of_the_training_page(
    changes: dict[str, float], bytes_per_parameter: int
) -> None:
    """float32 weights and gradients, moments of 8 or 4 bytes, none on the GPU if on the host."""
    plan = TrainingPlan(dp=4, **changes)  # type: ignore[arg-type]
    states = rank_states(LLAMA, H100, plan)
    assert sum(states.values()) == pytest.approx(bytes_per_parameter * LLAMA.parameters / 4)
    assert rank_memory(LLAMA, H100, plan, fitted_constants()).breakdown.items() >= states.items()


def test_adapters_keep_their_base_in_the_precision_of_the_computation() -> None:
    model = named_model("Qwen3-8B")
    plan = TrainingPlan(lora_rank=16)
    states = rank_states(model, H100, plan)
    assert states == {"weights": 2 * model.parameters, "adapters": 16 * 43_646_976}
    assert states["weights"] == pytest.approx(16.4e9, rel=0.01)
    assert states["adapters"] == pytest.approx(0.70e9, rel=0.01)
    wide = rank_states(model, H100.in_precision("float32"), replace(plan, moment_bytes=4.0))
    assert wide == {"weights": 4 * model.parameters, "adapters": 12 * 43_646_976}


def test_a_scalar_head_is_trained_beside_adapters() -> None:
    """The head has 4,096 inputs. A token has one output instead of logits."""
    model, constants = replace(named_model("Qwen3-8B"), has_scalar_head=True), fitted_constants()
    plan = TrainingPlan(lora_rank=16, row_tokens=8192)
    assert rank_states(model, H100, plan)["adapters"] == 16 * (43_646_976 + 4096)
    need = rank_memory(model, H100, plan, constants)
    assert need.breakdown["logits"] == constants["logit_bytes"] * 8192


def test_a_rank_has_the_logits_of_one_chunk() -> None:
    """2^28 logits, 1 GiB in float32, on GPUs: 1,766 tokens of Qwen3's 151,936."""
    model, constants = named_model("Qwen3-8B"), fitted_constants()
    need = rank_memory(model, H100, TrainingPlan(row_tokens=8192), constants)
    assert need.breakdown["logits"] == constants["logit_bytes"] * 1766 * 151_936
    assert (MAX_LOGITS, GPU_MAX_LOGITS) == (token_policy.MAX_LOGITS, token_policy.GPU_MAX_LOGITS)


def test_float32_doubles_a_replica() -> None:
    model, wide = named_model("Qwen3-8B"), H100.in_precision("float32")
    assert (wide.gpu.bf16, wide.gpu.bandwidth, wide.gpu.value_bytes) == (67.0, 3.35 / 2, 4.0)
    assert str(wide) == str(H100)
    assert H100.in_precision("bfloat16") == H100.in_precision("float16") == H100
    plan, context = GenerationPlan(), 1.5 * fitted_constants()["context_gb"] * 1e9
    room = 0.9 * H100.gpu.memory_bytes - 4 * model.parameters - context
    assert kv_capacity(model, wide, plan) == pytest.approx(room / (36 * 8 * 256 * 4), rel=1e-3)


def test_a_window_bounds_the_cache_of_its_layers() -> None:
    """Half of gpt-oss's 24 layers keep 128 of 2,048 tokens in vLLM, and all in the torch engine."""
    model, plan = named_model("gpt-oss-20b"), GenerationPlan()
    assert (model.attention_layers, model.window_layers, model.window) == (24, 12, 128)
    every_token = kv_capacity(model, H100, plan)
    rows = kv_capacity(model, H100, plan, row_tokens=2048)
    assert rows / every_token == pytest.approx(24 * 2048 / (12 * 2048 + 12 * 128))
    torch_engine = replace(plan, keeps_windows=False)
    assert kv_capacity(model, H100, torch_engine, row_tokens=2048) == every_token


def test_a_cache_of_a_stated_size() -> None:
    found = kv_capacity(named_model("Qwen3-8B"), H100, GenerationPlan(cache_gib=1.0))
    assert found == 2**30 / (36 * 8 * 256 * 2)


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
