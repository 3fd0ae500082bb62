"""How much memory a run will take, before it starts: for --dry-run and the check of the disk.

In: the configuration and the model's shape (read from its config.json, no weights loaded).
Out: bytes for each kind of actor, and for the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from rlsys.config import ModelConfig, RunConfig, TrainedRoleConfig, TrainerConfig
from rlsys.data.hub import check_model_path, in_short, unreadable
from rlsys.dataflow.graph import Dataflow
from rlsys.dataflow.stages import Head
from rlsys.engines.context import context_length
from rlsys.engines.model_tensors import model_tensors
from rlsys.engines.training.pass_memory import pass_bytes
from rlsys.engines.training.publisher import NUM_KEPT
from rlsys.engines.training.sharding import named_layers
from rlsys.hf_config import largest
from rlsys.run_directory import MAX_WAITING

# Rows of any length leave gaps in the store's memory; this share of it is promised to rows.
STORE_FILL = 0.5
MIN_STORE_BYTES = 64 << 20

MASTER_BYTES, GRAD_BYTES = 4, 4  # per parameter, float32

# Decoder layers whose weights are gathered at once: the one that is computed, and the next.
NUM_GATHERED = 2

# Metrics, rollouts and a trace of an average run, beside its models.
RECORDS_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    num_parameters: int
    layer_parameters: int  # of its largest decoder layer
    outer_parameters: int  # of what is in none: embedding, last norm, head
    buffer_bytes: int  # of those that are saved with the model
    linear_layers: Mapping[str, int]  # all but the head: inputs and outputs together, by name
    kv_values_per_token: int  # elements of keys and values over all layers
    max_context: int
    config: Any  # the Hugging Face configuration


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of what one trainer rank has at the moment of a step that takes most: as the backward
    pass begins, while gradients of earlier passes are there."""

    weights: int  # masters, and what is frozen beside adapters
    gradients: int
    moments: int
    gathered: int  # of all ranks' weights what a pass computes with, in its precision
    activations: int  # of a pass, and the work on its logits

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    trainer_rank: RankMemory
    published_bytes: int  # versions of the weights for the replicas, in the first rank's host
    snapshot_bytes: int  # per trainer rank, in the host's memory
    replica_bytes: int
    checkpoint_bytes: int


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
            f"{setting}={path!r} holds no causal language model ({in_short(error)}); give a "
            "Hugging Face model directory or hub name."
        ) from error
    layers = [num_parameters(layer) for layer in named_layers(model)]
    text = config.get_text_config()
    num_heads = largest(text, "num_attention_heads", default=1)
    head_dim = largest(text, "head_dim", default=text.hidden_size // num_heads)
    num_kv_heads = largest(text, "num_key_value_heads", default=num_heads)
    return ModelShape(
        num_parameters=num_parameters(model),
        layer_parameters=max(layers, default=0),
        outer_parameters=num_parameters(model) - sum(layers),
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


def estimate_memory(
    config: RunConfig, shape: ModelShape, *, activation_bytes: int = 0
) -> MemoryEstimate:
    """`activation_bytes`: what `estimate_activations` says, where it is to count."""
    itemsize = getattr(torch, config.model.dtype).itemsize
    num_trained = _num_trained(shape, config.model)
    frozen_bytes = shape.num_parameters * itemsize if config.model.lora else 0
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if config.rollout.engine == "vllm":
        kv_cache_bytes = int(config.rollout.kv_cache_gib * 2**30)
    else:
        kv_cache_bytes = longest * config.rollout.max_running * shape.kv_values_per_token * itemsize
    state_bytes = _state_bytes(shape, config.model, config.trainer)
    layout = config.trainer.parallel
    num_shards = layout.num_ranks // layout.dp_replicate
    gathers = num_shards > 1 or itemsize != MASTER_BYTES
    gathered = shape.outer_parameters + NUM_GATHERED * shape.layer_parameters
    rank = RankMemory(
        weights=(num_trained * MASTER_BYTES + frozen_bytes) // num_shards,
        gradients=num_trained * GRAD_BYTES // num_shards,
        moments=num_trained * _moment_bytes(config.trainer) // num_shards,
        gathered=gathers * gathered * itemsize // layout.tp,
        activations=activation_bytes,
    )
    return MemoryEstimate(
        trainer_rank=rank,
        published_bytes=NUM_KEPT * shape.num_parameters * itemsize,
        snapshot_bytes=max(1, num_snapshots(config, config.trainer)) * state_bytes // num_shards,
        replica_bytes=shape.num_parameters * itemsize + kv_cache_bytes,
        checkpoint_bytes=state_bytes,
    )


def estimate_activations(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of a full pass on one rank, of rows as long as they can be: each of its tokens is
    trained on.

    Of layouts with tp or cp, which share tokens and heads, the part of one rank; a stage of a
    pipeline holds as many passes as there are stages, of its part of the layers each. Raises
    ValueError where it cannot be told.
    """
    layout, budget = config.trainer.parallel, config.trainer.micro_batch_tokens
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    longest = min(longest, shape.max_context)
    num_rows = config.rollouts_per_step // layout.num_data
    num_rows = max(1, min(num_rows, round(budget / longest)))
    on_gpu = config.trainer.num_gpus > 0
    whole = pass_bytes(
        shape.config,
        dtype=config.model.dtype,
        checkpointing=config.model.checkpointing(on_gpu=on_gpu),
        num_rows=num_rows,
        row_tokens=longest if num_rows == 1 else min(longest, budget // num_rows),
    )
    return whole // layout.num_token_shards


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
    of_all = state_bytes + sum(
        _state_bytes(
            model_shape(model.config.model.path or config.model.path, model.head),
            model.config.model,
            model.config.trainer,
        )
        for model in flow.models.values()
        if isinstance(model.config, TrainedRoleConfig)
    )
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    export_bytes = shape.num_parameters * itemsize + shape.buffer_bytes
    if config.model.lora:  # once more by themselves
        export_bytes += _num_trained(shape, config.model) * MASTER_BYTES
    evaluated = MAX_WAITING + 2 if config.evaluation.every else 0  # one under way, and the best
    num_exports = 1 + evaluated + warm_start
    return (
        RECORDS_BYTES
        + (config.keep_checkpoints + 1) * of_all
        + num_exports * export_bytes
        + warm_start * state_bytes
    )


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
    return flow.row_bytes(
        max_prompt_tokens=config.data.max_prompt_tokens, max_tokens=config.sampling.max_tokens
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
