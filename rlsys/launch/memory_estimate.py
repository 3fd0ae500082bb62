"""How much memory and disk a run will take, before it starts: for its checks and --dry-run.

In: the configuration and the model's shape (read from its config.json, no weights loaded).
Out: bytes of actors, of the store, of checkpoints. A trainer's ranks: rank_estimate.py.
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
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import Model
from rlsys.engines.generation.torch.kv_cache import slot_capacity
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.runs.run_directory import MAX_WAITING

# Rows of any length leave gaps in the store's memory; this share of it is promised to rows.
STORE_FILL = 0.5
MIN_STORE_BYTES = 64 << 20


MASTER_BYTES = 4  # per parameter, float32

# Of published weights, beside those that replicas compute with: the newest, and the one before
# while a replica still reads it.
NUM_VERSIONS = 2
# And for other nodes, packed: what was sent last and what it has changed to since, from which
# changes are told, and in Ray's object store what is on its way.
NUM_PACKED = 3

# Places in the cache of a frozen model that writes, for each of its pass_tokens: they are given out
# in blocks, and some models keep more than two vectors a head.
CACHE_SLACK = 1.5

# Metrics, rollouts and a trace of an average run, beside its models.
RECORDS_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    published_bytes: int  # versions of the weights for the replicas, over the ranks' hosts
    lies_in_share: bool  # the newest of them is the rank's own weights, and counts as theirs
    packed_bytes: int  # for replicas on other nodes, over the ranks' hosts
    snapshot_bytes: int  # per trainer rank, in the host's memory
    replica: ReplicaMemory


@dataclass(frozen=True, kw_only=True)
class ReplicaMemory:
    """Memory that one replica's engine takes, beside the interpreter and libraries.

    cache_bytes is None for vLLM on GPUs: it takes `device_frac` of each of its `num_devices`
    devices, and keys and values have of that what the weights leave.
    """

    weight_bytes: int
    cache_bytes: int | None
    token_bytes: int  # keys and values of one token
    longest: int  # tokens of the longest sequence
    num_devices: int = 1
    device_frac: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Weights and cache; without the cache where a share of a device decides about it."""
        return self.weight_bytes + (self.cache_bytes or 0)

    @property
    def least_cache_bytes(self) -> int:
        """Keys and values of one sequence at its longest, in the blocks of an engine."""
        return slot_capacity(self.longest) * self.token_bytes

    def on_each_device(self, device_bytes: int) -> int:
        """Return what it takes of each of its devices, if they have `device_bytes`."""
        if self.cache_bytes is None:
            return int(self.device_frac * device_bytes)
        return self.num_bytes // self.num_devices

    def cache_on(self, device_bytes: int) -> int:
        """Return the memory of keys and values, over all its devices."""
        if self.cache_bytes is not None:
            return self.cache_bytes
        return self.num_devices * self.on_each_device(device_bytes) - self.weight_bytes


def estimate_memory(config: RunConfig, shape: ModelShape) -> MemoryEstimate:
    """Of the main model, beside what its ranks train with and checkpoints hold."""
    itemsize = getattr(torch, config.model.dtype).itemsize
    own = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    lies_in_share = _lies_in_share(config)
    return MemoryEstimate(
        published_bytes=(NUM_VERSIONS - lies_in_share) * shape.num_parameters * itemsize,
        lies_in_share=lies_in_share,
        packed_bytes=NUM_PACKED * shape.num_parameters * itemsize,
        snapshot_bytes=snapshot_bytes(config, own, shape),
        replica=replica_memory(config, config.rollout, shape),
    )


