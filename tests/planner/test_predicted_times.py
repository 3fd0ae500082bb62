"""Properties of predicted times, and checks of plans and workloads."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.planner import rl_step
from rlsys.planner.architecture import Architecture
from rlsys.planner.decode_time import decode_step_time, prefill_time, steady_token_time
from rlsys.planner.hardware import cluster_of, gpu_named, parse_cluster
from rlsys.planner.kernels import kernels_of
from rlsys.planner.lengths import fixed, lognormal
from rlsys.planner.model_config import named_model
from rlsys.planner.plans import GenerationPlan, TrainingPlan, Workload
from rlsys.planner.profiles import Constants, SoftwareProfile, fitted_constants
from rlsys.planner.rl_step import RLPlan, generation_time, packed_plan, rl_step_time
from rlsys.planner.training_time import train_step_time
from tests.errors import invalid

LLAMA = named_model("Llama-3.1-8B")
MOE = named_model("Qwen3-30B-A3B")
NODE = parse_cluster("8xH100")
PLANS = st.builds(
    TrainingPlan,
    dp=st.sampled_from([1, 2, 8, 64]),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    shard=st.sampled_from(["none", "optimizer", "gradients", "parameters"]),
    row_tokens=st.sampled_from([1024.0, 8192.0, 65536.0]),
    micro_batch=st.sampled_from([1.0, 2.0]),
    micro_batches=st.sampled_from([1, 8]),
    recompute=st.sampled_from(["none", "attention", "selective", "full"]),
    precision=st.sampled_from(["bf16", "fp8"]),
    attention=st.sampled_from(["fused", "fused_2", "unfused"]),
    compiled=st.booleans(),
)


def seconds(plan: TrainingPlan, gpu: str = "H100", **changes: object) -> float:
    changed = replace(plan, **changes)  # type: ignore[arg-type]
    cluster = cluster_of(gpu_named(gpu), changed.num_gpus)
    return train_step_time(LLAMA, cluster, changed).seconds


@settings(max_examples=60)
@given(PLANS)
def test_a_breakdown_adds_up_and_the_interval_holds_the_median(plan: TrainingPlan) -> None:
    found = train_step_time(LLAMA, cluster_of(gpu_named("H100"), plan.num_gpus), plan)
    assert sum(found.breakdown.values()) == pytest.approx(found.seconds)
    assert all(part >= 0 for part in found.breakdown.values()), found.breakdown
    assert 0 < found.low < found.seconds < found.high < math.inf
    assert found.seconds / found.low == pytest.approx(found.high / found.seconds)


@settings(max_examples=40)
@given(PLANS)
def test_more_work_takes_longer(plan: TrainingPlan) -> None:
    """A step that is bound by communication takes the same time with more arithmetic."""
    base = seconds(plan) * (1 - 1e-9)
    assert seconds(plan, micro_batches=plan.micro_batches + 1) > base
    assert seconds(plan, row_tokens=4 * plan.row_tokens) >= base
    assert seconds(plan, recompute="full") >= base
    if plan.row_tokens > 4096:
        assert seconds(plan, attention="unfused") > seconds(plan, attention="fused")


@settings(max_examples=40)
@given(PLANS)
def test_a_faster_gpu_is_not_slower(plan: TrainingPlan) -> None:
    assert seconds(plan, "H200") <= seconds(plan, "H100") * 1.1
    assert seconds(plan, "H100") < seconds(plan, "A100")


@settings(max_examples=40)
@given(PLANS, st.sampled_from([2, 4]))
def test_more_replicas_do_not_make_the_same_batch_slower(plan: TrainingPlan, factor: int) -> None:
    """With the same micro-batches in total, shared by more data parallel ranks of one node."""
    plan = replace(plan, dp=1, tp=1, cp=1, pp=1, micro_batches=8)
    assert seconds(plan, dp=factor, micro_batches=8 // factor) < seconds(plan)


def test_a_large_dense_step_is_near_the_usual_utilisation() -> None:
    plan = TrainingPlan(
        dp=8, row_tokens=8192, micro_batch=2, micro_batches=8, profile="fsdp-compiled"
    )
    found = train_step_time(LLAMA, NODE, plan).seconds
    used = LLAMA.model_flops(8192) * plan.step_tokens / (found * 8 * 989e12)
    assert 0.3 < used < 0.65


def test_experts_cost_more_than_their_arithmetic() -> None:
    plan = TrainingPlan(dp=8, ep=8, micro_batches=8, profile="megatron-2025b")
    found = train_step_time(MOE, NODE, plan)
    assert found.breakdown["expert_parallel"] > 0
    used = MOE.model_flops(4096) * plan.step_tokens / (found.seconds * 8 * 989e12)
    assert 0.03 < used < 0.4
    uneven = train_step_time(MOE, NODE, replace(plan, balanced_routing=True))
    assert uneven.seconds < found.seconds


def test_large_experts_have_the_factor_of_dense_layers() -> None:
    """Compare a stack with factors 0.8 (dense) and 1.2 (experts) with one that has neither."""
    constants = fitted_constants().with_values(layer_host=1e-9, moe_layer_host=1e-9)
    plain = SoftwareProfile(name="plain")
    stack = SoftwareProfile(name="stack", factor=0.8, moe_factor=1.2, large_experts=0.8 / 1.2)
    constants = constants.with_profile(plain).with_profile(stack)
    half = constants["large_expert"] / MOE.hidden

    def factor(width: float) -> float:
        model = replace(MOE, expert_ffn=round(width))
        plans = (TrainingPlan(dp=8, ep=8, profile=name) for name in ("stack", "plain"))
        first, second = (train_step_time(model, NODE, p, constants=constants) for p in plans)
        return first.seconds / second.seconds

    assert factor(8) == pytest.approx(1.2, rel=1e-3)
    assert factor(half) == pytest.approx(1.2 * math.sqrt(0.8 / 1.2), rel=1e-4)
    assert factor(1000 * half) == pytest.approx(0.8, rel=1e-3)


def test_the_scan_of_linear_layers_takes_its_constant_times_its_traffic() -> None:
    constants = fitted_constants().with_values(layer_host=1e-9, moe_layer_host=1e-9)
    plan = TrainingPlan(dp=8, ep=8)

    def seconds(name: str, scan: float) -> float:
        changed = constants.with_values(linear_scan=scan)
        return train_step_time(named_model(name), NODE, plan, constants=changed).seconds

    first, second, third = (seconds("Nemotron-3-Nano-30B-A3B", scan) for scan in (1.0, 2.0, 3.0))
    assert third - second == pytest.approx(second - first)
    assert second > first
    assert seconds("Qwen3-30B-A3B", 1.0) == seconds("Qwen3-30B-A3B", 2.0)


def test_the_gradients_of_later_micro_batches_are_added_by_hand() -> None:
    """Two of three micro-batches are added: 2 bytes are read, 4 read and written, per parameter."""
    constants = fitted_constants().with_values(bandwidth=1.0)

    def added(**changes: object) -> float:
        plan = replace(TrainingPlan(), **changes)  # type: ignore[arg-type]
        found = train_step_time(LLAMA, NODE, plan, constants=constants)
        return found.breakdown.get("accumulation", 0.0)

    by_hand = 2 * 10 * LLAMA.parameters / 3.35e12
    assert added(micro_batches=3, shard="none") == pytest.approx(by_hand)
    assert added(micro_batches=3, shard="none", tp=2) == pytest.approx(by_hand / 2)
    assert added(micro_batches=3, shard="optimizer", dp=4) == pytest.approx(by_hand)
    assert added(micro_batches=3, shard="parameters", dp=4) == pytest.approx(by_hand / 4)
    assert added(micro_batches=1) == added(micro_batches=3, lora_rank=16) == 0.0


def test_a_frozen_head_has_no_weight_gradient() -> None:
    """Compare heads of V and V / 2 outputs: both have a forward product and an input gradient."""
    plan, cluster = TrainingPlan(row_tokens=4096), parse_cluster("H100")

    def products(vocab: int, lora_rank: int) -> float:
        model = replace(LLAMA, vocab=vocab)
        found = train_step_time(model, cluster, replace(plan, lora_rank=lora_rank))
        return found.breakdown["products"]

    def added(seconds: Callable[[int], float]) -> float:
        return seconds(128_256) - seconds(64_128)

    gemm = kernels_of(cluster.gpu).gemm
    weight = added(lambda vocab: gemm(vocab, 4096, 4096))
    others = added(lambda vocab: gemm(4096, vocab, 4096) + gemm(4096, 4096, vocab))
    trained = added(lambda vocab: products(vocab, 0))
    adapted = added(lambda vocab: products(vocab, 16))
    assert trained / adapted == pytest.approx((weight + others) / others)


def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    with invalid("plan.pp", 64):
        train_step_time(LLAMA, parse_cluster("8x8xH100"), TrainingPlan(pp=64))
    with invalid("plan.ep", 2):
        train_step_time(LLAMA, NODE, TrainingPlan(dp=8, ep=2))
    with invalid("plan.tp", 0):
        TrainingPlan(tp=0)
    with invalid("plan.precision", "fp7"):
        TrainingPlan(precision="fp7")
    with invalid("plan.row_tokens"):
        TrainingPlan(row_tokens=math.nan)


# Generation


@settings(max_examples=40)
@given(
    batch=st.integers(1, 512),
    context=st.integers(64, 30_000),
    tp=st.sampled_from([1, 2, 4, 8]),
    weights=st.sampled_from(["bf16", "fp8"]),
)
def test_larger_batches_and_contexts_take_longer(
    batch: int, context: int, tp: int, weights: str
) -> None:
    plan = GenerationPlan(tp=tp, weights=weights)
    base = decode_step_time(LLAMA, NODE, plan, batch, context)
    assert sum(base.breakdown.values()) == pytest.approx(base.seconds)
    assert decode_step_time(LLAMA, NODE, plan, 8 * batch, context).seconds > base.seconds
    assert decode_step_time(LLAMA, NODE, plan, batch, 4 * context).seconds > 0.97 * base.seconds


def test_one_row_reads_the_weights_once() -> None:
    found = decode_step_time(LLAMA, NODE, GenerationPlan(), 1, 100)
    floor = 2 * LLAMA.active_parameters / 3.35e12
    assert floor < found.seconds < 3 * floor


def test_terms_of_a_decoding_step_by_hand() -> None:
    """Compare steps whose constants differ in one term each."""
    plain = fitted_constants().with_profile(SoftwareProfile(name="plain"))
    qwen = named_model("Qwen3-8B")  # 36 layers with norms of queries and keys

    def seconds(
        model: Architecture, plan: GenerationPlan, name: str, value: float, gpu: str = "H100"
    ) -> float:
        constants, cluster = plain.with_values(**{name: value}), cluster_of(gpu_named(gpu), 8)
        return decode_step_time(model, cluster, plan, 8, 1000, constants=constants).seconds

    def added(model: Architecture, plan: GenerationPlan, name: str) -> float:
        return (seconds(model, plan, name, 1e-3) - seconds(model, plan, name, 0.0)) / 1e-3

    one, eight = GenerationPlan(profile="plain"), GenerationPlan(profile="plain", tp=8)
    assert added(qwen, one, "decode_norm") == pytest.approx(36)
    assert added(LLAMA, one, "decode_norm") == 0
    assert added(MOE, one, "decode_routing") == pytest.approx(48)
    assert added(LLAMA, one, "decode_routing") == 0
    assert added(LLAMA, one, "decode_wait") == 0
    assert added(LLAMA, eight, "decode_wait") == pytest.approx(2 * 32 * 3)  # log2 of 8 ranks
    # The bandwidth bounds this step of an H20.
    once, twice = (seconds(LLAMA, one, "decode_h20", value, "H20") for value in (1.0, 2.0))
    assert 1.8 < twice / once < 2.0
    once, twice = (seconds(LLAMA, one, "decode_h20", value, "H100") for value in (1.0, 2.0))
    assert once == twice


def test_a_trainer_s_host_is_slower_than_a_server_s() -> None:
    server = decode_step_time(LLAMA, NODE, GenerationPlan(profile="vllm"), 256, 1000)
    trainer = decode_step_time(LLAMA, NODE, GenerationPlan(profile="vllm-rl"), 256, 1000)
    assert trainer.breakdown["host"] == pytest.approx(5e-3 + 256 * 15e-6)
    assert server.breakdown["host"] == pytest.approx(0.6e-3 + 256 * 4e-6)


@given(tokens=st.integers(64, 30_000))
def test_a_longer_prompt_takes_longer(tokens: int) -> None:
    plan = GenerationPlan(tp=2)
    base = prefill_time(LLAMA, NODE, plan, 1, tokens).seconds
    assert prefill_time(LLAMA, NODE, plan, 1, 4 * tokens).seconds > base


def test_prompts_that_start_together_share_the_reads_of_the_weights() -> None:
    """513 rows of 64 tokens: 8 start in each step. One prompt alone reads all weights."""
    plan, constants = GenerationPlan(), fitted_constants()
    step = decode_step_time(LLAMA, NODE, plan, 513, 36).seconds
    alone = prefill_time(LLAMA, NODE, plan, 1, 4).seconds
    token = steady_token_time(LLAMA, NODE, plan, 513, 4, 64, constants)
    assert step < token < step + alone
    assert steady_token_time(LLAMA, NODE, plan, 513, 256, 64, constants) > 1.5 * token


def test_lengths_beyond_the_context_are_refused() -> None:
    with invalid("context", 200_000):
        decode_step_time(LLAMA, NODE, GenerationPlan(), 1, 200_000)
    with invalid("prompt_tokens", 200_000):
        prefill_time(LLAMA, NODE, GenerationPlan(), 1, 200_000)
    workload = Workload(prompts=1, group_size=1, prompt_tokens=100, completions=fixed(131_072))
    with invalid("workload.completion_tokens", 131_072):
        generation_time(LLAMA, NODE, GenerationPlan(), 1, workload)


# Steps of reinforcement learning

STEP = Workload(prompts=16, group_size=8, prompt_tokens=200, completions=lognormal(1000, 4096))


def rl_plan(mode: str = "synchronous", replicas: int = 8) -> RLPlan:
    return RLPlan(
        mode=mode,  # type: ignore[arg-type]
        generation=GenerationPlan(profile="vllm-rl"),
        replicas=replicas,
        training=TrainingPlan(dp=8, row_tokens=4096, profile="megatron-2025b"),
    )


def test_equal_lengths_generate_at_the_decoding_rate() -> None:
    constants: Constants = fitted_constants().with_values(rl_generation=1.0)
    workload = Workload(prompts=8, group_size=8, prompt_tokens=100, completions=fixed(2000))
    found = generation_time(
        LLAMA, NODE, GenerationPlan(), 1, workload, constants=constants
    ).breakdown["decoding"]
    step = decode_step_time(LLAMA, NODE, GenerationPlan(), 64, 1100, constants=constants)
    assert found == pytest.approx(2000 * step.seconds, rel=0.05)


def test_more_replicas_generate_faster() -> None:
    times = [
        generation_time(LLAMA, NODE, GenerationPlan(), count, STEP).seconds for count in (1, 2, 8)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]


def test_the_longest_rollout_bounds_generation() -> None:
    many = generation_time(LLAMA, NODE, GenerationPlan(), 128, STEP)
    alone = 4000 * decode_step_time(LLAMA, NODE, GenerationPlan(), 1, 200).seconds
    assert many.seconds > 0.9 * alone


def test_a_replica_without_room_for_a_row_is_refused() -> None:
    large = named_model("Llama-3.1-70B")
    with invalid("plan.tp", 1):
        generation_time(large, NODE, GenerationPlan(), 8, STEP)


def test_one_step_off_hides_the_shorter_part() -> None:
    both = rl_step_time(LLAMA, NODE, rl_plan(), STEP)
    hidden = rl_step_time(LLAMA, NODE, rl_plan("one_step_off"), STEP)
    assert sum(both.breakdown.values()) == pytest.approx(both.seconds)
    assert hidden.seconds < both.seconds
    assert both.low < both.seconds < both.high


def test_packing_counts_micro_batches() -> None:
    plan = packed_plan(TrainingPlan(dp=4, row_tokens=1000), tokens=9500, mean_tokens=200)
    assert plan.micro_batches == 3  # 10 rows of 1,000 tokens, 5 % empty, on 4 ranks
    assert plan.attended_tokens == pytest.approx(260)


def test_importing_the_planner_is_cheap() -> None:
    program = (
        "import sys\n"
        "import rlsys.planner.rl_step\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize("max_running", [16, 256])
def test_many_rollouts_of_a_replica_take_the_time_of_all_of_them(
    max_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the rollouts is played, and gives the time of all within 2 %."""
    plan = GenerationPlan(max_running=max_running)
    many = replace(STEP, prompts=1, group_size=10_000)
    found = generation_time(LLAMA, NODE, plan, 1, many).seconds
    monkeypatch.setattr(rl_step, "MAX_PLAYED", many.rollouts)
    assert found == pytest.approx(generation_time(LLAMA, NODE, plan, 1, many).seconds, rel=0.02)


def test_the_work_of_a_prediction_does_not_grow_with_the_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: list[int] = []

    def replica_time(replica: object, lengths: list[float], *_: object) -> float:
        played.append(len(lengths))
        return float(len(lengths))

    monkeypatch.setattr(rl_step, "replica_time", replica_time)
    times = [
        generation_time(LLAMA, NODE, GenerationPlan(), 8, replace(STEP, group_size=size)).breakdown
        for size in (10**6, 10**8)
    ]
    assert max(played) == rl_step.MAX_PLAYED
    # a replica takes a second for each of its rollouts
    assert times[1]["decoding"] == pytest.approx(100 * times[0]["decoding"])
