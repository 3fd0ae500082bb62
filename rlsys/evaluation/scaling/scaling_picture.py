"""Drawing of runs with their fits and predictions.

In: predictions. Out: a matplotlib figure. matplotlib is only imported here, when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlsys.evaluation.scaling.laws import Array
from rlsys.evaluation.scaling.prediction import Prediction
from rlsys.evaluation.scaling.series import UNITS

COLORS = ("#1f5fa8", "#c4622d", "#4b7f52", "#7a4f9c", "#8a7a2f", "#4f8a8b")
INK, FAINT = "#333333", "#d9d9d9"
NUM_PIXELS = 300


def draw(predictions: Sequence[Prediction]) -> Any:
    """Return the figure.

    Fitted points are filled, held-out ones hollow. The band is that of the curve, the fainter band
    that of single points.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.edgecolor": FAINT, "svg.hashsalt": "rlsys"})
    figure, panel = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for number, one in enumerate(predictions):
        _draw_one(panel, one, COLORS[number % len(COLORS)])
    first = predictions[0].fitted
    panel.set_xscale("log")
    panel.set_xlabel(UNITS[first.against])
    panel.set_ylabel(first.metric)
    panel.grid(color=FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(colors=INK, which="both", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.legend(frameon=False, loc="best", fontsize=8)
    # Parts of the bands outside of all rewards are not shown.
    rewards = np.concatenate([_rewards(one) for one in predictions])
    room = 0.15 * max(float(np.ptp(rewards)), 1e-6)
    panel.set_ylim(rewards.min() - room, rewards.max() + room)
    return figure


def _draw_one(panel: Any, one: Prediction, color: str) -> None:
    fitted, end = one.fitted, one.held_out
    panel.plot(fitted.compute, fitted.reward, ".", color=color, markersize=3, alpha=0.6)
    if end is not None:
        look = {"markersize": 3, "markerfacecolor": "none", "markeredgewidth": 0.6}
        panel.plot(end.points.compute, end.points.reward, "o", color=color, alpha=0.6, **look)
    compute = np.geomspace(fitted.compute[0], one.until, NUM_PIXELS)
    value, low, high = one.fit.curve(compute)
    _, lowest, highest = one.fit.points(compute)
    is_seen = compute <= fitted.compute[-1]
    panel.plot(compute[is_seen], value[is_seen], color=color, linewidth=2, label=_label(one))
    panel.plot(compute[~is_seen], value[~is_seen], color=color, linewidth=2, linestyle=(0, (4, 2)))
    panel.fill_between(compute, low, high, color=color, alpha=0.25, linewidth=0)
    panel.fill_between(compute, lowest, highest, color=color, alpha=0.1, linewidth=0)
    panel.axvline(fitted.compute[-1], color=color, linewidth=0.8, linestyle=(0, (1, 2)))


def _label(one: Prediction) -> str:
    name, interval = next(iter(one.fit.parameters.items()))
    return (
        f"{one.fitted.name}: {one.fit.law.name}, {name} = {interval.value:.3g} "
        f"({interval.low:.3g} to {interval.high:.3g})"
    )


def _rewards(one: Prediction) -> Array:
    parts = [one.fitted.reward, np.array([one.reward.value])]
    if one.held_out is not None:
        parts.append(one.held_out.points.reward)
    return np.concatenate(parts)
