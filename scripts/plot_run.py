"""Draws a run: its reward, and beneath it how stale the data was and how fast it went; of a run
without rewards the accuracy over its pairs, where it has some, its loss, and how fast it went.

    python scripts/plot_run.py runs/quickstart [--out curve.svg]

In: the metrics.jsonl of a run directory. Out: a picture, SVG or PNG by the name's ending; without
--out it goes to plot.svg in the run directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlsys import metrics
from rlsys.observe.metrics import read_metrics

REWARD, STALENESS, THROUGHPUT = "#1f5fa8", "#c4622d", "#4b7f52"
INK, FAINT = "#333333", "#d9d9d9"

Line = Mapping[str, float]


def series(lines: Sequence[Line], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of the lines that have the metric."""
    having = [line for line in lines if name in line]
    return [line[metrics.STEP] for line in having], [line[name] for line in having]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values; less of them at the ends."""
    before, after = window // 2, window - window // 2
    spans = (values[max(0, i - before) : i + after] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def curves(lines: Sequence[Line]) -> list[str]:
    """What tells how far the run has come, of metrics.LEADING: its reward alone, if it has one."""
    found = [
        name for name, metric in metrics.LEADING.items() if any(metric in line for line in lines)
    ]
    return found[:1] if "reward" in found else found


def draw(lines: Sequence[Line], title: str) -> Any:
    """The figure: panels over the optimizer steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.edgecolor": FAINT, "svg.hashsalt": "rlsys"})
    told = curves(lines)
    fills: list[Callable[[Any, Sequence[Line]], None]] = [
        partial(_draw, name=name) for name in told
    ]
    if told == ["reward"]:
        fills.append(_draw_staleness)
    fills.append(_draw_throughput)
    heights = [3] * len(told) + [1] * (len(fills) - len(told))
    figure, panels = plt.subplots(
        len(fills), 1, figsize=(8, 5.6), sharex=True, height_ratios=heights, layout="constrained"
    )
    for panel, fill in zip(panels, fills, strict=True):
        fill(panel, lines)
        panel.grid(axis="y", color=FAINT, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(colors=INK, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].set_xlim(lines[0][metrics.STEP], max(lines[-1][metrics.STEP], 2))
    figure.align_ylabels(panels)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _draw(panel: Any, lines: Sequence[Line], *, name: str) -> None:
    steps, values = series(lines, metrics.LEADING[name])
    smooth = smoothed(values, max(1, len(values) // 25))
    panel.plot(steps, values, color=REWARD, alpha=0.3, linewidth=1)
    panel.plot(steps, smooth, color=REWARD, linewidth=2.2)
    panel.set_ylabel(name)
    if min(values) >= 0 and max(values) <= 1:
        panel.set_ylim(0, 1.12)
    middle = sum(panel.get_ylim()) / 2
    for end, side in ((0, "left"), (-1, "right"))[: len(steps)]:
        panel.annotate(
            f"{smooth[end]:.2f}",
            (steps[end], smooth[end]),
            xytext=(0, 18 if smooth[end] < middle else -26),
            textcoords="offset points",
            ha=side,
            color=REWARD,
            fontweight="bold",
        )


def _draw_staleness(panel: Any, lines: Sequence[Line]) -> None:
    steps, mean = series(lines, metrics.STALENESS_MEAN)
    panel.fill_between(steps, mean, color=STALENESS, alpha=0.25, linewidth=0)
    panel.plot(steps, mean, color=STALENESS, linewidth=1.2)
    steps, most = series(lines, metrics.STALENESS_MAX)
    panel.step(steps, most, where="mid", color=STALENESS, linewidth=1, linestyle=(0, (4, 2)))
    panel.set_ylabel("staleness")
    panel.set_ylim(0, max([1.0, *most]) * 1.6)
    _caption(panel, "updates of the weights; mean (filled) and maximum (dashed)", STALENESS)


def _draw_throughput(panel: Any, lines: Sequence[Line]) -> None:
    steps, values = series(lines, metrics.THROUGHPUT_TRAINED_TOKENS)
    thousands = [value / 1000 for value in values]
    panel.plot(steps, thousands, color=THROUGHPUT, linewidth=1.2)
    panel.set_ylabel("k tokens/s")
    panel.set_ylim(0, max(thousands, default=1.0) * 1.6)
    _caption(panel, "completion tokens trained per second", THROUGHPUT)


def _caption(panel: Any, text: str, color: str) -> None:
    at = panel.transAxes
    panel.text(0.995, 0.95, text, transform=at, ha="right", va="top", fontsize=8, color=color)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Draw a run's reward or loss, and its throughput, over its optimizer steps."
    )
    parser.add_argument("run_dir", type=Path, help="a run's directory, such as runs/quickstart")
    parser.add_argument(
        "--out", type=Path, help="picture to write, .svg or .png (default: RUN_DIR/plot.svg)"
    )
    given = parser.parse_args(arguments)
    path = given.run_dir / "metrics.jsonl"
    if not path.is_file():
        sys.exit(f"error: {path} does not exist; give the directory of a run.")
    lines = read_metrics(path)
    if not curves(lines):
        sys.exit(f"error: {path} has no step with a reward or loss yet; let the run go on.")
    out = given.out or given.run_dir / "plot.svg"
    if out.suffix not in (".svg", ".png"):
        sys.exit(f"error: --out {out} ends in {out.suffix!r}; use .svg or .png.")
    try:
        figure = draw(lines, given.run_dir.resolve().name)
    except ImportError as error:
        sys.exit(f"error: drawing needs matplotlib ({error}); pip install 'rlsys[plot]'.")
    figure.savefig(out, dpi=160, facecolor="white")
    print(out)


if __name__ == "__main__":
    main()
