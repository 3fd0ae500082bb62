"""Time of generation: one decoding step, a prefill, and steady load.

    decode_step_time(batch, context)   one token for each of `batch` rows
    prefill_time(tokens, length)       prompts
    steady_token_time(concurrency)     both, mixed by continuous batching

A decoding step reads every weight once and the KV cache of every row. At large batches products
take over. Times are those of measured kernels (`kernels.py`), plus small kernels per layer,
all-reduces of tensor parallelism, and the host's work per step and per row, which is larger in an
RL framework than in a serving benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from rlsys.errors import require
from rlsys.planner.architecture import Architecture, Gemm
from rlsys.planner.communication import (
    all_to_all_time,
    engine_all_reduce_time,
    group_of,
)
from rlsys.planner.hardware import GB, TERA, Cluster
from rlsys.planner.kernels import kernels_of
from rlsys.planner.plans import Estimate, GenerationPlan
from rlsys.planner.profiles import Constants, fitted_constants, interval
from rlsys.planner.roofline import BYTES_OF

MLA_DECODE_SHARE: Final = 0.45  # of the peak, for absorbed attention of many heads
PIPELINE_HOP_S: Final = 20e-6
READS: Final = ("products", "experts", "kv_cache", "head")  # parts that read memory
STEP_TOKENS: Final = 8192  # of prompts in one step of an engine
SMALL_KERNELS: Final = 6  # reads and writes of the residual stream per layer


def _gemms_time(
    cluster: Cluster, gemms: Sequence[Gemm], tokens: float, tp: int, dtype: str
) -> float:
    gemm = kernels_of(cluster.gpu).gemm
    return sum(gemm(tokens, *one.local(tp), dtype) for one in gemms)


def _experts_time(
    model: Architecture, cluster: Cluster, plan: GenerationPlan, tokens: float, constants: Constants
) -> float:
    """Return the seconds of one layer's routed experts on the slowest rank."""
    ep = min(plan.ep, model.experts)
    split = max(plan.num_gpus // plan.pp // ep, 1)
    weights = sum(one.parameters for one in model.expert) / split
    local = model.experts / ep
    dtype = plan.weights
    seconds = kernels_of(cluster.gpu).experts(tokens, model.top_k, local, ep, weights, dtype)
    if ep > 1:
        seconds *= constants["decode_imbalance"]
    return seconds / constants["decode_experts"]


def _layers_time(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    tokens: float,
    constants: Constants,
) -> dict[str, float]:
    """Return the seconds of all layers' products, traffic and collectives for `tokens` tokens."""
    tp = plan.tp
    attention_tp = max(tp // plan.attention_dp, 1)
    attention_tokens = tokens / plan.attention_dp
    dtype = plan.weights
    shape_dtype = "bf16" if dtype == "w4" and model.is_moe else dtype
    products = model.attention_layers * _gemms_time(
        cluster, model.attention, attention_tokens, attention_tp, shape_dtype
    )
    products += model.linear_layers * _gemms_time(
        cluster, model.linear, attention_tokens, attention_tp, shape_dtype
    )
    products += model.dense_layers * _gemms_time(cluster, model.dense, tokens, tp, shape_dtype)
    experts = 0.0
    if model.moe_layers:
        products += model.moe_layers * _gemms_time(
            cluster, model.moe_common, tokens, tp, shape_dtype
        )
        experts = model.moe_layers * _experts_time(model, cluster, plan, tokens, constants)
    bandwidth = cluster.gpu.bandwidth * TERA
    small = SMALL_KERNELS * 2 * tokens * model.hidden / bandwidth
    layers = model.layers * (constants["decode_layer"] + small)
    layers += model.attention_layers * model.qk_norm * constants["decode_norm"]
    layers += model.moe_layers * constants["decode_routing"]
    size = 2 * tokens * model.hidden
    reduce = engine_all_reduce_time(cluster, attention_tp, size / plan.attention_dp)
    blocks = model.attention_layers + model.linear_layers
    communication = blocks * reduce
    waits = blocks * math.log2(attention_tp)
    if plan.attention_dp > 1:
        group = group_of(cluster, tp)
        reached = tp * (1 - (1 - 1 / tp) ** max(model.top_k, 1))
        sent = size / plan.attention_dp * reached
        communication += 2 * model.layers * all_to_all_time(cluster, group, sent)
    else:
        networks = model.dense_layers + model.moe_layers
        communication += networks * engine_all_reduce_time(cluster, tp, size)
        waits += networks * math.log2(tp)
    communication *= constants["decode_all_reduce"]
    communication += waits * constants["decode_wait"]
    if plan.pp > 1:
        communication += (plan.pp - 1) * (PIPELINE_HOP_S + size / tp / (cluster.gpu.network * GB))
    return {
        "products": products / constants["decode_gemm"],
        "experts": experts,
        "layers": layers,
        "communication": communication,
    }


def _kv_time(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    batch: float,
    context: float,
    constants: Constants,
    queries: int = 1,
) -> float:
    """Return the seconds of all layers' decoding attention, with new tokens of each row."""
    kernels = kernels_of(cluster.gpu)
    attention_tp = max(plan.tp // plan.attention_dp, 1)
    rows = batch / plan.attention_dp
    if model.kv_lora:
        width = model.kv_lora + model.rope_dim
        num_bytes = rows * context * width * BYTES_OF[plan.kv]
        flops = 2 * rows * context * model.heads / attention_tp * (width + model.kv_lora)
        flops *= queries
        seconds = max(
            num_bytes / kernels.bandwidth, flops / kernels.gpu.peak("bf16") / MLA_DECODE_SHARE
        )
        seconds = model.attention_layers * max(seconds * 1.2, 8e-6)
    else:
        units = rows * max(model.kv_heads / attention_tp, 1)
        full = model.attention_layers - model.window_layers
        seconds = full * kernels.decode(units, context, model.head_dim, plan.kv)
        if model.window_layers:
            seen = min(context, model.window)
            seconds += model.window_layers * kernels.decode(units, seen, model.head_dim, plan.kv)
    return seconds / constants["decode_attention"]


@lru_cache(maxsize=1 << 16)
def decode_parts(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    batch: float,
    context: float,
    constants: Constants,
    drafted: int = 0,
) -> dict[str, float]:
    """Return the seconds of a decoding step by part.

    With speculation a step computes `drafted` more tokens of each row, and reads the KV cache of
    the row once for all of them.
    """
    profile = constants.profile(plan.profile)
    tokens = batch * (1 + drafted)
    parts = _layers_time(model, cluster, plan, tokens, constants)
    queries = 1 + drafted
    parts["kv_cache"] = _kv_time(model, cluster, plan, batch, context, constants, queries)
    n, k = model.head.local(plan.tp)
    parts["head"] = kernels_of(cluster.gpu).gemm(tokens, n, k, "bf16") / constants["decode_gemm"]
    if cluster.gpu.decode_reads:
        for name in READS:
            parts[name] *= constants[cluster.gpu.decode_reads]
    factor = profile.of(moe=model.is_moe)
    parts = {name: seconds * factor for name, seconds in parts.items()}
    parts["host"] = profile.step_host + profile.row_host * batch / plan.attention_dp
    return parts


def decode_step_time(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    batch: float,
    context: float,
    *,
    constants: Constants | None = None,
) -> Estimate:
    """Return the time of one decoding step of a replica.

    Args:
        model: The model.
        cluster: Where the replica is.
        plan: The replica's layout.
        batch: Rows that decode.
        context: Mean tokens of a row so far.
        constants: Constants and profiles; those of the package by default.

    Raises:
        InvalidValue: The context is longer than the model's.
    """
    require(
        batch >= 1 and 0 < context <= model.max_context,
        "context",
        context,
        rule=f"needs a row or more, and at most the context of {model.name}, {model.max_context}",
        fix="Use shorter rows.",
    )
    constants = constants or fitted_constants()
    parts = decode_parts(model, cluster, plan, batch, context, constants)
    seconds = sum(parts.values())
    low, high = interval(seconds, constants.profile(plan.profile).spread_of(moe=model.is_moe))
    return Estimate(seconds=seconds, low=low, high=high, breakdown=parts)


@lru_cache(maxsize=1 << 16)
def prefill_seconds(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    rows: float,
    length: float,
    constants: Constants,
) -> float:
    """Return the seconds of the prefill of `rows` prompts of `length` tokens at once."""
    tokens = rows * length
    profile = constants.profile(plan.profile)
    parts = _layers_time(model, cluster, plan, tokens, constants)
    n, k = model.head.local(plan.tp)
    head = kernels_of(cluster.gpu).gemm(rows, n, k, "bf16")
    seconds = sum(parts.values()) + _prefill_attention(model, cluster, plan, rows, length) + head
    return seconds * profile.of(moe=model.is_moe) * constants["prefill_scale"]


def _prefill_attention(
    model: Architecture, cluster: Cluster, plan: GenerationPlan, rows: float, length: float
) -> float:
    """Return the seconds of all layers' attention of `rows` prompts of `length` tokens."""
    attention_tp = max(plan.tp // plan.attention_dp, 1)
    units = rows / plan.attention_dp * max(model.heads / attention_tp, 1)
    width = (model.head_dim + model.value_dim) / 2
    kernels = kernels_of(cluster.gpu)
    return model.attention_layers * kernels.prefill(units, length, width, model.attended(length))


def prefill_time(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    rows: float,
    length: float,
    *,
    constants: Constants | None = None,
) -> Estimate:
    """Return the time of the prefill of `rows` prompts of `length` tokens.

    Raises:
        InvalidValue: The prompt is longer than the model's context.
    """
    require(
        rows > 0 and 0 < length <= model.max_context,
        "prompt_tokens",
        length,
        rule=f"must be at most the context of {model.name}, {model.max_context}",
        fix="Use shorter prompts.",
    )
    constants = constants or fitted_constants()
    profile = constants.profile(plan.profile)
    seconds = prefill_seconds(model, cluster, plan, rows, length, constants) + profile.step_host
    low, high = interval(seconds, profile.spread_of(moe=model.is_moe))
    return Estimate(seconds=seconds, low=low, high=high, breakdown={"prefill": seconds})


def steady_token_time(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    concurrency: float,
    prompt: float,
    output: float,
    constants: Constants,
) -> float:
    """Return the mean seconds between tokens of a row while `concurrency` rows run.

    Each row that ends is replaced, so that `concurrency` prompts are prefilled in the `output`
    steps of a row. A prompt joins a decoding step, which reads the weights once for all tokens.
    """
    context = min(prompt + output / 2, model.max_context)
    step = sum(decode_parts(model, cluster, plan, concurrency, context, constants).values())
    starting = max(concurrency - 1, 0) / output
    together = max(starting, 1.0)
    added = _prompts_seconds(model, cluster, plan, concurrency, together, prompt, constants)
    profile = constants.profile(plan.profile)
    return step + starting / together * added * constants["prefill_mixed"] * profile.mixing


@lru_cache(maxsize=1 << 16)
def _prompts_seconds(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    decoding: float,
    rows: float,
    length: float,
    constants: Constants,
) -> float:
    """Return the seconds that `rows` prompts add to steps in which `decoding` rows decode."""
    tokens = rows * length
    pieces = math.ceil(tokens / STEP_TOKENS)
    alone = sum(_layers_time(model, cluster, plan, decoding, constants).values())
    mixed = _layers_time(model, cluster, plan, decoding + tokens / pieces, constants)
    seconds = pieces * (sum(mixed.values()) - alone)
    seconds += _prefill_attention(model, cluster, plan, rows, length)
    profile = constants.profile(plan.profile)
    return seconds * profile.of(moe=model.is_moe) * constants["prefill_scale"]


def static_batch_time(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    batch: float,
    prompt: float,
    output: float,
    constants: Constants,
) -> float:
    """Return the seconds in which a static batch is prefilled and generates `output` tokens."""
    seconds = prefill_seconds(model, cluster, plan, batch, prompt, constants)
    pieces = 4
    for piece in range(pieces):
        context = prompt + output * (piece + 0.5) / pieces
        step = sum(decode_parts(model, cluster, plan, batch, context, constants).values())
        seconds += output / pieces * step
    return seconds


def largest_batch(kv_tokens: float, prompt: float, output: float) -> float:
    """Return the rows that run at once when the KV cache holds `kv_tokens` tokens.

    Rows are at random stages, so a row holds its prompt and half of its output on average.
    """
    return max(1.0, math.floor(kv_tokens / (prompt + output / 2)))
