"""Predictions of a run's future by a fit, tested on a held-out end of the run.

In: a run's series. Out: a `Prediction`, which the command prints and draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsys.errors import InvalidValue
from rlsys.evaluation.scaling.laws import Law
from rlsys.evaluation.scaling.scaling_fit import Fit, Interval, fit
from rlsys.evaluation.scaling.series import UNITS, Series

Limits = tuple[float, float]
PASS_RATE: Limits = (0.0, 1.0)
RECENT = 10  # last points, whose mean a run has reached


@dataclass(frozen=True, kw_only=True)
class HeldOutEnd:
    """The end of the run, which was not fitted."""

    points: Series
    within: float
    """Share of its points within the 95 % band for single points."""
    mean: float
    expected: Interval
    """Prediction of that mean, without noise."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A fit, its prediction, and its test on the held-out end."""

    fitted: Series
    fit: Fit
    limits: Limits | None
    until: float
    """Compute at which the reward is predicted."""
    reward: Interval
    """The curve there, a mean over steps."""
    point: Interval
    """A single point there, which also has noise."""
    held_out: HeldOutEnd | None

    @property
    def num_independent(self) -> float:
        """Return the number of independent points that would be worth as much as those fitted."""
        return max(1.0, len(self.fitted.reward) / self.fit.tau)


def limits_of(series: Series) -> Limits | None:
    """Return 0 and 1 for rewards in this range, such as a pass rate, else None."""
    low, high = PASS_RATE
    return PASS_RATE if low <= series.reward.min() and series.reward.max() <= high else None


def predict(
    series: Series,
    law: Law,
    *,
    skip: float,
    held_out: float,
    until: float,
    limits: Limits | None,
) -> Prediction:
    """Fit `law` to a part of a run and predict the reward at more compute.

    Args:
        series: Points of the run.
        law: The law.
        skip: Fraction of the points to leave out at the beginning.
        held_out: Fraction of the points to leave out at the end, for a test.
        until: Multiple of the run's compute to predict up to.
        limits: Lowest and highest possible reward.

    Raises:
        InvalidValue: No points are left, or the law cannot be fitted to them.
    """
    if not (0 <= skip < 1 and 0 <= held_out < 1 and skip + held_out < 1):
        raise InvalidValue(
            "(skip, held_out)",
            (skip, held_out),
            rule="leave no points to fit",
            fix="Use fractions of at least 0 that are below 1 together.",
        )
    if not 1 <= until < np.inf:
        raise InvalidValue(
            "until", until, rule="must be at least 1 and finite", fix="Use a factor such as 2."
        )
    num_points = len(series.reward)
    start = round(skip * num_points)
    stop = num_points - round(held_out * num_points)
    fitted = series.part(start, stop)
    try:
        found = fit(law, fitted.compute, fitted.reward, limits=limits)
    except InvalidValue as error:
        raise error.within(f"{series.name}, {series.metric}: ") from error
    at = until * float(series.compute[-1])
    reward, point = (
        Interval(value=float(value), low=float(low), high=float(high))
        for value, low, high in (of(np.array([at]))[:, 0] for of in (found.curve, found.points))
    )
    return Prediction(
        fitted=fitted,
        fit=found,
        limits=limits,
        until=at,
        reward=reward,
        point=point,
        held_out=_compare(found, series.part(stop, num_points)) if stop < num_points else None,
    )


def _compare(found: Fit, points: Series) -> HeldOutEnd:
    _, low, high = found.points(points.compute)
    value, lowest, highest = map(float, found.mean(points.compute))
    return HeldOutEnd(
        points=points,
        within=float(np.mean((points.reward >= low) & (points.reward <= high))),
        mean=float(points.reward.mean()),
        expected=Interval(value=value, low=lowest, high=highest),
    )


