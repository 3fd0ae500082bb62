"""Published training rows as plans.

Rows state different things: tokens/s per GPU, seconds per step, or FLOP/s by three conventions. All
become seconds per step. Settings that a table does not state, but its page or paper does, are here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlsys.errors import InvalidValue
from rlsys.planner.architecture import Architecture
from rlsys.planner.hardware import TERA
from rlsys.planner.plans import TrainingPlan
from rlsys.planner.profiles import Constants
from rlsys.planner.training_time import train_step_time
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

PROFILES = {
    "automodel": "automodel",
    "bigscience_176b": "megatron-deepspeed",
    "bigscience_final": "megatron-deepspeed",
    "internevo": "internevo",
    "korthikanti": "megatron-unfused",
    "megatron_2021": "megatron-unfused",
    "mosaicml_mpt": "llm-foundry",
    "mt_nlg": "megatron-deepspeed",
    "prime_rl_bench": "fsdp",
    "torchtitan_2024_08": "fsdp-compiled",
    "torchtitan_2024_12": "fsdp-compiled",
    "torchtitan_async_tp": "fsdp-compiled",
    "torchtitan_h200": "fsdp-compiled",
    "ultrascale": "fsdp",
}
EAGER = ("mosaicml_mpt", "prime_rl_bench", "ultrascale", "automodel")
RECOMPUTE = {
    "no": "none",
    "full": "full",
    "Recompute": "full",
    "Offload": "full",
    "selective": "selective",
    "selective op": "selective",
    "selective layer": "selective",
    "norm, act": "none",
}
UNSTATED = {
    "deepseek_v3_report": {"global_batch": 15360, "micro_batch": 1},
    "ultrascale": {"seq": 4096, "global_batch": 1},
    "mt_nlg": {"micro_batch": 1},
    "korthikanti": {"micro_batch": 1},
}


def profile_of(row: Row) -> str:
    """Return the software profile of a row. Megatron's differ by the container's half-year."""
    if known := PROFILES.get(row["table"]):
        return known
    if row["table"] in ("dgxc_2025", "moe_zoo_qwen3"):
        return "megatron-2025a"
    found = re.search(r"container (\d\d)\.(\d\d)", str(row.get("software")))
    if found is None:
        return "megatron-2024"
    late = int(found[2]) >= 6
    return f"megatron-20{found[1]}{'b' if late else 'a'}"


def precision_of(row: Row) -> str:
    """Return the precision of products: bf16, fp8 or fp4.

    Scales per row made products of early 2025 no faster than 16-bit ones.
    """
    text = str(row["precision"])
    if "rowwise" in text:
        return "bf16"
    if "fp4" in text:
        return "fp4"
    if "fp8" in text or not text:
        return "fp8"
    return "bf16"


def hardware_flops(model: Architecture, tokens: float, seq: float, recompute: bool) -> float:
    """Return FLOPs by Megatron's formula: attention not halved, recomputation counted."""
    h, layers = model.hidden, model.layers
    passes = 4 if recompute else 3
    return (
        passes
        * 24
        * tokens
        * layers
        * h
        * h
        * (1 + seq / (6 * h) + model.vocab / (16 * layers * h))
    )


def nemo_flops(model: Architecture, tokens: float, seq: float) -> float:
    """Return FLOPs by NeMo 24.03's formula: no recomputation, attention not halved."""
    width = model.heads * (model.head_dim + model.value_dim)
    return 6 * tokens * (model.active_parameters + model.attention_layers * width * seq)


def measured_seconds(row: Row, model: Architecture, plan: TrainingPlan) -> float | None:
    """Return the measured seconds of a step of the plan, or None if the row has no time."""
    gpus = float(row["num_gpus"])
    tokens = plan.step_tokens
    if rate := value_of(row, "tokens_per_s_per_gpu"):
        return tokens / (rate * gpus)
    if seconds := value_of(row, "step_s"):
        return seconds
    if rate := value_of(row, "hw_tflops_per_gpu"):
        recompute = plan.recompute == "full"
        return hardware_flops(model, tokens, plan.row_tokens, recompute) / (rate * gpus * TERA)
    rate = value_of(row, "model_tflops_per_gpu")
    if not rate:
        return None
    if row["table"] == "nemo_long":
        flops = nemo_flops(model, tokens, plan.row_tokens)
    else:
        flops = model.model_flops(plan.row_tokens) * tokens
    return flops / (rate * gpus * TERA)


