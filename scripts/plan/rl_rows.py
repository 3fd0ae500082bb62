"""Published steps of reinforcement learning as plans.

NeMo-RL: groups of 32 on math prompts of about 150 tokens, two forward passes (old policy and
reference), packed rows, and half of the devices for each part when it runs one step off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlsys.errors import InvalidValue
from rlsys.planner.architecture import Architecture
from rlsys.planner.hardware import Cluster, cluster_of
from rlsys.planner.lengths import lognormal
from rlsys.planner.plans import GenerationPlan, TrainingPlan, Workload
from rlsys.planner.profiles import Constants
from rlsys.planner.rl_step import RLPlan, rl_step_time
from scripts.plan.published_rows import (
    NOT_SCORED,
    Case,
    Row,
    Skip,
    gpu_of,
    model_of,
    rows_of,
    value_of,
)

GROUP = 32
MATH_PROMPT = 150
# Layouts that issue 959 of NeMo-RL gives by the name of its recipes.
ISSUE_959 = {
    "Llama3.1-8B": {"gen_tp": 1, "train_tp": 2, "train_pp": 1},
    "Llama3.1-70B": {"gen_tp": 4, "train_tp": 8, "train_pp": 2},
}


def _training_plan(row: Row, model: Architecture, gpus: int, max_seq: int) -> TrainingPlan:
    layout = {**ISSUE_959.get(str(row["model"]), {}), **row["layout"]}
    tp, cp, pp = (int(layout.get(f"train_{name}", 1)) for name in ("tp", "cp", "pp"))
    dp = max(1, gpus // (tp * cp * pp))
    ep = min(int(layout.get("train_ep", 1)), max(model.experts, 1)) if model.is_moe else 1
    return TrainingPlan(
        dp=dp,
        tp=tp,
        cp=cp,
        pp=pp,
        ep=ep,
        shard="optimizer",
        row_tokens=float(max_seq),
        recompute="full" if model.parameters > 2e10 else "none",
        profile="megatron-2025b",
    )


def _nemo(row: Row, model: Architecture) -> tuple[RLPlan, Workload, int]:
    layout = {**ISSUE_959.get(str(row["model"]), {}), **row["layout"]}
    workload, gpus = row["workload"], int(row["num_gpus"])
    off_policy = "Off" in str(workload.get("policy"))
    max_seq = int(workload["max_seq"])
    rollouts = int(workload.get("gen_batch", 2048))
    if completion := workload.get("mean_gen_tokens"):
        mean = float(completion)
    else:
        mean = max(float(workload["mean_seq"]) - MATH_PROMPT, 16.0)
    part = gpus // 2 if off_policy else gpus
    gen_tp = int(layout.get("gen_tp", 1))
    generation = GenerationPlan(
        tp=gen_tp,
        weights="fp8" if row["precision"] == "fp8" else "bf16",
        max_running=1024,
        memory_fraction=0.6 if not off_policy else 0.85,
        profile="vllm-rl",
    )
    plan = RLPlan(
        mode="one_step_off" if off_policy else "synchronous",
        generation=generation,
        replicas=max(1, part // gen_tp),
        training=_training_plan(row, model, part, max_seq),
    )
    completions = lognormal(min(mean, 0.97 * (max_seq - MATH_PROMPT)), max_seq - MATH_PROMPT)
    step = Workload(
        prompts=max(1, rollouts // GROUP),
        group_size=GROUP,
        prompt_tokens=MATH_PROMPT,
        completions=completions,
    )
    updates = max(1, rollouts // int(workload.get("train_batch", 512)))
    return plan, step, updates


def _rlinf(row: Row, model: Architecture) -> tuple[RLPlan, Workload, int]:
    workload, gpus = row["workload"], int(row["num_gpus"])
    rollouts = int(workload.get("sequences") or workload["prompts"] * workload["n"])
    tp = int(row["layout"]["gen_tp"])
    prompt = 500
    generation = GenerationPlan(tp=tp, max_running=1024, memory_fraction=0.6, profile="sglang")
    sp = int(row["layout"].get("sp", 2))
    training = TrainingPlan(
        dp=gpus // sp,
        tp=sp,
        shard="optimizer",
        row_tokens=28672.0,
        recompute="full",
        profile="megatron-2025b",
    )
    plan = RLPlan(
        mode="synchronous",
        generation=generation,
        replicas=gpus // tp,
        training=training,
        forward_passes=1 if row["layout"]["system"] == "RLinf" else 2,
    )
    mean = float(workload["mean_response"])
    step = Workload(
        prompts=rollouts // 16,
        group_size=16,
        prompt_tokens=prompt,
        completions=lognormal(mean, int(workload["max_response"])),
    )
    return plan, step, 4


def _reason(row: Row) -> str | None:
    if row["table"] in NOT_SCORED:
        return NOT_SCORED[row["table"]]
    if value_of(row, "step_s") is None:
        return "no time of a step is measured"
    if row["table"] in ("verl_fully_async", "skyrl_mtp", "llamarl_paper"):
        return "lengths of completions are not stated"
    if row["table"] == "verl_671b":
        return "rollouts of a step are not stated"
    if row["table"].startswith("openrlhf"):
        return "four models with generate() of 2023 in hand-placed groups are not described"
    if row["workload"].get("algorithm") == "SWE":
        return "episodes with tools: their latency is not stated"
    return None


def _context(model: Architecture, longest: float) -> Architecture:
    """Return the model with room for rows that a table states beyond the default context."""
    return replace(model, max_context=max(model.max_context, int(longest) + 1))


def rl_case(row: Row) -> Case | Skip:
    """Return a step as a case, or the reason why it cannot be predicted."""
    if reason := _reason(row):
        return Skip(row, reason)
    try:
        model = model_of(row)
        gpu = gpu_of(row)
        plan, workload, updates = (_rlinf if row["table"] == "rlinf_verl" else _nemo)(row, model)
    except InvalidValue as error:
        return Skip(row, f"{error.field}={error.value}: {error.rule}")
    cluster: Cluster = cluster_of(gpu, int(row["num_gpus"]))
    measured = value_of(row, "step_s")
    assert measured is not None
    model = _context(model, workload.prompt_tokens + workload.completions.maximum)

    def predict(constants: Constants) -> float:
        return rl_step_time(
            model, cluster, plan, workload, updates=updates, constants=constants
        ).seconds

    return Case(row, "rl_step", plan.generation.profile, measured, predict)


def rl_cases() -> Iterator[Case | Skip]:
    """Yield all published steps of reinforcement learning."""
    for row in rows_of("rl_step"):
        yield rl_case(row)
