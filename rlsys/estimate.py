"""How much memory a run will take, before it starts: for --dry-run and the check of the disk.

In: the configuration and the model's shape (read from its config.json, no weights loaded).
Out: bytes of a trainer's rank, of other kinds of actors, and of the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlsys.config import ModelConfig, RoleConfig, RunConfig, TrainedRoleConfig, TrainerConfig
from rlsys.data.hub import check_model_path, in_short, unreadable
from rlsys.dataflow import graph_store
from rlsys.dataflow.graph import Dataflow
from rlsys.dataflow.stages import Head, Model
from rlsys.engines.context import context_length
from rlsys.engines.model_tensors import model_tensors
from rlsys.engines.training.pass_memory import (
    Passes,
    RankBytes,
    fullest_rank,
    holdings_of_ranks,
)
from rlsys.hf_config import largest
from rlsys.layout.holdings import Box, Holder
from rlsys.layout.link_bytes import size_text
from rlsys.layout.plan import plan
from rlsys.run_directory import MAX_WAITING

# Rows of any length leave gaps in the store's memory; this share of it is promised to rows.
STORE_FILL = 0.5
MIN_STORE_BYTES = 64 << 20

MASTER_BYTES, GRAD_BYTES = 4, 4  # per parameter, float32

# Of published weights, beside those that replicas compute with: the newest, and the one before
# while a replica still reads it.
NUM_VERSIONS = 2
# And for other nodes, packed: what was sent last and what it has changed to since, from which
# changes are told, and in Ray's object store what is on its way.
NUM_PACKED = 3

# Places in the cache of a frozen model that writes, for each of its pass_tokens: they are given out
# in blocks, and some models keep more than two vectors a head.
CACHE_SLACK = 1.5

# What a rank's allocator keeps beside what is held, because it lies in pieces of other sizes, as a
# share of that. Measured of glibc's, on CPUs: 11 to 21 % (docs/benchmarks.md). Of torch's allocator
# on GPUs it is not known.
SHARE_IN_PIECES = 0.12

# Metrics, rollouts and a trace of an average run, beside its models.
RECORDS_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    num_parameters: int
    buffer_bytes: int  # of those that are saved with the model
    linear_layers: Mapping[str, int]  # all but the head: inputs and outputs together, by name
    kv_values_per_token: int  # elements of keys and values over all layers
    max_context: int
    config: Any  # the Hugging Face configuration


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of what one rank that trains has at the moment of a step that takes most: within a
    pass, while gradients of earlier passes are there. Of ranks that have more and less, the one
    with the most."""

    weights: int  # masters, and what is frozen beside adapters
    gradients: int
    moments: int
    passes: int  # activations, what is gathered for them, logits
    untold: str = ""  # why `passes` is not told, and counts as nothing
    on_gpu: bool = False

    @property
    def in_pieces(self) -> int:
        """What the allocator keeps beside; of that on GPUs, nothing is told."""
        return 0 if self.on_gpu else int(SHARE_IN_PIECES * self._used)

    @property
    def total(self) -> int:
        return self._used + self.in_pieces

    @property
    def _used(self) -> int:
        return self.weights + self.gradients + self.moments + self.passes


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    published_bytes: int  # versions of the weights for the replicas, over the ranks' hosts
    lies_in_share: bool  # the newest of them is the rank's own weights, and counts as theirs
    packed_bytes: int  # for replicas on other nodes, over the ranks' hosts
    snapshot_bytes: int  # per trainer rank, in the host's memory
    replica_bytes: int


