"""Estimates of the memory of a trainer's ranks and of the traffic to replicas, for --dry-run.

The model is sharded like on the ranks, but with meta tensors
(rlsys/engines/training/microbatch_memory.py). The imports for it take seconds, and only --dry-run
needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlsys.config import (
    Checkpointing,
    Precision,
    RunConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.config.lora import Lora
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.dataflow.graph.stages import Head
from rlsys.engines.models.model_shape import ModelShape
from rlsys.engines.training.adapters import factor_tensors
from rlsys.engines.training.microbatch_memory import (
    MicroBatchPlan,
    RankBytes,
    fullest_rank,
    holdings_of_ranks,
)
from rlsys.launcher.memory_estimate import MASTER_BYTES, moment_bytes, num_shards, num_trained
from rlsys.reallocation.plan import plan
from rlsys.reallocation.shards import Box, Holder, TensorShard

GRAD_BYTES = 4  # per parameter, float32

# Memory that a rank's allocator loses to fragmentation, as a fraction of the memory in use. For
# glibc on CPUs, 11 to 21 % were measured (docs/benchmarks.md). For torch on GPUs it is unknown.
FRAGMENTED_FRAC = 0.12

# Planning takes a fraction of a second for each rank.
MAX_PLANNED_RANKS = 32

ITS_NODE, ANOTHER_NODE = "its node", "another node"


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Largest memory of the fullest training rank during a step, in bytes.

    The maximum is reached in a micro-batch after the first, when gradients exist already.
    """

    weights: int  # float32 weights, and frozen weights besides adapters
    gradients: int
    moments: int
    passes: int  # activations, weights gathered for them, logits
    unknown_reason: str = ""  # why `passes` is unknown and counts as 0
    on_gpu: bool = False

    @property
    def fragmented(self) -> int:
        """Memory lost to fragmentation; 0 on GPUs, where it is unknown."""
        return 0 if self.on_gpu else int(FRAGMENTED_FRAC * self._used)

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self._used + self.fragmented

    @property
    def _used(self) -> int:
        return self.weights + self.gradients + self.moments + self.passes


@dataclass(frozen=True, kw_only=True)
class PlannedLinks:
    """Traffic of one version of the weights to the replicas of a node, in bytes."""

    put: Sequence[int]  # staged or sent by each rank of the trainer
    read: int  # read by a replica from its node's memory


def planned_links(config: RunConfig, shape: ModelShape, *, to: str) -> PlannedLinks:
    """Return the traffic from a trainer on one node to replicas on `to`, its node or another one.

    Engines that add the adapters themselves (rollout.vllm.enable_lora) get the factors alone.

    Raises ValueError, with the reason, for many ranks and for a layout that does not fit the model.
    """
    layout, dtype = config.trainer.parallel, getattr(torch, config.model.dtype)
    if layout.num_ranks > MAX_PLANNED_RANKS:
        raise ValueError(f"the layout has more than {MAX_PLANNED_RANKS} ranks")
    adapters = config.model.adapters if config.rollout.sends_adapters else None
    if adapters is None:
        ranks = holdings_of_ranks(
            shape.config, head="logits", dtype=config.model.dtype, layout=layout
        )
    else:
        ranks = _factors_of_ranks(shape, adapters, layout)
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


def _factors_of_ranks(
    shape: ModelShape, adapters: Lora, layout: ParallelLayout
) -> list[list[TensorShard]]:
    """Return the factors of the adapters on each rank: FSDP2 shards their rows over dp_shard."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config)
    whole = {name: tuple(one.shape) for name, one in factor_tensors(model, adapters).items()}

    def part(name: str, index: int) -> TensorShard:
        num_rows, *others = whole[name]
        each = -(-num_rows // layout.dp_shard)
        rows = (min(num_rows, index * each), min(num_rows, (index + 1) * each))
        box = Box((rows, *((0, size) for size in others)))
        return TensorShard(name=name, shape=whole[name], dtype=torch.float32, box=box)

    return [
        [part(name, rank % layout.dp_shard) for name in whole] for rank in range(layout.num_ranks)
    ]


def estimate_rank(
    config: RunConfig, trained: TrainedRoleConfig, shape: ModelShape, head: Head
) -> RankMemory:
    """Return the memory of a rank of a trained model with this shape and head.

    The estimate is for full micro-batches of the longest rows.
    """
    model, trainer = trained.model, trained.trainer
    try:
        rank = _fullest_rank(
            shape.config,
            head,
            model.dtype,
            model.checkpointing(on_gpu=trainer.num_gpus > 0),
            trainer.parallel,
            _passes(config, trainer, shape),
            trainer.num_gpus > 0,
        )
    except ValueError as error:
        even = shape.num_parameters // num_shards(trainer)
        rank = RankBytes(num_parameters=even, passes=None, unknown_reason=str(error))
    # The rank trains the same fraction of the adapters as of the whole model.
    trained_here = rank.num_parameters * num_trained(shape, model) // shape.num_parameters
    itemsize = getattr(torch, model.dtype).itemsize
    frozen_bytes = rank.num_parameters * itemsize if model.lora else 0
    return RankMemory(
        weights=trained_here * MASTER_BYTES + frozen_bytes,
        gradients=trained_here * GRAD_BYTES,
        moments=trained_here * moment_bytes(trainer),
        passes=rank.passes or 0,
        unknown_reason=rank.unknown_reason,
        on_gpu=trainer.num_gpus > 0,
    )


# Cached results. The first part of the key describes the model.
_FOUND: dict[tuple[object, ...], RankBytes] = {}
MAX_FOUND = 64


def _fullest_rank(
    config: Any,
    head: Head,
    dtype: Precision,
    checkpointing: Checkpointing,
    layout: ParallelLayout,
    passes: MicroBatchPlan,
    on_gpu: bool,
) -> RankBytes:
    """Return `fullest_rank`, which takes up to a minute, from a cache if possible."""
    key = (config.to_json_string(), head, dtype, checkpointing, layout, passes, on_gpu)
    if key not in _FOUND:
        if len(_FOUND) == MAX_FOUND:
            _FOUND.clear()
        _FOUND[key] = fullest_rank(
            config,
            head=head,
            dtype=dtype,
            checkpointing=checkpointing,
            layout=layout,
            passes=passes,
            on_gpu=on_gpu,
        )
    return _FOUND[key]


def _passes(config: RunConfig, trainer: TrainerConfig, shape: ModelShape) -> MicroBatchPlan:
    """Return full micro-batches, as many as a pipeline stage can have in progress."""
    layout, budget = trainer.parallel, trainer.micro_batch_tokens
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    longest = min(longest, shape.max_context)
    num_rows = max(1, config.rollouts_per_step // layout.num_data)
    num_in_pass = max(1, min(num_rows, round(budget / longest)))
    return MicroBatchPlan(
        count=min(-(-num_rows // num_in_pass), 2 * layout.pp) if layout.pp > 1 else 1,
        num_rows=num_in_pass,
        row_tokens=longest if num_in_pass == 1 else min(longest, budget // num_in_pass),
    )
