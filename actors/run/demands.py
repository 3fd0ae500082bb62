"""Estimate the memory that each process of a run takes on its device and its node.

    configuration, graph, shape of the model ─► demands ─► rlsys.launcher.machine_fit

Adds the libraries of each process and the context of each GPU to the models' memory, which
rlsys.launcher.memory_estimate computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlsys.config import RoleConfig, RunConfig, TrainedRoleConfig
from rlsys.config.machine import GIB, Machine
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import GenerateStage, Head, JudgeStage, Model
from rlsys.engines.models.model_shape import ModelShape
from rlsys.evaluation.held_out import evaluation_config
from rlsys.launcher.machine_fit import Demand, ProcessLayout, lay_out
from rlsys.launcher.memory_estimate import (
    estimate_memory,
    kv_cache_bytes,
    partner_bytes,
    partner_published_bytes,
    replica_memory,
    role_shape,
    snapshot_bytes,
    store_bytes,
    worker_bytes,
)
from rlsys.launcher.rank_estimate import estimate_rank

from ..cluster.placement import Need
from .factories import EVALUATION, needs, role_needs

# Private memory of the interpreter and libraries of a process, measured after importing torch.
LIBRARIES_BYTES = int(0.3 * GIB)
# Contexts of CUDA, NCCL and cuBLAS on each GPU.
CONTEXT_BYTES = int(0.7 * GIB)


def place_processes(
    config: RunConfig, flow: StageGraph, shape: ModelShape, machines: Sequence[Machine]
) -> ProcessLayout:
    """Place every process of the run on the machines."""
    store = store_bytes(config, flow)
    return lay_out([*demands(config, flow, shape)], machines, every_node_bytes=store)


def demands(config: RunConfig, flow: StageGraph, shape: ModelShape) -> Iterator[Demand]:
    """Yield the memory that every process of the run takes on its device and its node."""
    ranks, replicas = needs(config, flow)
    samples = bool(flow.all(GenerateStage))
    own = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    rank = _rank(config, own, shape, flow.main.head)
    engine = _replica(config, shape) if samples else Demand(name="", fix="")
    if samples:
        memory, num = estimate_memory(config, shape), len(ranks)
        rank = replace(
            rank,
            host_bytes=rank.host_bytes + memory.published_bytes // num,
            device_bytes=rank.device_bytes + memory.device_bytes // num,
        )
    for need in replicas:
        if need.colocated_with:
            offloaded = _offloaded_bytes(config, own, shape, flow.main.head)
            yield _colocated(rank, engine, need, offloaded)
    shared = {host for need in replicas for host in need.colocated_with}
    for need in ranks:
        if need not in shared:
            yield replace(rank, name=need.name, fix=need.fix, num_gpus=need.num_gpus)
    for need in replicas[: config.rollout.num_first]:
        if not need.colocated_with:
            yield replace(engine, name=need.name, fix=need.fix, num_gpus=need.num_gpus)
        for partner, model in zip(need.partners, flow.partners_with_engines, strict=True):
            yield _extra_process(partner, partner_bytes(config, model))
    for name, role in role_needs(config, flow).items():
        yield from _role(config, flow, shape, name, role)
    if config.evaluation.every and EVALUATION not in role_needs(config, flow):
        yield _evaluation(config, shape, 0)


def _rank(config: RunConfig, trained: TrainedRoleConfig, shape: ModelShape, head: Head) -> Demand:
    memory, trainer = estimate_rank(config, trained, shape, head), trained.trainer
    host_bytes = LIBRARIES_BYTES + snapshot_bytes(config, trained, shape)
    if not trainer.num_gpus:
        return Demand(name="", fix="", host_bytes=host_bytes + memory.total)
    moved = memory.moments if trainer.offloads_moments else 0
    return Demand(
        name="",
        fix="",
        device_bytes=memory.total - moved + CONTEXT_BYTES,
        host_bytes=host_bytes + moved,
    )


def _offloaded_bytes(
    config: RunConfig, trained: TrainedRoleConfig, shape: ModelShape, head: Head
) -> int:
    """Return the bytes that a released rank moves from its GPU to host memory.

    These are weights and moments. Gradients and activations are freed.
    """
    memory, trainer = estimate_rank(config, trained, shape, head), trained.trainer
    if not trainer.num_gpus:
        return 0
    return memory.weights + (0 if trainer.offloads_moments else memory.moments)


def _replica(config: RunConfig, shape: ModelShape) -> Demand:
    memory, rollout = replica_memory(config, config.rollout, shape), config.rollout
    if rollout.urls:  # it reads the initial weights for its server
        return Demand(name="", fix="", host_bytes=LIBRARIES_BYTES + memory.weight_bytes)
    num_processes = rollout.num_devices + (rollout.engine == "vllm")
    host_bytes = num_processes * LIBRARIES_BYTES
    if not rollout.num_gpus:
        return Demand(name="", fix="", host_bytes=host_bytes + memory.num_bytes)
    each = memory.num_bytes // memory.num_devices + CONTEXT_BYTES
    if memory.cache_bytes is not None:
        return Demand(name="", fix="", device_bytes=each, host_bytes=host_bytes)
    # vLLM counts its own context, and fails if the weights leave no memory for the cache.
    return Demand(name="", fix="", device_frac=memory.device_frac, host_bytes=host_bytes)


def _colocated(rank: Demand, engine: Demand, replica: Need, offloaded: int) -> Demand:
    """Return the demand of a replica and the ranks whose places it shares; they are on one node.

    While the replica works, each rank has `offloaded` bytes of its state in host memory.
    """
    hosts = replica.colocated_with
    return replace(
        rank,
        name=f"trainer with {replica.name}",
        fix=hosts[0].fix,
        num_gpus=sum(need.num_gpus for need in hosts),
        device_bytes=max(rank.device_bytes, engine.device_bytes),
        device_frac=engine.device_frac,
        host_bytes=engine.host_bytes + len(hosts) * (rank.host_bytes + offloaded),
    )


def _extra_process(need: Need, num_bytes: int) -> Demand:
    on_device = num_bytes + CONTEXT_BYTES if need.num_gpus else 0
    return Demand(
        name=need.name,
        fix=need.fix,
        num_gpus=need.num_gpus,
        device_bytes=on_device,
        host_bytes=LIBRARIES_BYTES + (0 if on_device else num_bytes),
    )


def _role(
    config: RunConfig, flow: StageGraph, shape: ModelShape, name: str, role: Sequence[Need]
) -> Iterator[Demand]:
    if name == EVALUATION:
        yield from (_evaluation(config, shape, need.num_gpus, need.fix) for need in role)
        return
    model = flow.models[name]
    if isinstance(trained := model.config, TrainedRoleConfig):
        rank = _rank(config, trained, role_shape(config, model), model.head)
        published = 0
        if model in flow.partners:
            published = partner_published_bytes(config, model) // len(role)
        for need in role:
            host_bytes = rank.host_bytes + published
            yield replace(
                rank, name=need.name, fix=need.fix, num_gpus=need.num_gpus, host_bytes=host_bytes
            )
        return
    for need in role:
        one = _extra_process(need, _frozen_bytes(config, flow, model))
        # offloaded to host memory while workers on the same device compute
        if 0 < need.num_gpus < 1:
            moved = one.device_bytes - CONTEXT_BYTES
            one = replace(one, takes_turns=True, host_bytes=one.host_bytes + moved)
        yield one


def _frozen_bytes(config: RunConfig, flow: StageGraph, model: Model) -> int:
    """Return the bytes of a worker's weights and, for a judge, of its KV cache."""
    assert isinstance(model.config, RoleConfig)
    if not model.config.model.path and model.head != "logits":
        return 0  # the recipe creates the model before its run
    num_bytes = worker_bytes(config, model)
    if any(stage.model is model for stage in flow.all(JudgeStage)):
        num_bytes += kv_cache_bytes(model.config, role_shape(config, model))
    return num_bytes


def _evaluation(config: RunConfig, shape: ModelShape, num_gpus: float, fix: str = "") -> Demand:
    rollout = evaluation_config(config, config.model.path).rollout
    memory = replica_memory(config, rollout, shape)
    need = Need(name="evaluation", num_cpus=0, num_gpus=num_gpus, fix=fix or "evaluation.every")
    one = _extra_process(need, memory.num_bytes)
    if memory.cache_bytes is None:
        one = replace(one, device_bytes=0, device_frac=memory.device_frac)
    return one


def first_needs(config: RunConfig, flow: StageGraph) -> list[Need]:
    """Return the reservations of each process that the run starts with.

    Replicas beyond rollout.min_replicas may be placed later.
    """
    ranks, replicas = needs(config, flow)
    first = replicas[: config.rollout.num_first]
    every = [*ranks, *first, *(need for role in role_needs(config, flow).values() for need in role)]
    every += [need for replica in first for need in replica.partners]
    return [need for need in every if not need.colocated_with]
