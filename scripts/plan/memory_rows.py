"""Published peak memory, and configurations that ran out of memory.

Tables report different peaks: tensors of the allocator, its reserved pool, or the whole process.
`_Facts` states which one, and the precision of states and the loss that each project documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlsys.errors import InvalidValue
from rlsys.planner.hardware import GIB
from rlsys.planner.memory import (
    FSDP_FP32,
    GB,
    MIXED,
    PURE_16_BIT,
    MemoryNeed,
    StateBytes,
    generation_memory_of,
    memory_of,
)
from rlsys.planner.plans import GenerationPlan, TrainingPlan
from rlsys.planner.profiles import Constants
from scripts.plan import decode_rows, training_rows
from scripts.plan.published_rows import (
    Case,
    Row,
    Skip,
    cluster_of_row,
    model_of,
    published,
    value_of,
)

COMPILED = 10.0
EAGER = 20.0
CHUNK = 1024.0  # tokens whose logits exist at once in chunked losses
QUANTISED_ACTIVATIONS = 1.8  # dequantised inputs and 32-bit adapters of quantised layers
METRICS = {"peak_mem_gib": GIB, "peak_mem_gb": GB, "peak_mem_mb": 2**20}


@dataclass(frozen=True)
class _Facts:
    """Facts of a row's software that decide its memory.

    Attributes:
        bytes_of: Bytes per parameter of the states.
        logit_bytes: Bytes per logit.
        loss_chunk: Tokens whose logits exist at once.
        whole_process: Whether the peak includes the CUDA context.
        trained: Trained parameters, or None for all.
        quantised: Whether frozen weights have 4 bits.
    """

    bytes_of: StateBytes = MIXED
    logit_bytes: float | None = None
    loss_chunk: float | None = None
    whole_process: bool = False
    trained: float | None = None
    quantised: bool = False


# DeepSpeed keeps 32-bit gradients of its shard until the step.
MEGATRON_DEEPSPEED = StateBytes(weight=2.0, gradient=2.0, optimizer=16.0)
BF16_WITH_FP32_GRADIENTS = StateBytes(weight=2.0, gradient=6.0, optimizer=16.0)


def _torchtune(row: Row) -> tuple[TrainingPlan, _Facts] | str:
    workload = row["workload"]
    options = workload.get("options", ["packed", "compile"])
    if "packed" not in options:
        return "rows are padded to unstated lengths"
    offloaded = {"activation offload", "8-bit AdamW", "LoRA", "4-bit QLoRA", "LoRA + QLoRA"}
    if offloaded & set(options) or len(options) > 6:
        return "offload, 8-bit optimizers and quantised adapters are not described"
    if row["num_gpus"] == 8:
        if workload.get("task") == "full":
            return "states are on the host"
        plan = TrainingPlan(dp=8, row_tokens=2048, micro_batch=2, recompute="full", lora_rank=16)
        return plan, _Facts(logit_bytes=COMPILED, loss_chunk=CHUNK)
    in_backward = "optimizer in backward" in options
    states = replace(PURE_16_BIT, gradient=0.2 if in_backward else 2.0)
    # logits in 16 bits are whole, their loss is computed in chunks
    chunked = "chunked cross entropy" in options
    logit_bytes = 4.0 if chunked else COMPILED if "compile" in options else EAGER
    plan = TrainingPlan(
        row_tokens=4096,
        micro_batch=2,
        recompute="full" if "activation checkpointing" in options else "none",
        compiled="compile" in options,
    )
    return plan, _Facts(bytes_of=states, logit_bytes=logit_bytes)


def _prime_rl(row: Row) -> tuple[TrainingPlan, _Facts] | str:
    model = model_of(row)
    plan = training_rows.plan_of(row, model)
    if isinstance(plan, str):
        return plan
    if row["workload"]["recompute"] == "Offload":
        return "activations are offloaded"
    task = row["workload"]["task"]
    chunk = None if task.startswith("SFT") else CHUNK
    return plan, _Facts(bytes_of=FSDP_FP32, logit_bytes=EAGER, loss_chunk=chunk)


def _training_table(row: Row) -> tuple[TrainingPlan, _Facts] | str:
    model = model_of(row)
    plan = training_rows.plan_of(row, model)
    if isinstance(plan, str):
        return plan
    if row["table"] == "bigscience_176b":
        sixteen_bit = row["precision"] == "bf16" and row["workload"]["hidden"] != 14400
        states = BF16_WITH_FP32_GRADIENTS if sixteen_bit else MEGATRON_DEEPSPEED
        return plan, _Facts(bytes_of=states, whole_process=True)
    return plan, _Facts(bytes_of=FSDP_FP32, logit_bytes=COMPILED)


def _litgpt(row: Row) -> tuple[TrainingPlan, _Facts] | GenerationPlan | str:
    workload = row["workload"]
    task = str(workload["task"])
    quantised = "quantization" in workload or task == "qlora"
    if "Inference" in task:
        weights = "w4" if quantised else "bf16"
        return GenerationPlan(weights=weights, memory_fraction=1.0)
    if task == "full":
        return "the optimizer is not stated"
    trained = float(workload.get("trainable_params", 4e6))
    states = replace(PURE_16_BIT, weight=0.56 if quantised else 2.0)
    ranks = int(row["layout"].get("fsdp", 1))
    plan = TrainingPlan(
        dp=ranks,
        row_tokens=float(workload.get("max_seq") or workload.get("longest_row") or 1024),
        micro_batch=float(workload.get("micro_batch", 1)),
        recompute="full" if ranks > 1 else "none",
        lora_rank=8,
        compiled=False,
    )
    return plan, _Facts(bytes_of=states, logit_bytes=4.0, trained=trained, quantised=quantised)


def _plan_of(row: Row) -> tuple[TrainingPlan, _Facts] | GenerationPlan | str:
    table = row["table"]
    if table == "torchtune":
        return _torchtune(row)
    if table == "prime_rl_bench":
        return _prime_rl(row)
    if table in ("bigscience_176b", "torchtitan_2024_12"):
        return _training_table(row)
    if table in ("litgpt_a100", "litgpt_a10g"):
        return _litgpt(row)
    if table in ("fastertransformer", "qwen3_speed"):
        plan = decode_rows.plan_of(row, model_of(row))
        return replace(plan, memory_fraction=1.0)
    if table == "lmdeploy":
        return "the engine fills the memory with KV cache"
    return "settings of the trainer are not stated"


def _predictor(row: Row) -> Case | Skip:
    try:
        model = model_of(row)
        if row["table"].startswith("litgpt"):
            model = replace(model, tied=False)  # LitGPT has no tied heads
        cluster = cluster_of_row(row)
        found = _plan_of(row)
    except InvalidValue as error:
        return Skip(row, f"{error.field}={error.value}: {error.rule}")
    if isinstance(found, str):
        return Skip(row, found)

    def need(constants: Constants) -> MemoryNeed:
        if isinstance(found, GenerationPlan):
            workload = row["workload"]
            context = float(workload.get("prompt", 0)) + float(
                workload.get("output") or workload.get("longest_row") or 0
            )
            batch = float(workload.get("batch", 1))
            static = row["table"] == "fastertransformer"
            prefill = batch * float(workload.get("prompt", 1)) if static else 0.0
            return generation_memory_of(
                model, cluster, found, batch, context, prefill_tokens=prefill, constants=constants
            )
        plan, facts = found
        if facts.quantised:
            scale = QUANTISED_ACTIVATIONS * constants["activation_scale"]
            constants = constants.with_values(activation_scale=scale)
        quantised = 2.0 - facts.bytes_of.weight if facts.quantised else 0.0
        extra = quantised * model.vocab * model.hidden  # the embedding keeps 16 bits
        found_need = memory_of(
            model,
            cluster,
            plan,
            bytes_of=facts.bytes_of,
            logit_bytes=facts.logit_bytes,
            loss_chunk=facts.loss_chunk,
            trained=facts.trained,
            constants=constants,
        )
        return replace(found_need, total=found_need.total + extra)

    whole = row["table"] == "fastertransformer" or (
        isinstance(found, tuple) and found[1].whole_process
    )
    is_oom = bool(value_of(row, "oom"))

    def predict(constants: Constants) -> float:
        bytes_needed = need(constants)
        context = bytes_needed.breakdown["context"]
        return bytes_needed.total - (0 if whole or is_oom else context)

    if is_oom:
        capacity = cluster.gpu.memory_bytes
        return Case(row, "oom", "", capacity, predict, baseline=0.0)
    measured = next(
        value * unit
        for metric, unit in METRICS.items()
        if (value := value_of(row, metric)) is not None
    )
    extra = 0.0 if whole else 1.0
    return Case(row, "memory", "", measured, predict, baseline=extra)


def memory_cases() -> Iterator[Case | Skip]:
    """Yield all rows with a peak of memory, or that ran out of it."""
    for row in published()["rows"]:
        names = {one["metric"] for one in row["measured"]}
        if row["kind"] in ("rl_step", "serving") or not names & {*METRICS, "oom"}:
            continue
        yield _predictor(row)
