"""Draw how weights move between two layouts: the sender and the receiver of each part.

    python scripts/draw_plan.py [BEFORE] [AFTER] [--out PICTURE]

BEFORE (dp2tp2) is the layout of a trainer with two ranks on each node, taken from real engines
(gloo processes on this machine). AFTER is on each of its nodes: a vLLM engine of so many
tensor-parallel ranks ("vllm tp2"), which is started here to record its own weight loaders, or a
trainer of another layout. The picture has a line for each kind of weight of the first layer of a
Qwen3, or of a Qwen3-MoE for ep: the trainer's shards, then the part of each engine rank, in the
colours and numbers of the ranks that stage it. Hatched parts come from another node.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsys.config import RolloutConfig
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.generation.vllm.vllm_engine import VLLMEngine
from rlsys.engines.models.causal_lm import hide_progress_bars
from rlsys.reallocation.plan import ReallocationPlan, plan
from rlsys.reallocation.shards import Box, Holder, TensorShard
from scripts.check_reallocation import build_model
from scripts.draw_layouts import Cells, draw_tensor, held, holders, kind
from scripts.plot_run import INK
from scripts.ranks import on_ranks

RANKS_PER_NODE = 2


def placed(
    before: Sequence[Sequence[TensorShard]], after: Sequence[Sequence[TensorShard]]
) -> tuple[tuple[Holder, ...], tuple[Holder, ...]]:
    """Return the trainer's ranks on their nodes, and an engine on each of these nodes.

    `before` are the shards of the trainer's ranks, and `after` those of an engine's ranks.
    """
    sources = tuple(
        Holder(str(rank), f"node {rank // RANKS_PER_NODE}", tuple(own))
        for rank, own in enumerate(before)
    )
    nodes = dict.fromkeys(one.node for one in sources)
    targets = tuple(
        Holder(f"{node}, engine rank {rank}", node, tuple(own))
        for node in nodes
        for rank, own in enumerate(after)
    )
    return sources, targets


async def held_by_vllm(path: Path, num_ranks: int) -> list[list[TensorShard]]:
    """Return the shards of each rank of a vLLM engine."""
    rollout = RolloutConfig(
        engine="vllm", tensor_parallel=num_ranks, num_cpus=num_ranks, kv_cache_gib=0.125
    )
    engine = VLLMEngine(str(path), rollout, dtype="float32")
    await engine.start()
    try:
        return await engine.holdings()
    finally:
        await engine.close()


def arrivals(found: ReallocationPlan, target: Holder) -> dict[str, tuple[Cells, frozenset[Box]]]:
    """Return the boxes that a target reads, by tensor, and which come from another node.

    Each box has the number of the rank that staged it.
    """
    senders = {one.here: one.there.buffer for one in found.imports(target.node)}
    cells: dict[str, dict[Box, tuple[int, ...]]] = {}
    foreign: dict[str, set[Box]] = {}
    for read in found.reads(target.rank):
        assert not isinstance(read.origin, TensorShard), "an engine has nothing yet"
        sender = senders.get(read.origin, read.origin.buffer)
        cells.setdefault(read.origin.name, {})[read.box] = (int(sender),)
        if read.origin in senders:
            foreign.setdefault(read.origin.name, set()).add(read.box)
    return {name: (own, frozenset(foreign.get(name, ()))) for name, own in cells.items()}


def draw(title: str, sources: Sequence[Holder], targets: Sequence[Holder]) -> Any:
    """Return the figure: a line for each weight, a column for the trainer and for each target."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = plan(tuple(sources), tuple(targets))
    before = holders([one.holdings for one in sources])
    shapes = {one.name: one.shape for source in sources for one in source.holdings}
    names = [name for name in shapes if kind(name) and not re.search(r"layers\.[1-9]", name)]
    after = [arrivals(found, target) for target in targets]
    num_columns = 1 + len(targets)
    figure, axes = plt.subplots(
        *(len(names), num_columns),
        figsize=(1.9 * num_columns, 0.6 + 1.1 * len(names)),
        squeeze=False,
        layout="constrained",
    )
    for line, name in enumerate(names):
        for axis in axes[line]:
            axis.axis("off")
        draw_tensor(axes[line][0], f"trainer: {kind(name)}", before[name])
        for column, (target, arrived) in enumerate(zip(targets, after, strict=True), start=1):
            cells, foreign = arrived[name]
            draw_tensor(axes[line][column], target.rank, cells, shape=shapes[name], hatched=foreign)
    figure.suptitle(title, color=INK, fontsize=11)
    return figure


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", nargs="?", default="dp2tp2", type=ParallelLayout.parse)
    parser.add_argument("after", nargs="?", default="vllm tp2")
    parser.add_argument("--out", type=Path, default=Path("plan.svg"))
    arguments = parser.parse_args()
    before, after = arguments.before, arguments.after
    engine, _, name = after.rpartition(" ")
    if engine not in ("", "vllm"):
        parser.error(f"AFTER={after!r}: is not a layout. Use one such as dp2, or 'vllm tp2'.")
    layout = ParallelLayout.parse(name)
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        build_model(path, "qwen3_moe" if max(before.ep, layout.ep) > 1 else "qwen3")
        trainer_shards = on_ranks(before.num_ranks, held, before, path)
        if engine:
            engine_shards = asyncio.run(held_by_vllm(path, layout.tp))
        else:
            engine_shards = on_ranks(layout.num_ranks, held, layout, path)
    sources, targets = placed(trainer_shards, engine_shards)
    try:
        figure = draw(f"a trainer of {before} to engines of {after}", sources, targets)
    except ImportError as error:
        sys.exit(f"error: drawing needs matplotlib ({error}); pip install 'rlsys[plot]'.")
    figure.savefig(arguments.out)
    print(plan(sources, targets).describe())
    print(arguments.out)


if __name__ == "__main__":
    main()