def replica_memory(config: RunConfig, rollout: RolloutConfig, shape: ModelShape) -> ReplicaMemory:
    """Return what one engine with these settings takes for a model of this shape.

    The torch engine fills kv_cache_gib, or what max_running sequences take if that is less.
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
        cache_bytes = int(rollout.kv_cache_gib * 2**30) * rollout.tensor_parallel  # each rank's
    return ReplicaMemory(
        weight_bytes=shape.num_parameters * (1 if rollout.quantization else itemsize),
        cache_bytes=cache_bytes,
        token_bytes=token_bytes,
        longest=longest,
        num_devices=rollout.tensor_parallel if rollout.engine == "vllm" else 1,
        device_frac=rollout.gpu_memory_frac if cache_bytes is None else 0.0,
    )


def _cached_values(shape: ModelShape, engine: str) -> int:
    """Return elements of keys and values that an engine keeps of each token of a long sequence.

    Layers with a state of one size keep none. vLLM compresses latent attention (MLA), and keeps no
    more than a window of layers that see no further.
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
    """Return why the replicas' cache cannot hold one sequence at its longest, with the fix.

    `device_bytes`: memory of a replica's GPU, None where it is not known.
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
            f"rollout.gpu_memory_frac={rollout.gpu_memory_frac}: a share of "
            f"{replica.on_each_device(device_bytes) / 2**30:.1f} GiB does not hold the weights "
            f"({replica.weight_bytes / replica.num_devices / 2**30:.1f} GiB) and {one} "
            f"({least / replica.num_devices / 2**30:.3f} GiB); {fix}"
        )
    given = int(rollout.kv_cache_gib * 2**30)
    if given >= least // replica.num_devices:
        return None
    enough = ceil_to(least / replica.num_devices / 2**30, 4)
    return (
        f"rollout.kv_cache_gib={rollout.kv_cache_gib}: keys and values of {one} take {enough} GiB "
        f"({replica.token_bytes:,} bytes a token); use rollout.kv_cache_gib={enough} or more, or "
        "lower sampling.max_tokens or data.max_prompt_tokens"
    )


def ceil_to(number: float, digits: int) -> float:
    """Round up."""
    scale: float = 10.0**digits
    return math.ceil(number * scale) / scale


def _lies_in_share(config: RunConfig) -> bool:
    """Whether the trainer has its weights where replicas find them (training/resident.py)."""
    trainer, model = config.trainer, config.model
    is_plain = model.dtype == "float32" and not model.lora
    return is_plain and trainer.parallel.num_ranks == 1 and not trainer.num_gpus


def num_shards(trainer: TrainerConfig) -> int:
    """Ranks that share the weights, if evenly."""
    return trainer.parallel.num_ranks // trainer.parallel.dp_replicate


def num_snapshots(config: RunConfig, trainer: TrainerConfig) -> int:
    """Of a trainer's state, in memory that outlives its ranks: the newest two, from which they
    start again, beside the one that a checkpoint is written from while the run goes on.
    """
    if not trainer.snapshot_every:
        return 0
    return 2 if config.checkpoint_every == 0 else 3


def disk_bytes(config: RunConfig, flow: Dataflow, shape: ModelShape, *, warm_start: bool) -> int:
    """The most that a run has on disk at a time: checkpoints that are kept and one that is being
    written, of all trained models; exports of the main one, whose shape this is; and records.
    """
    state_bytes = _state_bytes(shape, config.model, config.trainer)
    of_all = checkpoint_bytes(config, flow, shape)
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    export_bytes = shape.num_parameters * itemsize + shape.buffer_bytes
    if config.model.lora:  # once more by themselves
        export_bytes += num_trained(shape, config.model) * MASTER_BYTES
    evaluated = MAX_WAITING + 2 if config.evaluation.every else 0  # one under way, and the best
    num_exports = 1 + evaluated + warm_start
    others = (flow.models[name] for name in flow.other_policies)
    return (
        RECORDS_BYTES
        + sum(partner_published_bytes(config, one) // NUM_VERSIONS for one in others)
        + (config.keep_checkpoints + 1) * of_all
        + num_exports * export_bytes
        + warm_start * state_bytes
    )


def checkpoint_bytes(config: RunConfig, flow: Dataflow, shape: ModelShape) -> int:
    """Of the states of all models that are trained; `shape` is the main one's."""
    return _state_bytes(shape, config.model, config.trainer) + sum(
        _state_bytes(role_shape(config, model), model.config.model, model.config.trainer)
        for model in flow.models.values()
        if isinstance(model.config, TrainedRoleConfig)
    )


def role_shape(config: RunConfig, model: Model) -> ModelShape:
    """Of a model beside the main one, whose weights it takes where it has no path."""
    assert model.config is not None
    path = model.config.model.path
    setting = f"{model.name}.model.path" if path else "model.path"
    return model_shape(path or config.model.path, model.head, setting=setting)


def worker_bytes(config: RunConfig, model: Model) -> int:
    """The weights of each worker of a frozen model."""
    assert model.config is not None
    itemsize: int = getattr(torch, model.config.model.dtype).itemsize
    shape = role_shape(config, model)
    return shape.num_parameters * itemsize + shape.buffer_bytes


def kv_cache_bytes(role: RoleConfig, shape: ModelShape) -> int:
    """Keys and values of all that one engine of a frozen model reads and writes at once."""
    itemsize: int = getattr(torch, role.model.dtype).itemsize
    return int(CACHE_SLACK * role.pass_tokens * shape.kv_values_per_token * itemsize)


