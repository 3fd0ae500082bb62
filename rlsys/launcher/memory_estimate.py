"""Estimates of a run's memory and disk space, for checks before the start and for --dry-run.

In: the configuration and the model's shape (from its config.json, without loading weights).
Out: bytes of actors, the store and checkpoints. rank_estimate.py estimates the trainer's ranks.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import torch

from rlsys.config import (
    ModelConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.dataflow.graph import store_layout
from rlsys.dataflow.graph.stage_graph import StageGraph
from rlsys.dataflow.graph.stages import Model
from rlsys.engines.generation.torch.kv_cache import slot_capacity
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.errors import InvalidValue
from rlsys.runs.run_files import MAX_WAITING

# Fraction of the store's memory for rows. Rows of different lengths leave gaps.
STORE_FILL = 0.5
MIN_STORE_BYTES = 64 << 20

MASTER_BYTES = 4  # per parameter, float32

# Published versions of the weights, besides those in the replicas: the newest one, and the one
# before while a replica still reads it.
NUM_VERSIONS = 2
# Packed versions for other nodes: the last one that was sent and the new one, whose difference is
# sent, and the one that Ray's object store transfers.
NUM_PACKED = 3

# Cache slots of a frozen model that generates, per token of pass_tokens. Slots are allocated in
# blocks, and some models keep more than two vectors per head.
CACHE_SLACK = 1.5

# Metrics, rollouts and the trace of an average run.
RECORDS_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of a trained model, besides its ranks.

    Attributes:
        published_bytes: Versions of the weights for the replicas, summed over the ranks' hosts.
        publishes_own_weights: Whether the newest version is the rank's own weights, which are not
            part of published_bytes.
        device_bytes: A version on the GPUs of all ranks (CUDA IPC). The buffer for a second one is
            allocated only if memory is free.
        packed_bytes: Packed versions for replicas on other nodes, summed over the ranks' hosts.
        snapshot_bytes: Snapshots of each trainer rank in host memory.
        replica: Memory of one replica.
    """

    published_bytes: int
    publishes_own_weights: bool
    device_bytes: int
    packed_bytes: int
    snapshot_bytes: int
    replica: ReplicaMemory


@dataclass(frozen=True, kw_only=True)
class ReplicaMemory:
    """Memory of one replica's engine, without the interpreter and libraries.

    cache_bytes is None for vLLM on GPUs: it takes `device_frac` of each of its `num_devices`
    devices, and the cache has the part of it that the weights leave.
    """

    weight_bytes: int
    cache_bytes: int | None
    token_bytes: int  # keys and values of one token
    longest: int  # tokens of the longest sequence
    num_devices: int = 1
    device_frac: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and cache, without a cache whose size depends on the device."""
        return self.weight_bytes + (self.cache_bytes or 0)

    @property
    def least_cache_bytes(self) -> int:
        """Bytes of the cache of one sequence of the longest length, in whole blocks."""
        return slot_capacity(self.longest) * self.token_bytes

    def on_each_device(self, device_bytes: int) -> int:
        """Return the bytes on each of its devices, if these have `device_bytes`."""
        if self.cache_bytes is None:
            return int(self.device_frac * device_bytes)
        return self.num_bytes // self.num_devices

    def cache_on(self, device_bytes: int) -> int:
        """Return the bytes of keys and values, over all its devices."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        return self.num_devices * self.on_each_device(device_bytes) - self.weight_bytes


def estimate_memory(config: RunConfig, shape: ModelShape) -> MemoryEstimate:
    """Return the memory of the main model, besides that of its ranks."""
    itemsize = getattr(torch, config.model.dtype).itemsize
    own = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    publishes_own_weights = _publishes_own_weights(config)
    is_small = config.rollout.sends_adapters
    version_bytes = itemsize * (
        num_trained(shape, config.model) if is_small else shape.num_parameters
    )
    return MemoryEstimate(
        published_bytes=(NUM_VERSIONS - publishes_own_weights) * version_bytes,
        publishes_own_weights=publishes_own_weights,
        device_bytes=version_bytes if config.rollout.weight_transport == "cuda_ipc" else 0,
        packed_bytes=NUM_PACKED * version_bytes,
        snapshot_bytes=snapshot_bytes(config, own, shape),
        replica=replica_memory(config, config.rollout, shape),
    )


