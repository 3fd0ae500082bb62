"""Measure weight updates from a trainer's layout to that of generation engines.

    python scripts/bench/weights.py [LAYOUT ...] [--layers 91] [--nodes 125] [--tp 8]
                                    [--model-mb 500] [--only PART ...]

plan    a trainer of each LAYOUT and engines of `--tp` ranks on `--nodes` other nodes, eight ranks
        on a node; each layer of the model has 11 tensors with the widths of Qwen3-32B
share   one rank's share of `--model-mb` MB, staged in shared memory and verified
torch   a trainer's process to a torch engine on the same node, a model of `--model-mb` MB in
        float32
memory  additional memory of that trainer, with and without a reader that keeps the last version
vllm    the same to vLLM, with that model and with one of 0.8M parameters
peer    a trainer of dp1, then dp2tp2, and two readers on the same node, against gathering a state
        dict on rank 0 and writing it to a file, or broadcasting it over gloo
changes that model in bfloat16 to another node, over 20 optimizer steps at a learning rate of 1e-6
move    a trainer's state of that model, with moments, from dp2 to tp2

Prints one line of JSON last:

    plan_s, part_s          seconds (one core) of the slowest plan, and until a node knows its part
    bytes_moved             of all plans, with the minimum
    gb_per_s                from the trainer's call until the engine can continue, without requests
    memcpy_ratio            of a memcpy of as many bytes before each update over gb_per_s's time
    vllm_update_ms, vllm_pause_ms    of the small model, with running requests
    pause_500mb_ms          of the large model, with a memcpy of as many bytes
    wait_ratio_*            the trainer's wait divided by that for a gathered file
    gather_broadcast_ratio  of the time until two readers have their parts
    peak_extra_mb           memory of a trainer that publishes while a reader keeps the last version
    peak_extra_alone_mb     the same without readers
    bytes_published         by four real ranks of dp2tp2, with the minimum
    delta_ratio             bytes sent of changes divided by those of whole versions
    move_s                  a state moved from snapshots of the same node
    move_between_s          the same with missing parts packed on another node, verified, not sent
    save_s, load_s          by a checkpoint on disk
    move_ratio              save_s + load_s over move_s

Staging with digests, verification and memcpy on one thread are medians in GB/s.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

# Scripts of this folder have the names of recipes, so the checkout must come first.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from rlsys.config.parallel_layout import ParallelLayout
from rlsys.reallocation.plan import plan
from rlsys.reallocation.shards import Box, Holder, TensorShard
from rlsys.reallocation.traffic import minimal_bytes
from rlsys.reallocation.transport.staging import Share, StagingBuffer
from scripts.bench import moving, updates

PARTS = ("plan", "share", "torch", "memory", "vllm", "peer", "changes", "move")
LAYOUTS = ("dp125tp8", "dp5x25tp8", "dp16tp8pp8")
RANKS_PER_NODE = 8

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor of a model, and how tensor ranks split it."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None  # dimension to split; None: replicated
    layer: int | None = None  # None: before or after all layers
    is_last: bool = False  # after all layers
    is_expert: bool = False  # split along the first dimension, also over expert ranks


def dense_model(
    num_layers: int, *, width: int = 5120, heads: int = 8192, kv: int = 1024, mlp: int = 25600
) -> list[Weight]:
    """Return a Qwen3 without biases: widths of the model, its queries, keys and MLP."""
    sizes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "self_attn.q_proj": ((heads, width), 0),
        "self_attn.k_proj": ((kv, width), 0),
        "self_attn.v_proj": ((kv, width), 0),
        "self_attn.o_proj": ((width, heads), 1),
        "self_attn.q_norm": ((128,), None),
        "self_attn.k_norm": ((128,), None),
        "mlp.gate_proj": ((mlp, width), 0),
        "mlp.up_proj": ((mlp, width), 0),
        "mlp.down_proj": ((width, mlp), 1),
        "input_layernorm": ((width,), None),
        "post_attention_layernorm": ((width,), None),
    }
    layers = [
        Weight(name=f"model.layers.{layer}.{name}.weight", shape=shape, cut=cut, layer=layer)
        for layer in range(num_layers)
        for name, (shape, cut) in sizes.items()
    ]
    return [
        Weight(name="model.embed_tokens.weight", shape=(151_936, width), cut=0),
        *layers,
        Weight(name="model.norm.weight", shape=(width,), is_last=True),
        Weight(name="lm_head.weight", shape=(151_936, width), cut=0, is_last=True),
    ]


def trainer(
    layout: ParallelLayout,
    model: Sequence[Weight],
    *,
    dtype: torch.dtype = torch.float32,
    name: str = "trainer",
    ranks_per_node: int = RANKS_PER_NODE,
) -> tuple[Holder, ...]:
    """Return the shards of ranks of FSDP2 over tensor, expert and pipeline ranks."""
    known: dict[tuple[Any, ...], Box] = {}

    def box(weight: Weight, at: dict[str, int]) -> Box:
        key = (weight.shape, weight.cut, weight.is_expert, *at.values())
        if key not in known:
            known[key] = _sharded(weight, layout, at)
        return known[key]

    stages = _stages(model, layout)
    holders = []
    for rank in range(layout.num_ranks):
        at = layout.coordinates(rank)
        stage = at.pop("pp")
        at.pop("dp_replicate")
        held = (
            TensorShard(name=one.name, shape=one.shape, dtype=dtype, box=box(one, at))
            for one, of in zip(model, stages, strict=True)
            if of == stage
        )
        holders.append(Holder(f"{name}-{rank}", f"{name}s-{rank // ranks_per_node}", tuple(held)))
    return tuple(holders)


def _stages(model: Sequence[Weight], layout: ParallelLayout) -> list[int]:
    """Return the pipeline stage of each weight."""
    num_layers = 1 + max((one.layer for one in model if one.layer is not None), default=0)
    count = layout.pp * layout.num_pieces
    edges = [num_layers * (piece + 1) // count for piece in range(count)]
    return [
        (layout.pp - 1) * one.is_last if one.layer is None else bisect(edges, one.layer) % layout.pp
        for one in model
    ]


def _sharded(weight: Weight, layout: ParallelLayout, at: dict[str, int]) -> Box:
    bounds = [(0, size) for size in weight.shape]
    cutters = ("ep", "tp") if weight.is_expert else ("tp",)
    sharders = ("dp_shard", "cp") if weight.is_expert else ("dp_shard", "ep", "cp")
    if weight.cut is not None:
        bounds[weight.cut] = _chunk(bounds[weight.cut], _index(layout, at, cutters))
    if bounds:
        bounds[0] = _chunk(bounds[0], _index(layout, at, sharders))
    return Box(tuple(bounds))


def _index(
    layout: ParallelLayout, at: dict[str, int], dimensions: Sequence[str]
) -> tuple[int, int]:
    index = 0
    for name in dimensions:
        index = index * layout.size(name) + at[name]
    return index, layout.size(*dimensions)


def _chunk(bounds: tuple[int, int], place: tuple[int, int]) -> tuple[int, int]:
    """Return the bounds of torch.chunk, whose last chunks may be smaller or empty."""
    (start, stop), (index, count) = bounds, place
    size = -(-(stop - start) // count)
    return min(stop, start + index * size), min(stop, start + (index + 1) * size)


def replicas(
    num: int,
    tp: int,
    model: Sequence[Weight],
    *,
    dtype: torch.dtype = torch.bfloat16,
    ranks_per_node: int = RANKS_PER_NODE,
) -> tuple[Holder, ...]:
    """Return the shards of the ranks of generation engines on their own nodes."""
    ranks = trainer(ParallelLayout(tp=tp), model, dtype=dtype)
    return tuple(
        Holder(f"rollout-{n}.{rank}", f"rollouts-{(n * tp + rank) // ranks_per_node}", of.holdings)
        for n in range(num)
        for rank, of in enumerate(ranks)
    )


def _timed(function: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    start = time.process_time()
    found = function(*arguments)
    return time.process_time() - start, found


def measure(layout: ParallelLayout, num_nodes: int, tp: int, num_layers: int) -> dict[str, Any]:
    """Return the numbers of planning."""
    model = dense_model(num_layers)
    sources = trainer(layout, model)
    targets = replicas(num_nodes * RANKS_PER_NODE // tp, tp, model)
    plan_s, found = _timed(plan, sources, targets)
    moved, least = found.bytes_per_link, minimal_bytes(sources, targets)
    target = targets[-1]
    part_s, _ = _timed(lambda: (found.imports(target.node), found.reads(target.rank)))
    print(found.describe())
    return {
        "tensors": len(model),
        "ranks": len(sources) + len(targets),
        "plan_s": round(plan_s, 2),
        "part_s": round(part_s, 2),
        "bytes_moved": moved.total,
        "bytes_minimal": least.total,
    }


def measure_share(num_bytes: int) -> dict[str, float]:
    """Measure one rank's share in tensors of 8 MB."""
    shape = (1000, 2000)
    count = max(1, num_bytes // (4 * math.prod(shape)))
    numbers = np.random.default_rng(0).random((count, *shape), np.float32)
    names = {f"layers.{index}": torch.from_numpy(one) for index, one in enumerate(numbers)}
    held = [
        TensorShard(name=name, shape=shape, dtype=torch.float32, box=Box.whole(shape))
        for name in names
    ]
    rank, engine = (Holder(one, "node", tuple(held)) for one in ("trainer", "engine"))
    stage = StagingBuffer(plan((rank,), (engine,)).staged(rank.rank))
    seconds: dict[str, list[float]] = {"stage": [], "verify": [], "memcpy": []}
    copied = np.zeros_like(numbers)

    def timed(name: str, function: Callable[[], T]) -> T:
        start = time.perf_counter()
        found = function()
        seconds[name].append(time.perf_counter() - start)
        return found

    stage.write(0, lambda piece: names[piece.name])  # allocates the memory
    for version in range(1, 6):
        share = Share(timed("stage", partial(stage.write, version, lambda one: names[one.name])))
        timed("verify", share.verify)
        share.close()
        timed("memcpy", lambda: np.copyto(copied, numbers))
    stage.close()
    return {
        f"{name}_gb_per_s": round(numbers.nbytes / median(one) / 1e9, 2)
        for name, one in seconds.items()
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--layers", type=int, default=91)
    parser.add_argument("--nodes", type=int, default=125, help="nodes with engines")
    parser.add_argument("--tp", type=int, default=8, help="ranks of an engine")
    parser.add_argument("--model-mb", type=float, default=500.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    if "plan" in arguments.only:
        plans = []
        for layout in map(ParallelLayout.parse, arguments.layouts):
            plans.append(measure(layout, arguments.nodes, arguments.tp, arguments.layers))
            print(f"{layout}: {plans[-1]}", flush=True)
        results |= {name: max(one[name] for one in plans) for name in ("plan_s", "part_s")}
        results |= {
            name: sum(one[name] for one in plans) for name in ("bytes_moved", "bytes_minimal")
        }
    num_bytes = int(arguments.model_mb * 1e6)
    if "share" in arguments.only:
        results |= measure_share(num_bytes)
    results |= updates.measure(num_bytes, arguments.only)
    if "move" in arguments.only:
        results |= moving.measure(num_bytes)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
