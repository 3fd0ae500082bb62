"""Time of one step of reinforcement learning, in closed form.

    rollouts ─► dealt to replicas ─► event loop over decoding steps with a KV limit ─► generation
    tokens   ─► log-probabilities (forward passes) and training (packed rows)       ─► training
    synchronous:           generation + log-probabilities + training + sync + fixed
    one step off, devices split: max(generation, log-probabilities + training) + sync + fixed

The forms describe published systems. The simulation of this project's controller replaces them
where exact order and staleness matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rlsys.errors import require
from rlsys.planner.architecture import Architecture
from rlsys.planner.decode_time import decode_parts, prefill_seconds
from rlsys.planner.hardware import GB, Cluster
from rlsys.planner.memory import kv_capacity
from rlsys.planner.plans import Estimate, GenerationPlan, TrainingPlan, Workload
from rlsys.planner.profiles import Constants, fitted_constants, interval
from rlsys.planner.training_time import train_step_time

Mode = Literal["synchronous", "one_step_off"]
CONTEXT_STEP = 1.1  # decoding times are computed at contexts that differ by this factor
BATCH_STEP = 1.03

# Rollouts of a replica that are played at most: this number, or this multiple of those at once.
MAX_PLAYED, PLAYED_ROUNDS = 4096, 8


@dataclass(frozen=True, kw_only=True)
class RLPlan:
    """Devices and layouts of a step.

    Attributes:
        mode: Whether generation and training take turns, or run at once one step apart.
        generation: Layout of a replica.
        replicas: Number of replicas.
        training: Layout of the trainer. Its micro-batches follow from the workload.
        forward_passes: Passes for log-probabilities of the policy before the step, and of a
            reference.
    """

    mode: Mode
    generation: GenerationPlan
    replicas: int
    training: TrainingPlan
    forward_passes: int = 2


class _Replica:
    """Clock of a replica: decoding times on a coarse grid of batches and contexts."""

    def __init__(
        self, model: Architecture, cluster: Cluster, plan: GenerationPlan, constants: Constants
    ) -> None:
        self.arguments = (model, cluster, plan)
        self.constants = constants
        self.known: dict[tuple[int, int], float] = {}

    def step(self, batch: int, context: float) -> float:
        """Return the seconds of a decoding step."""
        key = (
            round(math.log(max(batch, 1)) / math.log(BATCH_STEP)),
            round(math.log(max(context, 16)) / math.log(CONTEXT_STEP)),
        )
        found = self.known.get(key)
        if found is None:
            parts = decode_parts(
                *self.arguments, BATCH_STEP ** key[0], CONTEXT_STEP ** key[1], self.constants
            )
            found = self.known[key] = sum(parts.values())
        return found


def replica_time(
    replica: _Replica, lengths: Sequence[float], prompt: float, limit: int, kv_tokens: float
) -> float:
    """Return the seconds in which a replica finishes rollouts of these lengths.

    Rollouts start in the given order while rows and KV cache allow. A row reserves its prompt and
    what it has generated; admission leaves room for the growth of running rows by their mean.

    Args:
        replica: The replica's clock.
        lengths: Tokens of each rollout.
        prompt: Tokens of a prompt.
        limit: Rows that run at once.
        kv_tokens: Tokens that the KV cache holds.
    """
    room = _room(sum(lengths) / len(lengths), prompt, limit, kv_tokens)
    waiting = list(reversed(lengths))
    ends: list[float] = []  # decoding steps at which running rows end
    starts = 0.0  # sum of the steps at which running rows started
    started: dict[float, list[float]] = {}
    now, seconds = 0.0, 0.0
    while waiting or ends:
        while waiting and len(ends) < room:
            end = now + waiting.pop()
            heapq.heappush(ends, end)
            started.setdefault(end, []).append(now)
            starts += now
        # advance to the next end, in pieces within which the context grows by a tenth
        until = ends[0]
        batch = len(ends)
        while now < until:
            context = prompt + now - starts / batch
            piece = min(until - now, max(16.0, 0.1 * context))
            seconds += piece * replica.step(batch, context + piece / 2)
            now += piece
        while ends and ends[0] <= now + 1e-9:
            end = heapq.heappop(ends)
            starts -= started[end].pop()
    return seconds


def _room(mean: float, prompt: float, limit: int, kv_tokens: float) -> int:
    """Return the rows of a mean length that a replica runs at once."""
    return max(1, min(limit, int(kv_tokens / (prompt + 0.6 * mean))))


def _replicas_time(
    clock: _Replica, replicas: int, workload: Workload, limit: int, kv_tokens: float, seed: int
) -> float:
    """Return the seconds in which the slowest replica finishes its rollouts of a step.

    If a replica has many more rollouts than it runs at once, some of them are played. The time of
    the others follows from the second half of these: the rate is constant once the first rollouts
    have ended.
    """
    completions, prompt = workload.completions, workload.prompt_tokens
    room = _room(completions.mean, prompt, limit, kv_tokens)
    most = max(MAX_PLAYED, PLAYED_ROUNDS * room)
    each = workload.rollouts / replicas
    if each <= most:
        lengths = completions.sample(workload.rollouts, seed)
        groups = np.array_split(lengths, min(replicas, len(lengths)))
        longest = max(range(len(groups)), key=lambda one: groups[one].max())
        fullest = max(range(len(groups)), key=lambda one: groups[one].sum())
        return max(
            replica_time(clock, groups[one].tolist(), prompt, limit, kv_tokens)
            for one in {longest, fullest}
        )
    half, whole = (
        replica_time(clock, completions.sample(count, seed).tolist(), prompt, limit, kv_tokens)
        for count in (most // 2, most)
    )
    return whole + (each - most) * (whole - half) / (most - most // 2)


def generation_time(
    model: Architecture,
    cluster: Cluster,
    plan: GenerationPlan,
    replicas: int,
    workload: Workload,
    *,
    constants: Constants | None = None,
    seed: int = 0,
) -> Estimate:
    """Return the time until the slowest replica has finished its rollouts.

    Raises:
        InvalidValue: Rows exceed the model's context, or weights leave no room for a row.
    """
    constants = constants or fitted_constants()
    workload.check(model)
    longest_row = workload.prompt_tokens + workload.completions.maximum
    require(
        kv_capacity(model, cluster, plan, row_tokens=longest_row, constants=constants)
        >= longest_row,
        "plan.tp",
        plan.tp,
        rule=f"leaves no room for a row of {model.name} beside its weights",
        fix="Use more GPUs per replica, or fewer bits per weight.",
    )
    mean_row = workload.prompt_tokens + workload.completions.mean
    kv_tokens = kv_capacity(model, cluster, plan, row_tokens=mean_row, constants=constants)
    clock = _Replica(model, cluster, plan, constants)
    limit = plan.max_running * plan.attention_dp
    decoding = _replicas_time(clock, replicas, workload, limit, kv_tokens, seed)
    # a prompt is prefilled once per group on its replica
    prompts = max(1.0, workload.prompts / replicas)
    batch = min(prompts, max(1.0, 8192 / workload.prompt_tokens))
    arguments = (model, cluster, plan, batch, workload.prompt_tokens, constants)
    prefill = prompts / batch * prefill_seconds(*arguments)
    scale = constants["rl_generation"]
    parts = {"decoding": decoding * scale, "prefill": prefill * scale}
    seconds = sum(parts.values())
    low, high = interval(seconds, constants.profile(plan.profile).spread_of(moe=model.is_moe))
    return Estimate(seconds=seconds, low=low, high=high, breakdown=parts)


def packed_plan(plan: TrainingPlan, tokens: float, mean_tokens: float) -> TrainingPlan:
    """Return the plan with the micro-batches that packing `tokens` needs.

    Args:
        plan: A plan whose row_tokens is the length of a packed row.
        tokens: Tokens of a step.
        mean_tokens: Mean tokens of a document.
    """
    rows = tokens / plan.row_tokens / 0.95  # packing leaves 5 % empty
    micro_batches = max(1, math.ceil(rows / plan.micro_batch / plan.dp))
    return replace(
        plan,
        micro_batches=micro_batches,
        attended_tokens=min(mean_tokens * 1.3, plan.row_tokens),  # cost grows with length squared
    )


def sync_seconds(model: Architecture, plan: RLPlan, constants: Constants) -> float:
    """Return the seconds of moving weights from the trainer to the replicas.

    Published trainers gather each tensor as a whole before they export it, so the time follows the
    model's size and not the size of a shard.
    """
    return 2 * model.parameters / (constants["sync_gb_s"] * GB)


def rl_step_time(
    model: Architecture,
    cluster: Cluster,
    plan: RLPlan,
    workload: Workload,
    *,
    updates: int = 1,
    constants: Constants | None = None,
) -> Estimate:
    """Return the time of a step: rollouts, log-probabilities, training and sync.

    Args:
        model: The policy. A reference has the same shape.
        cluster: All devices.
        plan: How they are used.
        workload: Rollouts of the step.
        updates: Optimizer steps that share the rollouts.
        constants: Constants; those of the package by default.

    Raises:
        InvalidValue: Rows exceed the model's context, or the plan does not fit the model.
    """
    constants = constants or fitted_constants()
    generated = generation_time(
        model, cluster, plan.generation, plan.replicas, workload, constants=constants
    )
    mean = workload.prompt_tokens + workload.completions.mean
    tokens = mean * workload.rollouts
    update = packed_plan(plan.training, tokens / updates, mean)
    trained = updates * train_step_time(model, cluster, update, constants=constants).seconds
    forward_share = {"full": 0.27, "selective": 0.31}.get(update.recompute, 0.34)
    scored = plan.forward_passes * forward_share * trained
    trained *= constants["rl_training"]
    sync = sync_seconds(model, plan, constants)
    fixed = constants["rl_fixed"]
    parts = {
        "generation": generated.seconds,
        "log_probabilities": scored,
        "training": trained,
        "sync": sync,
        "fixed": fixed,
    }
    if plan.mode == "one_step_off":
        busy = scored + trained + fixed / 2
        longer = max(generated.seconds, busy)
        parts = {
            "generation": generated.seconds if generated.seconds >= busy else 0.0,
            "training": busy if busy > generated.seconds else 0.0,
            "contention": (constants["rl_overlap"] - 1) * longer,
            "sync": sync,
            "fixed": fixed / 2,
        }
    seconds = sum(parts.values())
    spread = constants.spreads.get("rl_step", 0.3)
    low, high = interval(seconds, spread)
    return Estimate(seconds=seconds, low=low, high=high, breakdown=parts)
