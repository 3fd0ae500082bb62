"""Published generation rows as plans."""

from __future__ import annotations

from collections.abc import Iterator

from rlsys.errors import InvalidValue
from rlsys.planner.architecture import Architecture
from rlsys.planner.decode_time import (
    largest_batch,
    static_batch_time,
    steady_token_time,
)
from rlsys.planner.hardware import GPUS, Cluster
from rlsys.planner.memory import kv_capacity
from rlsys.planner.plans import GenerationPlan
from rlsys.planner.profiles import Constants
from scripts.plan.published_rows import (
    NOT_SCORED,
    Case,
    Row,
    Skip,
    cluster_of_row,
    model_of,
    rows_of,
    value_of,
)

STATIC = ("fastertransformer", "cursor_70b", "trtllm_v06")
MAX_BATCH = {"trtllm_v1": 4096, "lmdeploy": 256}  # trtllm-bench caps the rows of a rank at 4,096
BLOCK_SCALED = ("Qwen3", "DeepSeek", "MiniMax")


def weights_of(row: Row, model: Architecture) -> str:
    """Return the precision of a row's weights."""
    text = str(row["precision"])
    if "gpt-oss" in model.name:
        return "w4" if GPUS[cluster_of_row(row).gpu.name].family != "blackwell" else "fp4"
    if "fp4" in text:
        return "fp4"
    if "int4" in text:
        return "w4"
    if "fp8" in text:
        if row["table"] == "trtllm_v1":  # checkpoints of ModelOpt: one scale per matrix
            return "fp8"
        return "fp8_block" if model.name.startswith(BLOCK_SCALED) else "fp8"
    return "bf16"


def profile_of(row: Row) -> str:
    """Return the software profile of a row."""
    table, software = row["table"], str(row.get("software") or "").lower()
    if table == "fastertransformer":
        return "fastertransformer"
    if table in ("cursor_70b", "lmdeploy", "trtllm_v06"):
        return "engine-2023"
    for name in ("sglang", "vllm", "transformers"):
        if name in software:
            return name
    return "trtllm"


def is_modern(row: Row) -> bool:
    """Return whether a row is of a serving engine of 2024 or later."""
    return profile_of(row) in ("vllm", "sglang", "trtllm")


def plan_of(row: Row, model: Architecture) -> GenerationPlan:
    """Return the plan of a row."""
    layout, workload = row["layout"], row["workload"]
    table = row["table"]
    tp, pp = int(layout.get("tp", 1)), int(layout.get("pp", 1))
    weights = weights_of(row, model)
    profile = profile_of(row)
    attention_dp = int(layout.get("attention_dp", 1) or 1)
    ep = int(layout.get("moe_ep", 1) or 1)
    if table == "trtllm_v1" and model.is_moe and tp > 1:
        attention_dp, ep = tp, tp
    elif model.is_moe and 1 < ep == int(layout.get("moe_tp", 1)):
        # the table has multiplied both degrees: ranks of attention hold the experts, one group each
        tp, attention_dp = ep, ep if attention_dp > 1 else 1
    elif model.is_moe and "moe_tp" in layout:
        # the experts' ranks are those of attention, in data and tensor parallel groups
        ranks = max(tp * attention_dp, int(layout["moe_tp"]) * ep)
        tp, attention_dp = ranks, ranks // tp
    # checkpoints of ModelOpt state an 8-bit cache, and TensorRT-LLM follows them
    kv = "fp8" if profile == "trtllm" and weights in ("fp8", "fp4") else "bf16"
    return GenerationPlan(
        tp=tp,
        pp=pp,
        ep=min(ep, max(model.experts, 1)),
        attention_dp=attention_dp,
        weights=weights,
        kv=kv,
        max_running=MAX_BATCH.get(table, int(workload.get("concurrency", 256))),
        memory_fraction=0.95 if table == "trtllm_v1" else 0.9,
        profile=profile,
    )


def _token_rate(row: Row) -> float | None:
    """Return the measured tokens per second of all rows under steady load, if a table states it."""
    if row["table"] in ("silybench", "lmdeploy"):
        return value_of(row, "output_tokens_per_s")
    return None