def plan_of(row: Row, model: Architecture) -> TrainingPlan | str:
    """Return the plan of a row, or the reason why it has none."""
    table, layout = row["table"], row["layout"]
    workload: dict[str, Any] = {**UNSTATED.get(table, {}), **row["workload"]}
    if "seq" not in workload:
        return "sequence length is not stated"
    gpus = int(row["num_gpus"])
    tp, cp, pp = (int(layout.get(name, 1)) for name in ("tp", "cp", "pp"))
    dp = int(layout.get("dp", max(1, gpus // (tp * cp * pp))))
    if table in ("bigscience_176b", "mt_nlg") and dp * tp * pp > gpus:
        dp = max(1, gpus // (tp * pp))
    micro_batch = float(workload.get("micro_batch", 0) or 0)
    if not micro_batch:
        local = workload.get("local_batch")
        micro_batch = float(local) if local and pp == 1 else 1.0
        if table == "megatron_2021":
            micro_batch = 4.0 if pp == 1 else 1.0
    micro_batches = _micro_batches(table, workload, micro_batch, dp, pp)
    shard, shard_ranks = _sharding(row, dp * cp)
    vp = int(layout.get("vp", layout.get("vpp", 1)))
    if table == "korthikanti" and 1 < pp < 64:
        vp = 3
    return TrainingPlan(
        dp=dp,
        tp=tp,
        cp=cp,
        pp=pp,
        vp=vp if pp > 1 else 1,
        ep=_expert_ranks(row, model, gpus),
        etp=int(layout.get("etp", 1)),
        shard=shard,
        shard_ranks=shard_ranks,
        row_tokens=float(workload["seq"]),
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=_recompute(row),
        precision=precision_of(row),
        attention=_attention(row),
        compiled=bool(workload.get("compile", table not in EAGER)),
        balanced_context=not table.startswith("torchtitan"),
        balanced_routing=workload.get("routing") != "dropless" and table != "prime_rl_bench",
        async_tp=bool(layout.get("async_tp", False)),
        sequence_parallel=bool(layout.get("sp", table not in ("bigscience_176b", "mt_nlg"))),
        lora_rank=16 if "LoRA" in str(workload.get("task", "")) else 0,
        profile=profile_of(row),
    )


def _expert_ranks(row: Row, model: Architecture, gpus: int) -> int:
    if not model.is_moe:
        return 1
    stated = row["layout"].get("ep")
    if stated is None and row["table"] == "automodel":
        stated = gpus  # Automodel splits experts over all ranks
    return min(int(stated or 1), model.experts)


def _attention(row: Row) -> Any:
    if PROFILES.get(row["table"]) in ("megatron-unfused", "megatron-deepspeed"):
        return "unfused"
    if row["table"] == "mosaicml_mpt" or row["table"].startswith("torchtitan"):
        return "fused_2"
    return "fused_2" if row["workload"].get("attention") == "flash_attention_2" else "fused"


def _micro_batches(
    table: str, workload: dict[str, Any], micro_batch: float, dp: int, pp: int
) -> int:
    if table == "prime_rl_bench":
        return int(workload["micro_batches"])
    if "grad_accum" in workload and pp == 1:
        return int(workload["grad_accum"])
    rows = 0.0  # of a step on each data parallel rank
    if tokens := workload.get("tokens_per_batch"):
        rows = tokens / workload["seq"] / dp
    elif batch := workload.get("global_batch"):
        rows = batch / dp
    elif local := workload.get("local_batch"):
        rows = local
    if rows:
        return max(1, round(rows / micro_batch))
    return 8 if table == "nemo_long" else 1


def _sharding(row: Row, ranks: int) -> tuple[Any, int]:
    layout = row["layout"]
    if zero := layout.get("zero1"):
        return "optimizer", ranks if zero == -1 else int(zero)
    if row["table"] in ("mosaicml_mpt", "torchtitan_2024_12", "torchtitan_2024_08"):
        whole = layout.get("sharding", "FULL_SHARD") == "FULL_SHARD"
        return ("parameters" if whole else "gradients"), 0
    if row["table"] in ("torchtitan_async_tp", "torchtitan_h200", "prime_rl_bench", "automodel"):
        return "parameters", 0
    if (layout.get("fsdp") and int(layout["fsdp"]) > 1) or layout.get("fsdp") is True:
        return "parameters", 0
    if layout.get("zero") == 0 or row["table"] in ("megatron_2021", "korthikanti", "mt_nlg"):
        return "none", 0
    return "optimizer", 0


def _recompute(row: Row) -> Any:
    stated = str(row["workload"].get("recompute", "no"))
    if row["table"] == "korthikanti":
        return "attention"
    if row["table"] == "mt_nlg":
        return "full"
    return RECOMPUTE.get(stated, "none")


def _skip_reason(row: Row) -> str | None:
    if row["table"] in NOT_SCORED:
        return NOT_SCORED[row["table"]]
    if row["table"] == "prime_rl_bench" and row["gpu"] == "B200":
        return "flash attention 2 on B200 is not tuned"
    if "V4" in str(row["model"]):
        return "compressed attention of DeepSeek-V4 is not described"
    if not row.get("num_gpus"):
        return "number of GPUs is not stated"
    if row["workload"].get("tokens") and not row["layout"]:
        return "layout is not stated"
    return None


def training_case(row: Row) -> Case | Skip:
    """Return a training row as a case, or the reason why it cannot be predicted."""
    if reason := _skip_reason(row):
        return Skip(row, reason)
    try:
        model = model_of(row)
        plan = plan_of(row, model)
        if isinstance(plan, str):
            return Skip(row, plan)
        plan.check(model)
    except InvalidValue as error:
        return Skip(row, f"{error.field}={error.value}: {error.rule}")
    measured = measured_seconds(row, model, plan)
    if measured is None:
        return Skip(row, "no time is measured")
    cluster = cluster_of_row(row)
    found = plan

    def predict(constants: Constants) -> float:
        return train_step_time(model, cluster, found, constants=constants).seconds

    flops = model.model_flops(plan.row_tokens) * plan.step_tokens
    precision = plan.precision if cluster.gpu.fp8 else "bf16"
    peak = cluster.gpu.peak(precision) * float(row["num_gpus"])
    return Case(
        row=row,
        kind="moe" if model.is_moe else "dense",
        profile=plan.profile,
        measured=measured,
        predict=predict,
        baseline=flops / peak,
    )


def training_cases() -> Iterator[Case | Skip]:
    """Yield all published training rows."""
    for row in rows_of("train_throughput"):
        yield training_case(row)
