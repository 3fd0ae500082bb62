"""Search for the best plan of a run.

    splits of the devices ─► best layouts of each side ─► combinations that fit
        ─► ranked by closed form ─► the best simulated with the real controller ─► ranking

Given a split, training and generation do not depend on each other, so their layouts are chosen
independently: the work grows with the sum of their numbers and not with the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlsys.config.parallel_layout import ParallelLayout
from rlsys.errors import InvalidValue
from rlsys.planner.architecture import Architecture
from rlsys.planner.fixed_settings import NO_TRAINING, NOTHING, FixedSettings, FixedTraining
from rlsys.planner.hardware import Cluster
from rlsys.planner.memory import MemoryNeed, kv_capacity, rank_memory, weight_bytes
from rlsys.planner.plans import Estimate, GenerationPlan, Recompute, TrainingPlan
from rlsys.planner.profiles import Constants, fitted_constants
from rlsys.planner.run_plan import (
    PLAIN_TRAINING,
    PROFILES,
    Placement,
    Role,
    RunPlan,
    RunShape,
    generation_seconds,
    step_time,
    training_seconds,
)

# Sizes that are tried of each dimension.
SIZES = (1, 2, 4, 8, 16)
MICRO_BATCH_TOKENS = (4096, 8192, 16384, 32768, 65536)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
STEPS_AHEAD = (0, 1, 2)

# Splits of the devices that are tried, at most.
MAX_SPLITS = 24

# Layouts of one side that are combined, per split.
NUM_KEPT = 3

# Plans whose times differ by less are equal as far as the model can tell: layouts that are closer
# than this are ordered wrongly as often as rightly.
TIE = 0.05

# Share of a device's memory for a replica that shares it with a rank, whose process keeps some.
SHARED_MEMORY_FRACTION = 0.8

# A step must leave this share of a device's memory free.
MEMORY_LIMIT = 0.95

Allows = Callable[[RunPlan], bool]


@dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """A plan that fits, with its prediction.

    Attributes:
        plan: The plan.
        estimate: Time of a step.
        memory: Bytes on the fullest device of each role.
        simulated: Whether the time comes from the simulated controller.
        is_tied: Whether the best plan is not clearly faster.
    """

    plan: RunPlan
    estimate: Estimate
    memory: Mapping[str, MemoryNeed]
    simulated: bool = False
    is_tied: bool = False


def training_layouts(model: Architecture, num_gpus: int, per_node: int) -> Iterator[ParallelLayout]:
    """Yield the layouts of a model over exactly `num_gpus` devices that divide its sizes.

    Tensor parallelism stays within a node.
    """
    for tp, pp, cp, ep in itertools.product(SIZES, SIZES, SIZES[:3], _expert_sizes(model)):
        each = tp * pp * cp * ep
        if num_gpus % each or tp * cp > per_node or not _divides(model, tp, pp, ep):
            continue
        if cp > 1 and model.heads % (tp * cp):
            continue
        yield ParallelLayout(dp_shard=num_gpus // each, tp=tp, pp=pp, cp=cp, ep=ep)


def _expert_sizes(model: Architecture) -> tuple[int, ...]:
    return (*SIZES, 32, 64) if model.is_moe else (1,)


def _divides(model: Architecture, tp: int, pp: int, ep: int) -> bool:
    widths = [model.heads, model.kv_heads, *([model.ffn] if model.ffn else [])]
    if model.is_moe:
        widths.append(model.expert_ffn)
    return (
        all(width % tp == 0 for width in widths)
        and model.layers % pp == 0
        and (ep == 1 or model.experts % (ep * tp) == 0)
    )


def as_training_plan(
    layout: ParallelLayout, training: TrainingPlan = PLAIN_TRAINING, **changes: Any
) -> TrainingPlan:
    """Return the plan of one of this project's layouts: expert parallel ranks have rows too.

    `training` has the settings besides the layout.
    """
    return replace(
        training,
        dp=layout.size("dp_replicate", "dp_shard", "ep"),
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        vp=layout.num_pieces,
        ep=layout.ep,
        shard="parameters",
        shard_ranks=0 if layout.dp_replicate == 1 else layout.size("dp_shard", "ep", "cp"),
        **changes,
    )


def as_layout(plan: TrainingPlan) -> ParallelLayout:
    """Return the layout of a plan that `as_training_plan` made."""
    copies = plan.dp * plan.cp // plan.shard_ranks if plan.shard_ranks else 1
    return ParallelLayout(
        dp_replicate=copies,
        dp_shard=plan.dp // plan.ep // copies,
        tp=plan.tp,
        pp=plan.pp,
        cp=plan.cp,
        ep=plan.ep,
        num_pieces=plan.vp,
    )


def training_plans(
    role: Role,
    cluster: Cluster,
    num_gpus: int,
    shape: RunShape,
    constants: Constants,
    fixed: FixedTraining = NO_TRAINING,
) -> list[TrainingPlan]:
    """Return the fastest plans of a trained role on `num_gpus` devices that fit, best first.

    A micro-batch must hold the longest row, unless the user gave its size. Of one layout, only the
    fastest micro-batch and recomputation count. Of layouts that tie with the fastest, those with
    the fewest kinds of parallelism are first.
    """
    longest = shape.workload.prompt_tokens + shape.workload.completions.maximum
    recomputations = RECOMPUTE[:1] if cluster.gpu.products else RECOMPUTE
    if fixed.recompute is not None:
        recomputations = (fixed.recompute,)
    sizes = _micro_batches(longest)
    if fixed.micro_batch_tokens is not None:
        sizes = [fixed.micro_batch_tokens]
    best: list[tuple[float, int, TrainingPlan]] = []
    for number, layout in enumerate(_role_layouts(role, num_gpus, cluster, shape, fixed)):
        found: tuple[float, int, TrainingPlan] | None = None
        for tokens, recompute in itertools.product(sizes, recomputations):
            plan = as_training_plan(
                layout,
                role.training,
                row_tokens=float(tokens),
                recompute=recompute,
                micro_batch=1,
            )
            need = role_memory(role, cluster, plan, shape, constants)
            if not need.fits(cluster, MEMORY_LIMIT):
                continue
            seconds = training_seconds(role, cluster, plan, shape, constants)
            if found is None or seconds < found[0]:
                found = (seconds, number, plan)
        if found is not None:
            best.append(found)
    limit = min((seconds for seconds, _, _ in best), default=0.0) * (1 + TIE)

    def order(one: tuple[float, int, TrainingPlan]) -> tuple[bool, int, float, int]:
        seconds, number, plan = one
        is_slower = seconds > limit
        return is_slower, 0 if is_slower else _num_kinds(plan), seconds, number

    return [plan for _, _, plan in sorted(best, key=order)[:NUM_KEPT]]


def _num_kinds(plan: TrainingPlan) -> int:
    """Return how many kinds of parallelism a plan has besides data parallelism."""
    return sum(size > 1 for size in (plan.tp, plan.pp, plan.cp, plan.ep))


def role_memory(
    role: Role, cluster: Cluster, plan: TrainingPlan, shape: RunShape, constants: Constants
) -> MemoryNeed:
    """Return the bytes on the fullest rank of a role. The longest row is a micro-batch at least."""
    longest = shape.workload.prompt_tokens + shape.workload.completions.maximum
    held = replace(plan, row_tokens=max(plan.row_tokens, longest))
    return rank_memory(role.model, cluster, held, constants)


def _role_layouts(
    role: Role, num_gpus: int, cluster: Cluster, shape: RunShape, fixed: FixedTraining
) -> Iterator[ParallelLayout]:
    """Yield the layouts of a role that its adapters and the prompts of a step allow."""
    if fixed.layout is not None:
        if fixed.layout.num_ranks == num_gpus:
            yield fixed.layout
        return
    for layout in training_layouts(role.model, num_gpus, cluster.per_node):
        has_parts = layout.size("tp", "pp", "cp", "ep") > 1
        if role.training.lora_rank and has_parts:
            continue
        if shape.workload.prompts % layout.size("dp_shard", "ep") == 0:
            yield layout


def _micro_batches(longest: float) -> list[int]:
    large = [tokens for tokens in MICRO_BATCH_TOKENS if tokens >= longest]
    return large or [int(longest)]


def generation_plans(
    policy: Role,
    cluster: Cluster,
    num_gpus: int,
    shape: RunShape,
    constants: Constants,
    memory_fraction: float = GenerationPlan.memory_fraction,
    fixed: FixedSettings = NOTHING,
) -> list[tuple[GenerationPlan, int]]:
    """Return the fastest (layout, number of replicas) on at most `num_gpus` devices, best first.

    The cache of a replica, which takes `memory_fraction` of each GPU, must hold the longest
    rollout.
    """
    longest = shape.workload.prompt_tokens + shape.workload.completions.maximum
    best: list[tuple[float, int, GenerationPlan, int]] = []
    base = shape.generation
    if fixed.memory_fraction is not None:
        base = replace(base, memory_fraction=fixed.memory_fraction)
    elif not cluster.gpu.products:
        base = replace(base, memory_fraction=memory_fraction)
    sizes = SIZES if fixed.tensor_parallel is None else (fixed.tensor_parallel,)
    for tp in sizes if shape.engine == "vllm" else sizes[:1]:
        if tp > min(num_gpus, cluster.per_node) or policy.model.heads % tp:
            continue
        plan = replace(base, tp=tp, profile=PROFILES[shape.engine])
        replicas = num_gpus // tp if fixed.replicas is None else fixed.replicas
        room = kv_capacity(policy.model, cluster, plan, row_tokens=longest, constants=constants)
        if replicas * tp > num_gpus or room < longest:
            continue
        seconds = generation_seconds(
            policy.model, cluster, plan, replicas, shape.workload, constants
        )
        best.append((seconds, tp, plan, replicas))
    return [(plan, replicas) for _, _, plan, replicas in sorted(best, key=lambda one: one[:2])]


def frozen_gpus(
    role: Role, cluster: Cluster, constants: Constants, fixed: FixedSettings = NOTHING
) -> int:
    """Return the devices of a frozen role: one, unless the user gave its workers.

    Raises:
        InvalidValue: The model needs more than one device, which frozen models do not support.
    """
    need = cluster.gpu.value_bytes * role.model.parameters + constants["context_gb"] * 1e9
    if need > MEMORY_LIMIT * cluster.gpu.memory_bytes:
        raise InvalidValue(
            f"model of {role.name}",
            role.model.name,
            rule=f"needs {need / 1e9:.0f} GB, more than one {cluster.gpu.name} has; frozen models "
            "are not split",
            fix=f"Use {_with_memory(cluster)}, or a smaller model.",
        )
    return fixed.workers.get(role.name, 1)


def search(
    shape: RunShape,
    cluster: Cluster,
    *,
    max_staleness: Sequence[int] = STEPS_AHEAD,
    placements: Sequence[Placement] = ("separate", "colocated"),
    allows: Allows = lambda plan: True,
    fixed: FixedSettings = NOTHING,
    constants: Constants | None = None,
) -> list[RankedPlan]:
    """Return the plans that fit, fastest first, by closed form.

    Args:
        shape: Roles and work of the run.
        cluster: The devices. A plan may leave some of them unused.
        max_staleness: Bounds to try.
        placements: Placements to try.
        allows: Whether a plan may be used.
        fixed: Settings that all plans have.
        constants: Constants and profiles; those of the package by default.

    Raises:
        InvalidValue: No plan fits. The error says what is short.
    """
    constants = constants or fitted_constants()
    shape.workload.check(shape.policy.model)
    found: list[RankedPlan] = []
    if fixed.placement is not None:
        placements = (fixed.placement,)
    for plan in _plans(shape, cluster, max_staleness, placements, constants, fixed):
        if allows(plan):
            found.append(
                RankedPlan(
                    plan=plan,
                    estimate=step_time(shape, cluster, plan, constants=constants),
                    memory=plan_memory(shape, cluster, plan, constants),
                )
            )
    if not found:
        raise _nothing_fits(shape, cluster, constants, fixed)
    return ranked(found)


def ranked(plans: Sequence[RankedPlan]) -> list[RankedPlan]:
    """Return plans by time; of those that tie with the best, the smallest is first."""
    plans = sorted(
        (replace(one, is_tied=False) for one in plans), key=lambda one: one.estimate.seconds
    )
    limit = plans[0].estimate.seconds * (1 + TIE)
    tied = [replace(one, is_tied=True) for one in plans if one.estimate.seconds <= limit]
    if len(tied) == 1:
        tied = [replace(tied[0], is_tied=False)]
    tied.sort(key=lambda one: (one.plan.max_staleness, one.plan.num_gpus, one.estimate.seconds))
    return [*tied, *plans[len(tied) :]]


def plan_memory(
    shape: RunShape, cluster: Cluster, plan: RunPlan, constants: Constants
) -> dict[str, MemoryNeed]:
    """Return the bytes on the fullest device of each role, and of a replica."""
    needs = {
        role.name: role_memory(role, cluster, plan.trainers[role.name], shape, constants)
        for role in shape.roles
        if role.is_trained
    }
    engine = plan.generation.memory_fraction * cluster.gpu.memory_bytes
    if plan.generation.cache_gib:
        weights = weight_bytes(shape.policy.model, plan.generation) * cluster.gpu.value_bytes / 2
        engine = weights + plan.generation.cache_gib * 2**30 + constants["context_gb"] * 1e9
    needs["generation"] = MemoryNeed(total=engine, breakdown={"engine": engine})
    return needs


def _plans(
    shape: RunShape,
    cluster: Cluster,
    max_staleness: Sequence[int],
    placements: Sequence[Placement],
    constants: Constants,
    fixed: FixedSettings = NOTHING,
) -> Iterator[RunPlan]:
    trained = [role for role in shape.roles if role.is_trained]
    frozen = {
        role.name: frozen_gpus(role, cluster, constants, fixed)
        for role in shape.roles
        if not role.is_trained
    }
    left = cluster.num_gpus - sum(frozen.values())
    if "separate" in placements:
        for sizes in _trainer_sizes(left, trained, fixed):
            sides = [
                training_plans(role, cluster, size, shape, constants, fixed.trainer(role.name))
                for role, size in zip(trained, sizes, strict=True)
            ]
            if not all(sides):
                continue
            generation = generation_plans(
                shape.policy, cluster, left - sum(sizes), shape, constants, fixed=fixed
            )
            trainers = {role.name: plans[0] for role, plans in zip(trained, sides, strict=True)}
            for (layout, replicas), first, bound in itertools.product(
                generation[:NUM_KEPT], sides[0], max_staleness
            ):
                yield RunPlan(
                    placement="separate",
                    max_staleness=bound,
                    generation=layout,
                    replicas=replicas,
                    trainers={**trainers, trained[0].name: first},
                    frozen_gpus=frozen,
                )
    if "colocated" in placements and len(trained) == 1:
        yield from _colocated(shape, cluster, left, max_staleness, frozen, constants, fixed)


def _colocated(
    shape: RunShape,
    cluster: Cluster,
    num_gpus: int,
    max_staleness: Sequence[int],
    frozen: Mapping[str, int],
    constants: Constants,
    fixed: FixedSettings,
) -> Iterator[RunPlan]:
    """Yield plans that share devices: each replica with as many ranks as it has devices.

    The devices of a replica are on one node, so replicas divide the nodes and use all devices.
    """
    (role,) = (role for role in shape.roles if role.is_trained)
    if (ranks := fixed.trainer(role.name).layout) is not None:
        num_gpus = min(num_gpus, ranks.num_ranks)
    trainers = training_plans(role, cluster, num_gpus, shape, constants, fixed.trainer(role.name))
    generation = [
        (layout, replicas)
        for layout, replicas in generation_plans(
            role, cluster, num_gpus, shape, constants, SHARED_MEMORY_FRACTION, fixed
        )
        if layout.tp == 1 or cluster.per_node % layout.tp == num_gpus % layout.tp == 0
    ]
    for (layout, replicas), plan, bound in itertools.product(
        generation[:NUM_KEPT], trainers, max_staleness
    ):
        yield RunPlan(
            placement="colocated",
            max_staleness=bound,
            generation=layout,
            replicas=replicas,
            trainers={role.name: plan},
            frozen_gpus=frozen,
        )


def _trainer_sizes(
    num_gpus: int, trained: Sequence[Role], fixed: FixedSettings
) -> Iterator[tuple[int, ...]]:
    """Yield numbers of devices of the trained roles that leave some for generation."""
    layouts = [fixed.trainer(role.name).layout for role in trained]
    known = [0 if layout is None else layout.num_ranks for layout in layouts]
    num_open = known.count(0)
    splits = _splits(num_gpus - sum(known), num_open) if num_open else [0]
    for size in splits:
        sizes = tuple(one or size for one in known)
        if sum(sizes) < num_gpus:
            yield sizes


def _splits(num_gpus: int, num_trained: int) -> list[int]:
    """Return numbers of devices of one trained role that leave some for generation."""
    most = (num_gpus - 1) // num_trained
    sizes = {1 << power for power in range(most.bit_length())}
    sizes |= {3 << power for power in range(max(most // 3, 1).bit_length()) if 3 << power <= most}
    step = max(1, most // MAX_SPLITS)
    sizes |= {*range(step, most + 1, step)} if most <= MAX_SPLITS else set()
    return sorted(size for size in sizes if 1 <= size <= most)[-MAX_SPLITS:]


def _nothing_fits(
    shape: RunShape, cluster: Cluster, constants: Constants, fixed: FixedSettings
) -> InvalidValue:
    """Return the error that says what is short, and the smallest cluster that fits."""
    longest = shape.workload.prompt_tokens + shape.workload.completions.maximum
    short = []
    trained = [role for role in shape.roles if role.is_trained]
    if not generation_plans(shape.policy, cluster, cluster.num_gpus, shape, constants):
        short.append(f"no replica holds a rollout of {longest:.0f} tokens beside its weights")
    for role in trained:
        if not training_plans(role, cluster, cluster.num_gpus, shape, constants):
            short.append(f"the states and activations of {role.name} do not fit on all devices")
    reason = "; ".join(short) or "the roles do not fit side by side"
    nodes = cluster.num_nodes
    while (nodes := nodes * 2) <= 1024:
        larger = replace(cluster, num_nodes=nodes)
        plans = _plans(shape, larger, (0,), ("separate",), constants, fixed)
        if next(plans, None) is not None:
            fix = f"Use {larger}, or smaller models or shorter completions."
            break
    else:
        fix = f"Use {_with_memory(cluster)}, smaller models or shorter completions."
    return InvalidValue("cluster", str(cluster), rule=f"has no plan: {reason}", fix=fix)


def _with_memory(cluster: Cluster) -> str:
    """Return the devices that a plan which does not fit needs."""
    return "machines with more memory" if cluster.gpu.products else "GPUs with more memory"
