"""Draw the reward of several recipes' runs, one panel each, with the others in grey.

    python scripts/plot_recipes.py runs/recipes [--out docs/recipes.svg]

In: a directory of run directories, as scripts/bench/recipes.py writes them, or
scripts/bench/environment_recipes.py with --runs-dir. Runs that another recipe trains first
("distill-teacher") are left out. Out: a picture, SVG or PNG by the name's ending; without --out it
is recipes.svg in that directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench import environment_recipes
from scripts.bench.recipes import PREFERENCES, RECIPES, ends, mean_over_nodes, reward_of
from scripts.plot_run import FAINT, INK, REWARD, smoothed

COLUMNS = 4
BEHIND = "#bbbbbb"

# Recipes of environments, and the value that their curves show.
ENVIRONMENT_CURVES = {"guess": "found", "calculator": "right", "kuhn": "exploitability"}

Curve = tuple[list[float], str]  # reward by step, and its values at both ends


def curves(runs_dir: Path) -> dict[str, Curve]:
    """Return the curves of the recipes' runs, in the order of RECIPES, then of environments.

    The curve of a swarm is the mean over its nodes, if all are there.
    """
    found = {}
    for name, recipe in RECIPES.items():
        for run in (name, *recipe.variants):
            try:
                values = mean_over_nodes(reward_of(recipe, run, runs_dir))
            except FileNotFoundError:
                continue
            if values:
                first, last = ends(values)
                what = " (pairs)" if recipe.reward == PREFERENCES else ""
                smooth = smoothed(values, max(1, len(values) // 25))
                found[run] = smooth, f"{first:.2f} to {last:.2f}{what}"
    for name, what in ENVIRONMENT_CURVES.items():
        try:
            values = environment_recipes.curve_of(name, runs_dir / name)
        except FileNotFoundError:
            continue
        first, last = ends(values)
        found[name] = values, f"{first:.2f} to {last:.2f} ({what})"
    return found


def draw(found: Mapping[str, Curve]) -> Any:
    """Return the figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.edgecolor": FAINT, "svg.hashsalt": "rlsys"})
    columns = min(COLUMNS, len(found))
    rows = -(-len(found) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(2.5 * columns, 2.1 * rows + 0.4),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    panels = list(grid.flat)
    for panel, (name, (values, rise)) in zip(panels, found.items(), strict=False):
        for other, _ in found.values():
            _plot(panel, other, every=5, color=BEHIND, linewidth=0.7, alpha=0.6)
        _plot(panel, values, color=REWARD, linewidth=2)
        panel.set_title(f"{name}   {rise}", loc="left", color=INK, fontsize="medium")
        panel.set_ylim(0, 1.02)
        panel.grid(axis="y", color=FAINT, linewidth=0.6)
        panel.tick_params(colors=INK, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    figure.supxlabel("optimizer step", color=INK)
    figure.supylabel("reward (or the named value)", color=INK)
    return figure


def _plot(panel: Any, values: Sequence[float], *, every: int = 1, **style: Any) -> None:
    panel.plot(range(1, len(values) + 1, every), values[::every], **style)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Draw the reward of several recipes' runs.")
    parser.add_argument("runs_dir", type=Path, help="a directory of runs, such as runs/recipes")
    parser.add_argument(
        "--out", type=Path, help="picture to write, .svg or .png (default: RUNS_DIR/recipes.svg)"
    )
    options = parser.parse_args(arguments)
    found = curves(options.runs_dir)
    if not found:
        sys.exit(
            f"error: {options.runs_dir} holds no run of a recipe; train some with "
            "scripts/bench/recipes.py, or give another directory."
        )
    out = options.out or options.runs_dir / "recipes.svg"
    if out.suffix not in (".svg", ".png"):
        sys.exit(f"error: --out {out} ends in {out.suffix!r}; use .svg or .png.")
    try:
        figure = draw(found)
    except ImportError as error:
        sys.exit(f"error: drawing needs matplotlib ({error}); pip install 'rlsys[plot]'.")
    figure.savefig(out, dpi=160, facecolor="white")
    print(out)


if __name__ == "__main__":
    main()