def _token_seconds(row: Row) -> float | None:
    """Return the measured mean seconds between tokens of a row, under steady load."""
    if rate := _token_rate(row):
        concurrency = row["workload"].get("concurrency") or row["workload"]["batch"]
        return float(concurrency) / rate
    tpot = value_of(row, "tpot_ms")
    return None if tpot is None else tpot / 1e3


def decode_case(row: Row) -> Case | Skip:
    """Return a generation row as a case, or the reason why it cannot be predicted."""
    table, workload = row["table"], row["workload"]
    if table in NOT_SCORED:
        return Skip(row, NOT_SCORED[table])
    if value_of(row, "oom"):
        return Skip(row, "out of memory: see the memory table")
    try:
        model = model_of(row)
        plan = plan_of(row, model)
        cluster = cluster_of_row(row)
    except InvalidValue as error:
        return Skip(row, f"{error.field}={error.value}: {error.rule}")
    prompt, output = float(workload["prompt"]), float(workload["output"])
    if prompt + output > model.max_context * 4:
        return Skip(row, "longer than the model's context")
    if table == "trtllm_v1":
        return _maximum_load(row, model, cluster, plan, prompt, output)
    if table in STATIC or table == "qwen3_speed":
        return _static(row, model, cluster, plan, prompt, output)
    seconds = _token_seconds(row)
    if seconds is None:
        return Skip(row, "no time between tokens is measured")
    concurrency = float(workload.get("concurrency") or workload["batch"])
    concurrency *= plan.attention_dp
    waits = _token_rate(row) is not None  # rates count the rows that wait for room, TPOT does not

    def predict(constants: Constants) -> float:
        kv_tokens = workload.get("kv_tokens") or kv_capacity(
            model, cluster, plan, row_tokens=prompt + output, constants=constants
        )
        running = min(concurrency, _largest_batch(plan, kv_tokens, prompt, output))
        token = steady_token_time(model, cluster, plan, running, prompt, output, constants)
        return token * concurrency / running if waits else token

    return Case(row, "decode", plan.profile, seconds, predict)


def _largest_batch(plan: GenerationPlan, kv_tokens: float, prompt: float, output: float) -> float:
    """Return the rows that run at once.

    TensorRT-LLM starts a row when the cache has room for all its tokens (GUARANTEED_NO_EVICT).
    """
    if plan.profile == "trtllm":
        return max(1.0, kv_tokens // (prompt + output))
    return largest_batch(kv_tokens, prompt, output)


def _static(
    row: Row,
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    prompt: float,
    output: float,
) -> Case | Skip:
    batch = float(row["workload"]["batch"])
    latency = value_of(row, "latency_ms")
    seconds = None if latency is None else latency / 1e3
    if rate := value_of(row, "output_tokens_per_s_per_gpu"):
        seconds = batch * output / (rate * float(row["num_gpus"]))
    if seconds is None:
        return Skip(row, "only the time to the first token is measured")

    def predict(constants: Constants) -> float:
        return static_batch_time(model, cluster, plan, batch, prompt, output, constants)

    return Case(row, "decode", plan.profile, seconds, predict)


def _maximum_load(
    row: Row,
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    prompt: float,
    output: float,
) -> Case | Skip:
    rate = value_of(row, "output_tokens_per_s")
    if not rate:
        return Skip(row, "no rate is measured")
    requests = float(row["workload"]["requests"])
    # rows start one after another, as the tokens of a step allow: rows x (1 + prompt / output)
    stagger = output * prompt / (prompt + output)

    def predict(constants: Constants) -> float:
        kv_tokens = kv_capacity(
            model, cluster, plan, row_tokens=prompt + output, constants=constants
        )
        limit = plan.max_running * plan.attention_dp
        running = min(_largest_batch(plan, kv_tokens, prompt, output), limit, requests)
        full, half = (
            steady_token_time(model, cluster, plan, rows, prompt, output, constants)
            for rows in (running, running / 2)
        )
        # the first rows start and the last ones end over `stagger` steps, half of them at once
        steps = requests * output / running - stagger
        return (steps * full + 2 * stagger * half) / (requests * output)

    return Case(row, "decode", plan.profile, 1 / rate, predict)


def decode_cases() -> Iterator[Case | Skip]:
    """Yield all published generation rows."""
    for row in rows_of("decode"):
        yield decode_case(row)
