"""A plan executed by real ranks, between real layouts of small models, bit by bit.

Each rank is a process that reports the boxes of its own DTensors. Buffers are files, which replace
the memory of a node; two ranks share one node.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.reallocation.plan import Segment, plan
from rlsys.reallocation.shards import Box, Holder, TensorShard, local_part
from rlsys.reallocation.traffic import minimal_bytes
from rlsys.reallocation.transport.weight_views import Weights
from scripts.bench.layouts import build_model
from scripts.bench.weights import Weight, trainer
from scripts.ranks import on_ranks
from tests.engines.training_harness import make_engine
from tests.reallocation.plan_harness import Local, copy, imported, staged

# Each node, and the rank whose process does the work of the node and its engine. The last node has
# no trainer.
NODES = {"node-0": 0, "node-1": 2, "node-2": 1}


class Files(dict[str, torch.Tensor]):
    """Buffers by name, as files that all ranks read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, name: str, buffer: torch.Tensor) -> None:
        buffer.numpy().tofile(self._directory / name)

    def __missing__(self, name: str) -> torch.Tensor:
        self[name] = torch.from_numpy(np.fromfile(self._directory / name, np.uint8))
        return self[name]


def carried_out(
    rank: int, world_size: int, directory: Path, *, before: str, after: str
) -> tuple[list[list[Segment]], list[TensorShard]]:
    """Move the trainer's ranks to another layout, and send bfloat16 weights to each engine."""
    old, new = (
        make_engine(directory / "model", layout=layout, rank=rank, world_size=world_size)
        for layout in (before, after)
    )
    expected = torch.load(directory / "trained.pt")
    old_parts = {name: local_part(tensor.detach()) for name, tensor in old.base.items()}
    new_parts = {name: local_part(tensor.detach()) for name, tensor in new.base.items()}
    check_publication(
        old, gathered(Holder(f"rank-{rank}", "here", tuple(old.holdings)), world_size)
    )
    for name in old_parts:
        old_parts[name].mul_(1.5)
    for name in new_parts:
        new_parts[name].fill_(torch.nan)
    me, node = f"rank-{rank}", f"node-{rank // 2}"
    sources = gathered(Holder(me, node, tuple(old.holdings)), world_size)
    engines = tuple(
        Holder(
            f"engine-{node}",
            node,
            tuple(
                TensorShard(
                    name=name, shape=tuple(t.shape), dtype=torch.bfloat16, box=Box.whole(t.shape)
                )
                for name, t in expected.items()
            ),
        )
        for node in NODES
    )
    targets = gathered(Holder(me, node, tuple(new.holdings)), world_size) + engines
    found = plan(sources, targets)
    assert found.bytes_per_link == minimal_bytes(sources, targets)

    held = {one.name: one.box for one in old.holdings}

    def local(segment: Segment) -> Local:
        return old_parts[segment.name], held[segment.name]

    files = Files(directory)
    files.write(me, staged(found.staged(me), local))
    dist.barrier()
    mine = [node for node, of in NODES.items() if of == rank]
    for node in mine:
        files.write(node, imported(found.imports(node), files))
    dist.barrier()
    wanted = {one.name: one.box for one in new.holdings}
    for read in found.reads(me):
        name = new.holdings[read.want].name
        copy(read, (new_parts[name], wanted[name]), files, lambda own: old_parts[own.name])
    for name, box in wanted.items():
        assert torch.equal(new_parts[name], expected[name][box.slices]), name
    for engine in (one for one in engines if one.node in mine):
        whole = {
            one.name: torch.full(one.shape, torch.nan, dtype=one.dtype) for one in engine.holdings
        }
        for read in found.reads(engine.rank):
            one = engine.holdings[read.want]
            copy(read, (whole[one.name], one.box), files, lambda own: old_parts[own.name])
        for name, tensor in expected.items():
            assert torch.equal(whole[name], tensor.bfloat16()), name
    return [found.staged(one.rank) for one in sources], old.holdings


def check_publication(engine: FSDPEngine, sources: tuple[Holder, ...]) -> None:
    """Check that shares of ranks that share memory have each element once, and little else."""
    manifest = engine.publish()
    if manifest is not None:
        with Weights(manifest) as weights:
            wanted = tuple(
                TensorShard(name=name, shape=shape, dtype=torch.float32, box=Box.whole(shape))
                for name, shape in weights.shapes.items()
            )
            parts = [part for _, _, part in weights.parts()]
        least = minimal_bytes(sources, (Holder("reader", "here", wanted),)).staged["here"]
        assert sum(part.nbytes for part in parts) == least
        overhead = sum(share.num_bytes for share in manifest.shares) - least
        # Gaps, tables of segments, digests.
        assert 0 <= overhead <= 256 * len(parts) + 1024 * len(manifest.shares)
    dist.barrier()


def gathered(own: Holder, world_size: int) -> tuple[Holder, ...]:
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, own)
    return tuple(found)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("qwen3", "dp2tp2", "tp2pp2"),
        pytest.param("llama", "tp2pp2", "dp2x2", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "dp2ep2", "tp2ep2", marks=pytest.mark.slow),
    ],
)
def test_ranks_carry_a_plan_out(family: str, before: str, after: str, tmp_path: Path) -> None:
    path = build_model(tmp_path / "model", family)
    weights = make_engine(path).base
    torch.save({n: t.detach() * 1.5 for n, t in weights.items()}, tmp_path / "trained.pt")
    found = on_ranks(4, partial(carried_out, before=before, after=after), tmp_path)
    plans = [of_rank[0] for of_rank in found]
    assert any(plans[0])
    assert all(one == plans[0] for one in plans), "all ranks get the same plan"
    check_formula([held for _, held in found], ParallelLayout.parse(before), weights)


CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1}
CUT |= {"down_proj": 1, "embed_tokens": 0, "lm_head": 0}


def check_formula(
    ranks: list[list[TensorShard]], layout: ParallelLayout, weights: dict[str, torch.Tensor]
) -> None:
    """Check that the layouts of other tests hold the same boxes as DTensors."""
    model = []
    for name, tensor in weights.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        is_expert = ".experts." in name
        cut = next((dim for part, dim in CUT.items() if f".{part}." in f".{name}."), None)
        if cut == 1 and tensor.ndim == 1:  # bias of a layer that is cut along its inputs
            cut = None
        model.append(
            Weight(
                name=name,
                shape=tuple(tensor.shape),
                cut=0 if is_expert else cut,
                layer=int(layer[1]) if layer else None,
                is_last=layer is None and "embed" not in name,
                is_expert=is_expert,
            )
        )
    for own, formula in zip(ranks, trainer(layout, model), strict=True):
        boxes = {one.name: one.box for one in own}
        assert {one.name: one.box for one in formula.holdings} == boxes
