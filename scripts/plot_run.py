"""Draw the curves of a run, or compare several runs.

    python scripts/plot_run.py runs/quickstart [--out curve.svg]
    python scripts/plot_run.py runs/grpo runs/dapo [--out both.png]

The panels show the reward, the staleness of the data and the throughput. A run without rewards has
the accuracy over its pairs, if any, the loss and the throughput.

In: the metrics.jsonl of each run directory. Out: a picture, SVG or PNG by the name's ending.
Without --out it is plot.svg in the run directory, or comparison.svg beside the first of several
runs. The two means are those of the run's closing summary (rlsys.runs.observe.summary.ends).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlsys import metrics
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.observe.summary import Ends, ends

REWARD, STALENESS, THROUGHPUT = "#1f5fa8", "#c4622d", "#4b7f52"
# Colours of several runs, also distinct without red and green (Okabe and Ito).
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
INK, FAINT = "#333333", "#d9d9d9"

Line = Mapping[str, float]


def series(lines: Sequence[Line], name: str) -> tuple[list[float], list[float]]:
    """Return steps and values of the lines that have the metric."""
    having = [line for line in lines if name in line]
    return [line[metrics.STEP] for line in having], [line[name] for line in having]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the centred mean over `window` values, of fewer at the ends."""
    before, after = window // 2, window - window // 2
    spans = (values[max(0, i - before) : i + after] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def curves(lines: Sequence[Line]) -> list[str]:
    """Return the metrics of metrics.LEADING that show progress: only the reward if there is one."""
    found = [
        name for name, metric in metrics.LEADING.items() if any(metric in line for line in lines)
    ]
    return found[:1] if "reward" in found else found


def draw(lines: Sequence[Line], title: str) -> Any:
    """Return the figure of one run: panels over the optimizer steps."""
    names = curves(lines)
    fills: list[Callable[[Any], None]] = [partial(_draw, lines=lines, name=name) for name in names]
    if names == ["reward"]:
        fills.append(partial(_draw_staleness, lines=lines))
    fills.append(partial(_draw_throughput, lines=lines))
    return _figure(fills, title, num_leading=len(names), last_step=lines[-1][metrics.STEP])


def draw_runs(runs: Mapping[str, Sequence[Line]]) -> Any:
    """Return the figure of several runs, by their names, with a curve of each in every panel."""
    names = curves([line for lines in runs.values() for line in lines])
    fills: list[Callable[[Any], None]] = []
    for label in names:
        fills.append(partial(_compare, runs=runs, name=metrics.LEADING[label], label=label))
    if names == ["reward"]:
        stale = partial(_compare, name=metrics.STALENESS_MEAN, label="staleness", is_leading=False)
        fills.append(partial(stale, runs=runs))
    speed = partial(
        _compare, name=metrics.THROUGHPUT_TRAINED_TOKENS, label="tokens/s", is_leading=False
    )
    fills.append(partial(speed, runs=runs))
    last_step = max(lines[-1][metrics.STEP] for lines in runs.values())
    title = " and ".join(runs) if len(runs) == 2 else f"{len(runs)} runs"
    return _figure(fills, title, num_leading=len(names), last_step=last_step)


def _figure(
    fills: Sequence[Callable[[Any], None]], title: str, *, num_leading: int, last_step: float
) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.edgecolor": FAINT, "svg.hashsalt": "rlsys"})
    heights = [3] * num_leading + [1] * (len(fills) - num_leading)
    figure, panels = plt.subplots(
        len(fills), 1, figsize=(8, 5.6), sharex=True, height_ratios=heights, layout="constrained"
    )
    for panel, fill in zip([panels] if len(fills) == 1 else panels, fills, strict=True):
        fill(panel)
        panel.grid(axis="y", color=FAINT, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(colors=INK, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    last = figure.axes[-1]
    last.set_xlabel("optimizer step")
    last.set_xlim(1, max(last_step, 2))
    figure.align_ylabels(figure.axes)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _compare(
    panel: Any,
    *,
    runs: Mapping[str, Sequence[Line]],
    name: str,
    label: str,
    is_leading: bool = True,
) -> None:
    for number, (run, lines) in enumerate(runs.items()):
        steps, values = series(lines, name)
        if not values:
            continue
        color = RUN_COLORS[number % len(RUN_COLORS)]
        legend = f"{run}: {_short(ends(lines, name))}" if is_leading else run
        smooth = smoothed(values, max(1, len(values) // 25))
        if is_leading:
            panel.plot(steps, values, color=color, alpha=0.2, linewidth=1)
        panel.plot(steps, smooth, color=color, linewidth=2 if is_leading else 1.2, label=legend)
    panel.set_ylabel(label)
    if is_leading:
        panel.legend(frameon=False, fontsize=8, loc="best")
    else:
        panel.set_ylim(bottom=0)


def _short(means: Ends | None) -> str:
    return f"{means.before:.3f} → {means.after:.3f}" if means else "-"


def _draw(panel: Any, *, lines: Sequence[Line], name: str) -> None:
    metric = metrics.LEADING[name]
    steps, values = series(lines, metric)
    smooth = smoothed(values, max(1, len(values) // 25))
    panel.plot(steps, values, color=REWARD, alpha=0.3, linewidth=1)
    panel.plot(steps, smooth, color=REWARD, linewidth=2.2)
    panel.set_ylabel(name)
    if min(values) >= 0 and max(values) <= 1:
        panel.set_ylim(0, 1.12)
    if (means := ends(lines, metric)) is None:
        return
    panel.set_title(f"{name} {means}", loc="left", fontsize=8, color=REWARD)
    middle = sum(panel.get_ylim()) / 2
    labels = [(means.before, 0, "left"), (means.after, -1, "right")]
    for mean, end, side in labels[: len(steps)]:
        panel.annotate(
            f"{mean:.3f}",
            (steps[end], smooth[end]),
            xytext=(0, 18 if smooth[end] < middle else -26),
            textcoords="offset points",
            ha=side,
            color=REWARD,
            fontweight="bold",
        )


def _draw_staleness(panel: Any, *, lines: Sequence[Line]) -> None:
    steps, mean = series(lines, metrics.STALENESS_MEAN)
    panel.fill_between(steps, mean, color=STALENESS, alpha=0.25, linewidth=0)
    panel.plot(steps, mean, color=STALENESS, linewidth=1.2)
    steps, most = series(lines, metrics.STALENESS_MAX)
    panel.step(steps, most, where="mid", color=STALENESS, linewidth=1, linestyle=(0, (4, 2)))
    panel.set_ylabel("staleness")
    panel.set_ylim(0, max([1.0, *most]) * 1.6)
    _caption(panel, "updates of the weights; mean (filled) and maximum (dashed)", STALENESS)


def _draw_throughput(panel: Any, *, lines: Sequence[Line]) -> None:
    steps, values = series(lines, metrics.THROUGHPUT_TRAINED_TOKENS)
    thousands = [value / 1000 for value in values]
    panel.plot(steps, thousands, color=THROUGHPUT, linewidth=1.2)
    panel.set_ylabel("k tokens/s")
    panel.set_ylim(0, max(thousands, default=1.0) * 1.6)
    _caption(panel, "completion tokens trained per second", THROUGHPUT)


def _caption(panel: Any, text: str, color: str) -> None:
    at = panel.transAxes
    panel.text(0.995, 0.95, text, transform=at, ha="right", va="top", fontsize=8, color=color)


def named(directories: Sequence[Path]) -> dict[str, Path]:
    """Return the directories by the names of their runs, or by their paths if two share one."""
    names = [path.resolve().name for path in directories]
    shown = names if len(set(names)) == len(names) else [str(path) for path in directories]
    return dict(zip(shown, directories, strict=True))


def read_run(directory: Path) -> list[dict[str, float]]:
    """Return the metrics of a run; end the process if there is nothing to draw."""
    path = directory / "metrics.jsonl"
    if not path.is_file():
        sys.exit(f"error: {path} does not exist; give the directory of a run.")
    lines = read_metrics(path)
    if not curves(lines):
        sys.exit(f"error: {path} has no step with a reward or loss yet; let the run go on.")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Draw a run's reward or loss, and its throughput, over its optimizer steps; of "
        "several runs, one curve each."
    )
    parser.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="a run's directory, such as runs/quickstart; several are compared",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="picture to write, .svg or .png (default: plot.svg in RUN_DIR, or comparison.svg "
        "beside the first one)",
    )
    options = parser.parse_args(arguments)
    runs = {name: read_run(path) for name, path in named(options.run_dirs).items()}
    first = options.run_dirs[0]
    default = first / "plot.svg" if len(runs) == 1 else first.resolve().parent / "comparison.svg"
    out = options.out or default
    if out.suffix not in (".svg", ".png"):
        sys.exit(f"error: --out {out} ends in {out.suffix!r}; use .svg or .png.")
    try:
        if len(runs) == 1:
            ((name, lines),) = runs.items()
            figure = draw(lines, name)
        else:
            figure = draw_runs(runs)
    except ImportError as error:
        sys.exit(f"error: drawing needs matplotlib ({error}); pip install 'rlsys[plot]'.")
    figure.savefig(out, dpi=160, facecolor="white")
    print(out)


if __name__ == "__main__":
    main()