def model_shape(path: str, head: Head = "logits", *, setting: str = "model.path") -> ModelShape:
    """Of a model with this head. Raises ValueError where `path`, which `setting` gives, holds none
    that it fits on."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    from rlsys.engines.scalar_lm import SCALAR_HEAD, scalar_class

    check_model_path(path, setting=setting)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            if head == "logits":
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            else:
                model = scalar_class(config)(config)
    except unreadable() as error:
        raise ValueError(
            f"{setting}={path!r} holds no {'causal ' if head == 'logits' else ''}language model "
            f"({in_short(error)}); give a Hugging Face model directory or hub name."
        ) from error
    text = config.get_text_config()
    num_heads = largest(text, "num_attention_heads", default=1)
    head_dim = largest(text, "head_dim", default=text.hidden_size // num_heads)
    num_kv_heads = largest(text, "num_key_value_heads", default=num_heads)
    return ModelShape(
        num_parameters=num_parameters(model),
        buffer_bytes=sum(
            tensor.nbytes
            for tensor in model_tensors(model).values()
            if not isinstance(tensor, torch.nn.Parameter)
        ),
        linear_layers={
            name: sum(module.weight.shape)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D)
            and module is not model.get_output_embeddings()
            and name != SCALAR_HEAD
        },
        kv_values_per_token=2 * text.num_hidden_layers * num_kv_heads * head_dim,
        max_context=context_length(config),
        config=config,
    )


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def estimate_memory(config: RunConfig, shape: ModelShape) -> MemoryEstimate:
    """Of the main model, beside what its ranks train with and checkpoints hold."""
    itemsize = getattr(torch, config.model.dtype).itemsize
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if config.rollout.engine == "vllm":
        cache_bytes = int(config.rollout.kv_cache_gib * 2**30)
    else:
        cache_bytes = longest * config.rollout.max_running * shape.kv_values_per_token * itemsize
    own = TrainedRoleConfig(model=config.model, trainer=config.trainer)
    lies_in_share = _lies_in_share(config)
    return MemoryEstimate(
        published_bytes=(NUM_VERSIONS - lies_in_share) * shape.num_parameters * itemsize,
        lies_in_share=lies_in_share,
        packed_bytes=NUM_PACKED * shape.num_parameters * itemsize,
        snapshot_bytes=snapshot_bytes(config, own, shape),
        replica_bytes=shape.num_parameters * itemsize + cache_bytes,
    )


def _lies_in_share(config: RunConfig) -> bool:
    """Whether the trainer has its weights where replicas find them (training/resident.py)."""
    trainer, model = config.trainer, config.model
    is_plain = model.dtype == "float32" and not model.lora
    return is_plain and trainer.parallel.num_ranks == 1 and not trainer.num_gpus


# Ranks are laid out one by one, in a fraction of a second each.
MAX_PLANNED_RANKS = 32


ITS_NODE, ANOTHER_NODE = "its node", "another node"


@dataclass(frozen=True, kw_only=True)
class PlannedLinks:
    """Bytes of a version on their way to the replicas of a node."""

    put: Sequence[int]  # by rank of the trainer: stages them there, or sends them
    read: int  # by a replica, from its node's memory

    def describe(self, to: str) -> Iterator[str]:
        """A line for each rank, and one for a replica."""
        by_link = {f"rank {rank} -> {to}": num_bytes for rank, num_bytes in enumerate(self.put)}
        by_link[f"{to} -> replica"] = self.read
        width = max(map(len, by_link))
        yield from (f"{link:{width}}{size_text(of)}" for link, of in by_link.items())


def planned_links(config: RunConfig, shape: ModelShape, *, to: str) -> PlannedLinks | None:
    """Where all ranks of the trainer lie on one node and replicas on `to`: "its node", or another.
    None where that is not told beforehand: of many ranks, and where the layout does not fit the
    model."""
    layout, dtype = config.trainer.parallel, getattr(torch, config.model.dtype)
    if layout.num_ranks > MAX_PLANNED_RANKS:
        return None
    try:
        ranks = holdings_of_ranks(
            shape.config, head="logits", dtype=config.model.dtype, layout=layout
        )
    except ValueError:
        return None
    sources = tuple(Holder(str(rank), ITS_NODE, tuple(held)) for rank, held in enumerate(ranks))
    whole = {one.name: one for held in ranks for one in held}
    wanted = (
        replace(
            one,
            box=Box.whole(one.shape),
            dtype=dtype if one.dtype.is_floating_point else one.dtype,
        )
        for one in whole.values()
    )
    found = plan(sources, (Holder("replica", to, tuple(wanted)),))
    return PlannedLinks(
        put=[found.put.get((source.rank, to), 0) for source in sources],
        read=found.bytes_per_link.read["replica"],
    )


def estimate_rank(
    config: RunConfig, trained: TrainedRoleConfig, shape: ModelShape, head: Head
) -> RankMemory:
    """Of a model of the run that is trained so, with this shape and head. A full pass has rows as
    long as they can be."""
    model, trainer = trained.model, trained.trainer
    try:
        rank = fullest_rank(
            shape.config,
            head=head,
            dtype=model.dtype,
            checkpointing=model.checkpointing(on_gpu=trainer.num_gpus > 0),
            layout=trainer.parallel,
            passes=_passes(config, trainer, shape),
        )
    except ValueError as error:
        even = shape.num_parameters // _num_shards(trainer)
        rank = RankBytes(num_parameters=even, passes=None, untold=str(error))
    # Of adapters, what they are of the whole model.
    num_trained = rank.num_parameters * _num_trained(shape, model) // shape.num_parameters
    itemsize = getattr(torch, model.dtype).itemsize
    frozen_bytes = rank.num_parameters * itemsize if model.lora else 0
    return RankMemory(
        weights=num_trained * MASTER_BYTES + frozen_bytes,
        gradients=num_trained * GRAD_BYTES,
        moments=num_trained * _moment_bytes(trainer),
        passes=rank.passes or 0,
        untold=rank.untold,
        on_gpu=trainer.num_gpus > 0,
    )


def _passes(config: RunConfig, trainer: TrainerConfig, shape: ModelShape) -> Passes:
    """Full ones, as many as a stage of a pipeline may have under way."""
    layout, budget = trainer.parallel, trainer.micro_batch_tokens
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    longest = min(longest, shape.max_context)
    num_rows = max(1, config.rollouts_per_step // layout.num_data)
    num_in_pass = max(1, min(num_rows, round(budget / longest)))
    return Passes(
        count=min(-(-num_rows // num_in_pass), 2 * layout.pp) if layout.pp > 1 else 1,
        num_rows=num_in_pass,
        row_tokens=longest if num_in_pass == 1 else min(longest, budget // num_in_pass),
    )


def _num_shards(trainer: TrainerConfig) -> int:
    """Ranks that share the weights, if evenly."""
    return trainer.parallel.num_ranks // trainer.parallel.dp_replicate


def num_snapshots(config: RunConfig, trainer: TrainerConfig) -> int:
    """Of a trainer's state, in memory that outlives its ranks: the newest two, from which they
    start again, beside the one that a checkpoint is written from while the run goes on."""
    if not trainer.snapshot_every:
        return 0
    return 3 if config.checkpoint_every else 2


def disk_bytes(config: RunConfig, flow: Dataflow, shape: ModelShape, *, warm_start: bool) -> int:
    """The most that a run has on disk at a time: checkpoints that are kept and one that is being
    written, of all trained models; exports of the main one, whose shape this is; and records."""
    state_bytes = _state_bytes(shape, config.model, config.trainer)
    of_all = checkpoint_bytes(config, flow, shape)
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    export_bytes = shape.num_parameters * itemsize + shape.buffer_bytes
    if config.model.lora:  # once more by themselves
        export_bytes += _num_trained(shape, config.model) * MASTER_BYTES
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
    return _policy_memory(config, model).replica_bytes


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
    return num * state_bytes // _num_shards(trained.trainer)


def _state_bytes(shape: ModelShape, model: ModelConfig, trainer: TrainerConfig) -> int:
    """Of parameters, moments and buffers, as a checkpoint and a snapshot hold them; of adapters
    without the rest of the model."""
    buffer_bytes = 0 if model.lora else shape.buffer_bytes
    per_parameter = MASTER_BYTES + _moment_bytes(trainer)
    return _num_trained(shape, model) * per_parameter + buffer_bytes


def _moment_bytes(trainer: TrainerConfig) -> int:
    """Of both, per parameter."""
    itemsize: int = getattr(torch, trainer.moments_dtype).itemsize
    return 2 * itemsize


def _num_trained(shape: ModelShape, model: ModelConfig) -> int:
    """Parameters, or those of adapters."""
    if model.adapters is None:
        return shape.num_parameters
    adapters = model.adapters
    widths = (width for name, width in shape.linear_layers.items() if adapters.adapts(name))
    return adapters.rank * sum(widths)


def row_bytes(config: RunConfig, flow: Dataflow) -> int:
    """The most that the store holds of one row."""
    return graph_store.row_bytes(
        flow, max_prompt_tokens=config.data.max_prompt_tokens, max_tokens=config.sampling.max_tokens
    )


def store_bytes(config: RunConfig, flow: Dataflow) -> int:
    """Of each node: room for all that the bound on staleness lets be in flight, twice over, if it
    were all sampled there; `cluster.store_gib` at most."""
    num_groups = (
        config.prompts_per_step * (1 + config.asynchrony.max_staleness)
        + config.asynchrony.over_issue
    )
    in_flight = num_groups * config.group_size * row_bytes(config, flow)
    most = int(config.cluster.store_gib * 2**30)
    return min(most, max(MIN_STORE_BYTES, int(2 * in_flight / STORE_FILL)))