def replica_memory(config: RunConfig, rollout: RolloutConfig, shape: ModelShape) -> ReplicaMemory:
    """Return the memory of one engine with these settings for a model of this shape.

    The torch engine uses kv_cache_gib, or less if max_running sequences need less.
    """
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    longest = min(config.data.max_prompt_tokens + config.sampling.max_tokens, shape.max_context)
    token_bytes = _cached_values(shape, rollout.engine) * itemsize
    cache_bytes: int | None = int(rollout.kv_cache_gib * 2**30)
    if rollout.engine == "torch":
        assert cache_bytes is not None
        cache_bytes = min(cache_bytes, rollout.max_running * slot_capacity(longest) * token_bytes)
    elif rollout.num_gpus:
        cache_bytes = None
    else:
        cache_bytes = int(rollout.kv_cache_gib * 2**30) * rollout.tensor_parallel  # for each rank
    return ReplicaMemory(
        weight_bytes=shape.num_parameters * (1 if rollout.quantization else itemsize),
        cache_bytes=cache_bytes,
        token_bytes=token_bytes,
        longest=longest,
        num_devices=rollout.num_devices,
        device_frac=rollout.gpu_memory_frac if cache_bytes is None else 0.0,
    )


def _cached_values(shape: ModelShape, engine: str) -> int:
    """Return the number of cached elements per token of a long sequence.

    Layers with a state of constant size have none. vLLM caches compressed vectors for latent
    attention (MLA), and only the window of layers with sliding-window attention.
    """
    text = shape.config.get_text_config() if shape.config is not None else None
    kinds = [str(kind) for kind in getattr(text, "layer_types", None) or ["full_attention"]]
    rank = getattr(text, "kv_lora_rank", None)
    if engine == "vllm" and text is not None and rank:
        return int(text.num_hidden_layers * (rank + getattr(text, "qk_rope_head_dim", 0)))
    if engine == "vllm":
        kept = sum(kind == "full_attention" for kind in kinds)
    else:
        kept = sum("attention" in kind and "linear" not in kind for kind in kinds)
    return max(1, shape.kv_values_per_token * kept // len(kinds))


def cache_fault(config: RunConfig, shape: ModelShape, device_bytes: int | None) -> str | None:
    """Return why the replicas' cache cannot hold one sequence of the longest length, or None.

    `device_bytes` is the memory of a replica's GPU, None if unknown. The text includes the fix.
    """
    replica, rollout = replica_memory(config, config.rollout, shape), config.rollout
    least, one = replica.least_cache_bytes, f"one sequence of {replica.longest} tokens"
    if replica.cache_bytes is None:
        if device_bytes is None or replica.cache_on(device_bytes) >= least:
            return None
        frac = (replica.weight_bytes + least) / (replica.num_devices * device_bytes)
        fix = "use a larger card, or more of them (rollout.tensor_parallel)"
        if frac <= 0.95:
            fix = f"use rollout.gpu_memory_frac={ceil_to(frac, 2)} or more"
        return (
            f"rollout.gpu_memory_frac={rollout.gpu_memory_frac}: "
            f"{replica.on_each_device(device_bytes) / 2**30:.1f} GiB cannot hold the weights "
            f"({replica.weight_bytes / replica.num_devices / 2**30:.1f} GiB) and {one} "
            f"({least / replica.num_devices / 2**30:.3f} GiB); {fix}"
        )
    if int(rollout.kv_cache_gib * 2**30) >= least // replica.num_devices:
        return None
    enough = ceil_to(least / replica.num_devices / 2**30, 4)
    return (
        f"rollout.kv_cache_gib={rollout.kv_cache_gib}: keys and values of {one} need {enough} GiB "
        f"({replica.token_bytes:,} bytes per token); use rollout.kv_cache_gib={enough} or more, or "
        "lower sampling.max_tokens or data.max_prompt_tokens"
    )


def ceil_to(number: float, digits: int) -> float:
    """Return the number rounded up to so many digits after the point."""
    scale: float = 10.0**digits
    return math.ceil(number * scale) / scale


def _publishes_own_weights(config: RunConfig) -> bool:
    """Return whether replicas read the trainer's own weights (engines/training)."""
    trainer, model = config.trainer, config.model
    is_plain = model.dtype == "float32" and not model.lora
    return is_plain and trainer.parallel.num_ranks == 1 and not trainer.num_gpus


def num_shards(trainer: TrainerConfig) -> int:
    """Return the number of ranks among which one copy of the weights is sharded."""
    return trainer.parallel.num_ranks // trainer.parallel.dp_replicate


def num_snapshots(config: RunConfig, trainer: TrainerConfig) -> int:
    """Return the number of snapshots of a trainer's state in memory that outlives its ranks.

    Ranks restart from the newest two. A third one is written to a checkpoint while the run
    continues.
    """
    if not trainer.snapshot_every:
        return 0
    return 2 if config.checkpoint_every == 0 else 3


def disk_bytes(config: RunConfig, flow: StageGraph, shape: ModelShape, *, warm_start: bool) -> int:
    """Return the largest number of bytes that a run has on disk at a time.

    These are the kept checkpoints of all trained models and one that is being written, exports of
    the main model, whose shape this is, and records.
    """
    state_bytes = _state_bytes(shape, config.model, config.trainer)
    each_checkpoint_bytes = checkpoint_bytes(config, flow, shape)
    evaluated = (
        MAX_WAITING + 2 if config.evaluation.every else 0
    )  # one in progress, and the best one
    num_exports = 1 + evaluated + warm_start
    others = (flow.models[name] for name in flow.other_policies)
    num_kept = config.num_steps // config.keep_every if config.keep_every else 0
    return (
        RECORDS_BYTES
        + sum(partner_published_bytes(config, one) // NUM_VERSIONS for one in others)
        + (config.keep_checkpoints + 1 + num_kept) * each_checkpoint_bytes
        + num_exports * export_bytes(config, shape)
        + warm_start * state_bytes
    )


def export_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of an exported model."""
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    num_bytes = shape.num_parameters * itemsize + shape.buffer_bytes
    if config.model.lora:  # adapters are exported separately too
        num_bytes += num_trained(shape, config.model) * MASTER_BYTES
    return num_bytes


def checkpoint_bytes(config: RunConfig, flow: StageGraph, shape: ModelShape) -> int:
    """Return the bytes of a checkpoint of all trained models; `shape` is the main model's."""
    return _state_bytes(shape, config.model, config.trainer) + sum(
        _state_bytes(role_shape(config, model), model.config.model, model.config.trainer)
        for model in flow.models.values()
        if isinstance(model.config, TrainedRoleConfig)
    )


def role_shape(config: RunConfig, model: Model) -> ModelShape:
    """Return the shape of another model, which without a path is the main model's."""
    assert model.config is not None
    path = model.config.model.path
    setting = f"{model.name}.model.path" if path else "model.path"
    return model_shape(path or config.model.path, model.head, setting=setting)


def worker_bytes(config: RunConfig, model: Model) -> int:
    """Return the bytes of the weights in each worker of a frozen model."""
    assert model.config is not None
    itemsize: int = getattr(torch, model.config.model.dtype).itemsize
    shape = role_shape(config, model)
    return shape.num_parameters * itemsize + shape.buffer_bytes


def kv_cache_bytes(role: RoleConfig, shape: ModelShape) -> int:
    """Return the bytes of the KV cache in one engine of a frozen model."""
    itemsize: int = getattr(torch, role.model.dtype).itemsize
    return int(CACHE_SLACK * role.pass_tokens * shape.kv_values_per_token * itemsize)


def partner_bytes(config: RunConfig, model: Model) -> int:
    """Return the bytes of each engine of another model that plays: weights and KV cache."""
    if isinstance(model.config, RoleConfig):
        return worker_bytes(config, model) + kv_cache_bytes(model.config, role_shape(config, model))
    return _policy_memory(config, model).replica.num_bytes


def partner_published_bytes(config: RunConfig, model: Model) -> int:
    """Return the bytes of published versions of another policy, over its ranks' hosts."""
    return _policy_memory(config, model).published_bytes


def _policy_memory(config: RunConfig, model: Model) -> MemoryEstimate:
    """Return the memory of another trained model as if it were the main one."""
    role = model.config
    assert isinstance(role, TrainedRoleConfig)
    own = replace(
        config,
        model=role.model,
        trainer=role.trainer,
        rollout=config.rollout.serving(role.model.adapters),
    )
    return estimate_memory(own, role_shape(config, model))


def role_snapshot_bytes(config: RunConfig, model: Model) -> int:
    """Return the bytes of snapshots of each rank of another trained model."""
    assert isinstance(model.config, TrainedRoleConfig)
    return snapshot_bytes(config, model.config, role_shape(config, model))


def snapshot_bytes(config: RunConfig, trained: TrainedRoleConfig, shape: ModelShape) -> int:
    """Return the bytes of snapshots of each rank in host memory."""
    state_bytes = _state_bytes(shape, trained.model, trained.trainer)
    num = max(1, num_snapshots(config, trained.trainer))
    return num * state_bytes // num_shards(trained.trainer)


def _state_bytes(shape: ModelShape, model: ModelConfig, trainer: TrainerConfig) -> int:
    """Return the bytes of trained parameters, moments and buffers in a checkpoint or snapshot."""
    buffer_bytes = 0 if model.lora else shape.buffer_bytes
    per_parameter = MASTER_BYTES + moment_bytes(trainer)
    return num_trained(shape, model) * per_parameter + buffer_bytes


def moment_bytes(trainer: TrainerConfig) -> int:
    """Return the bytes of both moments per parameter."""
    itemsize: int = getattr(torch, trainer.moments_dtype).itemsize
    return 2 * itemsize


def num_trained(shape: ModelShape, model: ModelConfig) -> int:
    """Return the number of trained parameters: all, or those of adapters and a scalar head."""
    if model.adapters is None:
        return shape.num_parameters
    adapters = model.adapters
    widths = (width for name, width in shape.linear_layers.items() if adapters.adapts(name))
    return adapters.rank * sum(widths) + shape.scalar_head


def row_bytes(config: RunConfig, flow: StageGraph) -> int:
    """Return the largest number of bytes of a row in the store."""
    return store_layout.row_bytes(
        flow,
        max_prompt_tokens=longest_prompt(config, flow),
        max_tokens=config.sampling.max_tokens,
    )


def longest_prompt(config: RunConfig, flow: StageGraph) -> int:
    """Return the maximum tokens of a prompt, which are at most the context of the main model."""
    limit = config.data.max_prompt_tokens
    return limit if flow.max_context is None else min(limit, flow.max_context)


def store_bytes(config: RunConfig, flow: StageGraph) -> int:
    """Return the size of the store on each node, at most `cluster.store_gib`.

    It holds twice the rollouts that can be in flight within the bound on staleness, since all of
    them may be sampled on one node.
    """
    num_groups = (
        config.prompts_per_step * (1 + config.asynchrony.max_staleness)
        + config.asynchrony.over_issue
    )
    in_flight = num_groups * config.group_size * row_bytes(config, flow)
    most = int(config.cluster.store_gib * 2**30)
    return min(most, max(MIN_STORE_BYTES, int(2 * in_flight / STORE_FILL)))


def check_store(config: RunConfig, flow: StageGraph) -> None:
    """Check that the store of a node can hold one group, and on one machine those of a step.

    Raises:
        InvalidValue: The store is too small.
    """
    each = config.group_size * row_bytes(config, flow)
    room = int(store_bytes(config, flow) * STORE_FILL)
    one_node = config.cluster.address is None and "RAY_ADDRESS" not in os.environ
    num_groups = config.prompts_per_step if one_node else 1
    if num_groups * each <= room:
        return
    needed = ceil_to(num_groups * each / STORE_FILL / 2**30, 4)
    what = f"a step of {num_groups} groups" if num_groups > 1 else "one group"
    raise InvalidValue(
        "cluster.store_gib",
        config.cluster.store_gib,
        rule=f"{what} of group_size={config.group_size} rollouts, with prompts of at most "
        f"{longest_prompt(config, flow)} tokens and sampling.max_tokens="
        f"{config.sampling.max_tokens}, needs {needed:g} GiB",
        fix="Increase it, or lower group_size, data.max_prompt_tokens or sampling.max_tokens.",
    )