def partner_bytes(config: RunConfig, model: Model) -> int:
    """Of each engine of another model that plays a seat: weights and a full KV cache."""
    if isinstance(model.config, RoleConfig):
        return worker_bytes(config, model) + kv_cache_bytes(model.config, role_shape(config, model))
    return _policy_memory(config, model).replica.num_bytes


def partner_published_bytes(config: RunConfig, model: Model) -> int:
    """Of versions of the weights of another policy, over its ranks' hosts."""
    return _policy_memory(config, model).published_bytes


def _policy_memory(config: RunConfig, model: Model) -> MemoryEstimate:
    """As if it were the main one."""
    role = model.config
    assert isinstance(role, TrainedRoleConfig)
    own = replace(config, model=role.model, trainer=role.trainer)
    return estimate_memory(own, role_shape(config, model))


def role_snapshot_bytes(config: RunConfig, model: Model) -> int:
    """Of each rank of a model that is trained beside the main one, in the host's memory."""
    assert isinstance(model.config, TrainedRoleConfig)
    return snapshot_bytes(config, model.config, role_shape(config, model))


def snapshot_bytes(config: RunConfig, trained: TrainedRoleConfig, shape: ModelShape) -> int:
    """Of each rank of a model of this shape that is trained so, in the host's memory."""
    state_bytes = _state_bytes(shape, trained.model, trained.trainer)
    num = max(1, num_snapshots(config, trained.trainer))
    return num * state_bytes // num_shards(trained.trainer)


def _state_bytes(shape: ModelShape, model: ModelConfig, trainer: TrainerConfig) -> int:
    """Of parameters, moments and buffers, as a checkpoint and a snapshot hold them; of adapters
    without the rest of the model.
    """
    buffer_bytes = 0 if model.lora else shape.buffer_bytes
    per_parameter = MASTER_BYTES + moment_bytes(trainer)
    return num_trained(shape, model) * per_parameter + buffer_bytes


def moment_bytes(trainer: TrainerConfig) -> int:
    """Of both, per parameter."""
    itemsize: int = getattr(torch, trainer.moments_dtype).itemsize
    return 2 * itemsize


def num_trained(shape: ModelShape, model: ModelConfig) -> int:
    """Parameters, or those of adapters."""
    if model.adapters is None:
        return shape.num_parameters
    adapters = model.adapters
    widths = (width for name, width in shape.linear_layers.items() if adapters.adapts(name))
    return adapters.rank * sum(widths)


def row_bytes(config: RunConfig, flow: Dataflow) -> int:
    """The most that the store holds of one row."""
    return store_layout.row_bytes(
        flow, max_prompt_tokens=config.data.max_prompt_tokens, max_tokens=config.sampling.max_tokens
    )


def store_bytes(config: RunConfig, flow: Dataflow) -> int:
    """Of each node: room for all that the bound on staleness lets be in flight, twice over, if it
    were all sampled there; `cluster.store_gib` at most.
    """
    num_groups = (
        config.prompts_per_step * (1 + config.asynchrony.max_staleness)
        + config.asynchrony.over_issue
    )
    in_flight = num_groups * config.group_size * row_bytes(config, flow)
    most = int(config.cluster.store_gib * 2**30)
    return min(most, max(MIN_STORE_BYTES, int(2 * in_flight / STORE_FILL)))


def check_store(config: RunConfig, flow: Dataflow) -> None:
    """Raise ValueError where the store of a node cannot hold one group, or a machine's store not
    the groups of one step.
    """
    each = config.group_size * row_bytes(config, flow)
    room = int(store_bytes(config, flow) * STORE_FILL)
    one_node = config.cluster.address is None and "RAY_ADDRESS" not in os.environ
    num_groups = config.prompts_per_step if one_node else 1
    if num_groups * each <= room:
        return
    needed = ceil_to(num_groups * each / STORE_FILL / 2**30, 4)
    what = f"a step of {num_groups} groups" if num_groups > 1 else "one group"
    raise ValueError(
        f"cluster.store_gib={config.cluster.store_gib:g}: {what} of group_size={config.group_size} "
        f"rollouts, with data.max_prompt_tokens={config.data.max_prompt_tokens} and "
        f"sampling.max_tokens={config.sampling.max_tokens}, needs {needed:g} GiB. Raise it, or "
        "lower one of these."
    )
