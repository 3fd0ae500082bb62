"""Curves with few points that keep every peak of curves with many.

The steps of a long run are divided into buckets. A bucket keeps its first and last step, and at
these the lowest and the highest value, in the order in which they occurred. A spike of one step out
of 10,000 stays visible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys import metrics

MAX_POINTS = 1000  # of a curve
DIGITS = 5  # significant ones

Line = Mapping[str, float]
Values = Sequence[float | None]


def rounded(value: float | None) -> float | int | None:
    """Return a number with DIGITS significant digits, and None unless it is finite."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 10**DIGITS:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def buckets(num_steps: int, max_points: int) -> list[tuple[int, int]]:
    """Return the ranges of the buckets: two points each, or one step each if all of them fit."""
    if num_steps <= max_points:
        return [(i, i + 1) for i in range(num_steps)]
    count = max_points // 2
    bounds = [num_steps * i // count for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


def sample_curve(values: Values, ranges: Sequence[tuple[int, int]]) -> list[float | int | None]:
    """Return the lowest and the highest value of each bucket, in their order.

    A bucket of one step gives one value.
    """
    points: list[float | int | None] = []
    for start, stop in ranges:
        known = [(value, i) for i in range(start, stop) if (value := values[i]) is not None]
        if stop - start == 1:
            points.append(rounded(known[0][0]) if known else None)
        elif not known:
            points += [None, None]
        else:
            ends = sorted((min(known), max(known)), key=lambda one: one[1])
            points += [rounded(value) for value, _ in ends]
    return points


def sample_curves(lines: Sequence[Line], *, max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return the steps and the curves of every metric, with at most `max_points` points each."""
    ranges = buckets(len(lines), max_points)
    steps = [line[metrics.STEP] for line in lines]
    kept: list[float] = []
    for start, stop in ranges:
        kept += [steps[start]] if stop - start == 1 else [steps[start], steps[stop - 1]]
    names = sorted({name for line in lines for name in line} - {metrics.STEP})
    series = {name: sample_curve([line.get(name) for line in lines], ranges) for name in names}
    return {"steps": kept, "series": series, "num_steps": len(lines)}


def smoothed(values: Values, window: int) -> list[float | None]:
    """Return the centred mean over `window` values, of fewer at the ends."""
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    before, after = window // 2, window - window // 2
    means: list[float | None] = []
    for i in range(len(values)):
        start, stop = max(0, i - before), min(len(values), i + after)
        number = counts[stop] - counts[start]
        means.append((sums[stop] - sums[start]) / number if number else None)
    return means


def reward_bands(lines: Sequence[Line], groups_per_step: int) -> list[dict[str, float]]:
    """Return lines with the smoothed reward and its 95 % band, as metrics of the page.

    The band is that of the mean over a window of steps, with groups as independent samples. The
    rollouts of a group share their prompt, so they do not count as independent: the band is rather
    too wide than too narrow.
    """
    rewards = [line.get(metrics.REWARD_MEAN) for line in lines]
    spreads = [line.get(metrics.REWARD_STD) for line in lines]
    window = max(1, min(25, len(lines) // 8))
    means = smoothed(rewards, window)
    variances = smoothed([None if s is None else s * s for s in spreads], window)
    before, after = window // 2, window - window // 2
    bands: list[dict[str, float]] = []
    for i, (mean, variance) in enumerate(zip(means, variances, strict=True)):
        line: dict[str, float] = {}
        if mean is not None:
            line["page/reward"] = mean
            if variance is not None:
                steps = min(len(lines), i + after) - max(0, i - before)
                half = 1.96 * math.sqrt(variance / max(1, steps * groups_per_step))
                line |= {"page/reward_low": mean - half, "page/reward_high": mean + half}
        bands.append(line)
    return bands
