"""What a trainer's ranks will hold, and what goes over each link to a replica: for --dry-run.

The model is laid out as the ranks do it, without numbers (engines/training/pass_memory.py), which
takes imports of seconds that no run needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.dataflow.graph.stages import Head
from rlsys.engines.models.model_shape import ModelShape
from rlsys.engines.training.microbatch_memory import (
    MicroBatchPlan,
    RankBytes,
    fullest_rank,
    holdings_of_ranks,
)
from rlsys.launch.memory_estimate import MASTER_BYTES, moment_bytes, num_shards, num_trained
from rlsys.reallocation.plan import plan
from rlsys.reallocation.shards import Box, Holder
from rlsys.reallocation.traffic import size_text

GRAD_BYTES = 4  # per parameter, float32

# What a rank's allocator keeps beside what is held, because it lies in pieces of other sizes, as a
# share of that. Measured of glibc's, on CPUs: 11 to 21 % (docs/benchmarks.md). Of torch's allocator
# on GPUs it is not known.
SHARE_IN_PIECES = 0.12

# Ranks are laid out one by one, in a fraction of a second each.
MAX_PLANNED_RANKS = 32

ITS_NODE, ANOTHER_NODE = "its node", "another node"


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of what one rank that trains has at the moment of a step that takes most: within a
    pass, while gradients of earlier passes are there. Of ranks that have more and less, the one
    with the most.
    """

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
    model.
    """
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
    long as they can be.
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
        rank = RankBytes(num_parameters=even, passes=None, untold=str(error))
    # Of adapters, what they are of the whole model.
    trained_here = rank.num_parameters * num_trained(shape, model) // shape.num_parameters
    itemsize = getattr(torch, model.dtype).itemsize
    frozen_bytes = rank.num_parameters * itemsize if model.lora else 0
    return RankMemory(
        weights=trained_here * MASTER_BYTES + frozen_bytes,
        gradients=trained_here * GRAD_BYTES,
        moments=trained_here * moment_bytes(trainer),
        passes=rank.passes or 0,
        untold=rank.untold,
        on_gpu=trainer.num_gpus > 0,
    )


# Of one model, whose description is the first part of the key.
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
    """Return what `fullest_rank` finds, which takes up to a minute, once for equal arguments."""
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
    """Full ones, as many as a stage of a pipeline may have under way."""
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
