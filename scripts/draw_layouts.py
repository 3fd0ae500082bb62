"""Draw layouts of a trainer: the shard of a small model and the tokens of each rank.

    python scripts/draw_layouts.py [LAYOUT ...] [--out docs/layouts]

Writes a picture for each layout, from real engines (gloo processes on this machine): two layers of
a Qwen3, or of a Qwen3-MoE for ep, or one layer for each piece of a pipeline. Numbers are ranks. A
replicated shard has the numbers of all its ranks.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsys.algorithms.aggregation import token_mean
from rlsys.algorithms.losses import clipped_surrogate
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.engines.models.causal_lm import hide_progress_bars
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.reallocation.shards import Box, TensorShard
from scripts.bench.layouts import build_model
from scripts.plot_run import INK
from scripts.ranks import on_ranks

LAYOUTS = ("dp2", "dp2x2", "tp2", "pp2", "pp2v2", "cp2", "ep2", "dp2tp2")
COLORS = ("#9fc1e3", "#f2bb95", "#a8cfa9", "#d9b3dc", "#e8d38a", "#c9c9c9")
NUM_ROWS, NUM_TOKENS = 4, 8  # size of the drawn batch

# Titles of the drawn weights, by the ends of their names.
KINDS = {
    "embed_tokens.weight": "embedding",
    "q_proj.weight": "queries",
    "o_proj.weight": "attention output",
    "up_proj.weight": "MLP up",
    "down_proj.weight": "MLP down",
    "gate_up_proj": "experts up",
    "down_proj": "experts down",
    "input_layernorm.weight": "norm",
}

Cells = Mapping[Box, tuple[int, ...]]  # ranks that hold each box of a tensor


def held(rank: int, world_size: int, layout: ParallelLayout, path: Path) -> list[TensorShard]:
    """Return the shards of a rank."""
    engine = FSDPEngine(
        model_path=path,
        trainer=TrainerConfig(layout=str(layout)),
        model=ModelConfig(),
        loss=clipped_surrogate(0.2, 0.2),
        aggregation=token_mean,
        temperature=1.0,
        num_total_steps=1,
        seed=0,
        rank=rank,
        world_size=world_size,
    )
    return engine.holdings


def holders(ranks: Sequence[Sequence[TensorShard]]) -> dict[str, Cells]:
    """Return the ranks that hold each box, by tensor."""
    found: dict[str, dict[Box, tuple[int, ...]]] = defaultdict(dict)
    for rank, shards in enumerate(ranks):
        for one in shards:
            if one.box.num_elements:
                cells = found[one.name]
                cells[one.box] = (*cells.get(one.box, ()), rank)
    return dict(found)


def tokens(layout: ParallelLayout) -> dict[Box, tuple[int, ...]]:
    """Return the ranks that compute each box of a batch [NUM_ROWS, NUM_TOKENS]."""
    cells: dict[Box, tuple[int, ...]] = {}
    rows, columns = NUM_ROWS // layout.num_data, NUM_TOKENS // layout.num_token_shards
    for rank in range(layout.num_ranks):
        at = layout.coordinates(rank)
        row = layout.data_index(rank) * rows
        column = (at["cp"] * layout.tp + at["tp"]) * columns
        box = Box(((row, row + rows), (column, column + columns)))
        cells[box] = (*cells.get(box, ()), rank)
    return cells


def kind(name: str) -> str | None:
    """Return the title of a weight that is drawn, else None."""
    return next((title for end, title in KINDS.items() if name.endswith(end)), None)


def draw(layout: ParallelLayout, tensors: Mapping[str, Cells]) -> Any:
    """Return the figure: batch and embedding, then one line for each layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ends: list[tuple[str, Cells]] = [("tokens of a batch", tokens(layout))]
    layers: dict[int, list[tuple[str, Cells]]] = defaultdict(list)
    for name, cells in tensors.items():
        layer = re.search(r"layers\.(\d+)\.", name)
        if title := kind(name):
            (layers[int(layer[1])] if layer else ends).append((title, cells))
    num_lines = max(len(ends), len(layers))
    num_columns = 1 + max(map(len, layers.values()))
    figure, axes = plt.subplots(
        *(num_lines, num_columns),
        figsize=(1.6 * num_columns, 0.4 + 1.1 * num_lines),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.axis("off")
    for line, end in enumerate(ends):
        draw_tensor(axes[line][0], *end)
    for line, (number, panels) in enumerate(sorted(layers.items())):
        for column, (title, cells) in enumerate(panels, start=1):
            draw_tensor(axes[line][column], f"layer {number}: {title}", cells)
    figure.suptitle(f"trainer.layout={layout}", color=INK, fontsize=11)
    return figure


def draw_tensor(
    axis: Any,
    title: str,
    cells: Cells,
    *,
    shape: Sequence[int] | None = None,
    hatched: Collection[Box] = (),
) -> None:
    """Draw a tensor as a rectangle, by its first two dimensions.

    `shape` is needed if the cells are only a part of the tensor.
    """
    from matplotlib.patches import Rectangle

    sizes = shape or [
        max(box.bounds[d][1] for box in cells) for d in range(len(next(iter(cells)).bounds))
    ]
    height, width = sizes[0], sizes[1] if len(sizes) > 1 else sizes[0] / 8
    for box, ranks in sorted(cells.items()):
        (top, bottom), (left, right) = box.bounds[0], (0, width)
        if len(sizes) > 1:
            left, right = box.bounds[1]
        color = COLORS[ranks[0] % len(COLORS)] if len(ranks) == 1 else _shared(ranks)
        place = (left / width, 1 - bottom / height)
        extent = ((right - left) / width, (bottom - top) / height)
        axis.add_patch(
            Rectangle(
                *(place, *extent),
                facecolor=color,
                edgecolor="white",
                linewidth=1.5,
                hatch="///" if box in hatched else None,
            )
        )
        middle = (place[0] + extent[0] / 2, place[1] + extent[1] / 2)
        axis.text(*middle, " ".join(map(str, ranks)), ha="center", va="center", fontsize=8)
    axis.set(xlim=(0, 1), ylim=(0, 1))
    axis.set_title(title, fontsize=8, color=INK)


def _shared(ranks: Sequence[int]) -> str:
    """Return a mixture of the ranks' colours."""
    import matplotlib.colors as mc

    mixed = [mc.to_rgb(COLORS[rank % len(COLORS)]) for rank in ranks]
    return mc.to_hex([sum(one) / len(mixed) for one in zip(*mixed, strict=True)])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--out", type=Path, default=Path("docs/layouts"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    hide_progress_bars()
    with tempfile.TemporaryDirectory() as directory:
        for layout in map(ParallelLayout.parse, arguments.layouts):
            family = "qwen3_moe" if layout.ep > 1 else "qwen3"
            path = Path(directory) / str(layout)
            build_model(path, family, num_layers=max(2, layout.pp * layout.num_pieces))
            tensors = holders(on_ranks(layout.num_ranks, held, layout, path))
            try:
                figure = draw(layout, tensors)
            except ImportError as error:
                sys.exit(f"error: drawing needs matplotlib ({error}); pip install 'rlsys[plot]'.")
            figure.savefig(arguments.out / f"{layout}.svg")
            print(arguments.out / f"{layout}.svg")


if __name__ == "__main__":
    main()