def describe(prediction: Prediction) -> list[str]:
    """Return the lines to print."""
    series, found = prediction.fitted, prediction.fit
    unit = UNITS[series.against]
    limits = "" if prediction.limits is None else ", {:g} to {:g}".format(*prediction.limits)
    lines = [
        f"{series.name}: {series.metric}{limits}, against {unit}",
        f"  {found.law.formula}",
        f"  {len(series.reward)} points from {_short(series.compute[0])} to "
        f"{_short(series.compute[-1])}, worth {prediction.num_independent:.0f} independent "
        f"ones; noise of a point {found.noise:.3g}",
        f"  {'':<14}{'value':>10}  95 % interval",
    ]
    lines += [_row(name, one) for name, one in found.parameters.items()]
    lines.append(_row(f"R({_short(prediction.until)})", prediction.reward))
    lines.append(_row("a point there", prediction.point))
    if (end := prediction.held_out) is not None:
        lines.append(
            f"  held out: {len(end.points.reward)} points, {end.within:.0%} in the 95 % band; "
            f"mean {end.mean:.3g}, expected {end.expected.low:.3g} to {end.expected.high:.3g}"
        )
    return lines + [f"  warning: {warning}" for warning in warnings(prediction)]


def warnings(prediction: Prediction) -> list[str]:
    """Return reasons not to trust the numbers."""
    series, found = prediction.fitted, prediction.fit
    first, last = found.curve(series.compute[[0, -1]])[0]
    texts = []
    if prediction.num_independent < found.law.num_parameters + 1:
        texts.append(
            f"neighbouring points have similar errors, so that {len(series.reward)} count as "
            f"{prediction.num_independent:.0f}, too few for {found.law.num_parameters} parameters: "
            "do not trust the intervals. Train longer, or leave out less with --skip and "
            "--held-out."
        )
    if last < first:
        texts.append(
            f"the curve falls, from {first:.3g} to {last:.3g} over these points, so that A is "
            "meaningless. Find the cause, or leave out the end with --held-out."
        )
    if found.at_edge:
        texts.append(
            "the points do not show where the curve levels off: A and C_mid have no upper bound. "
            "Train longer, or give the metric's limits."
        )
    if missed := misfit(prediction):
        texts.append(f"{missed}. Give the metric's limits, or leave out more with --skip.")
    return texts


def misfit(prediction: Prediction) -> str:
    """Return how a rising curve excludes what the run has reached, or "" if it does not.

    The interval of the curve is that of a mean over steps, so that a single step may exceed it.
    """
    series, high = prediction.fitted, prediction.reward.high
    first, last = prediction.fit.curve(series.compute[[0, -1]])[0]
    num = min(RECENT, len(series.reward))
    reached = float(series.reward[-num:].mean())
    if last < first or reached <= high:
        return ""
    return (
        f"the run has reached {reached:.3g}, the mean of its last {num} points, and the curve has "
        f"at most {high:.3g} at {_short(prediction.until)}, so it does not fit"
    )


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """Return the numbers for JSON, with None for those that are not finite."""
    series, found, end = prediction.fitted, prediction.fit, prediction.held_out
    return {
        "run": series.name,
        "metric": series.metric,
        "against": series.against,
        "law": found.law.name,
        "limits": prediction.limits,
        "num_points": len(series.reward),
        "parameters": {name: interval_dict(one) for name, one in found.parameters.items()},
        "noise": found.noise,
        "tau": found.tau,
        "num_independent": prediction.num_independent,
        "levels_off_unknown": found.at_edge,
        "warnings": warnings(prediction),
        "predicted": {"at": prediction.until, **interval_dict(prediction.reward)},
        "predicted_point": interval_dict(prediction.point),
        "held_out": None
        if end is None
        else {
            "num_points": len(end.points.reward),
            "within_band": end.within,
            "mean": end.mean,
            "expected": interval_dict(end.expected),
        },
    }


def interval_dict(one: Interval) -> dict[str, float | None]:
    """Return an interval for JSON."""
    numbers = {"value": one.value, "low": one.low, "high": one.high}
    return {name: number if np.isfinite(number) else None for name, number in numbers.items()}


def _row(name: str, one: Interval) -> str:
    return f"  {name:<14}{_short(one.value):>10}  {_short(one.low)} to {_short(one.high)}"


def _short(number: float) -> str:
    return f"{number:.4g}"
