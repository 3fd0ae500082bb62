"""What a fit says about a run's future, and how right it was about an end that it has not seen.

In: a run's series. Out: a `Prediction`, which the command prints and draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.scaling.laws import Law
from scripts.scaling.scaling_fit import Fit, Interval, fit
from scripts.scaling.series import UNITS, Series

Limits = tuple[float, float]
PASS_RATE: Limits = (0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The end of the run, which the fit has not seen."""

    points: Series
    within: float
    """Share of its points within the 95 % band for single points."""
    mean: float
    expected: Interval
    """What the fit expected of that mean, without its noise."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    fitted: Series
    fit: Fit
    limits: Limits | None
    until: float
    """Compute at which the reward is predicted."""
    reward: Interval
    """The curve there."""
    held_out: HeldOut | None

    @property
    def num_independent(self) -> float:
        """How many independent points would tell as much as those that were fitted."""
        return max(1.0, len(self.fitted.reward) / self.fit.tau)


def limits_of(series: Series) -> Limits | None:
    """0 to 1 for rewards that all lie there, as those of a pass rate do."""
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
    """Fit `law` to a run without the share `skip` of its beginning and the share `held_out` of its
    end, and draw it on to `until` times the run's compute. Raises ValueError for shares that leave
    no points, and as `fit` does, with the run's name.
    """
    if not (0 <= skip < 1 and 0 <= held_out < 1 and skip + held_out < 1):
        raise ValueError(
            f"skip={skip:g} and held_out={held_out:g} are shares of the run's points that leave "
            "none to fit; use shares from 0, below 1 together."
        )
    if not 1 <= until < np.inf:
        raise ValueError(f"until={until:g} lies before the run's end; use a factor of 1 or more.")
    num_points = len(series.reward)
    start = round(skip * num_points)
    stop = num_points - round(held_out * num_points)
    fitted = series.part(start, stop)
    try:
        found = fit(law, fitted.compute, fitted.reward, limits=limits)
    except ValueError as error:
        raise ValueError(f"{series.name}, {series.metric}: {error}") from error
    at = until * float(series.compute[-1])
    value, low, high = map(float, found.curve(np.array([at]))[:, 0])
    return Prediction(
        fitted=fitted,
        fit=found,
        limits=limits,
        until=at,
        reward=Interval(value=value, low=low, high=high),
        held_out=_compare(found, series.part(stop, num_points)) if stop < num_points else None,
    )


def _compare(found: Fit, points: Series) -> HeldOut:
    _, low, high = found.points(points.compute)
    value, lowest, highest = map(float, found.mean(points.compute))
    return HeldOut(
        points=points,
        within=float(np.mean((points.reward >= low) & (points.reward <= high))),
        mean=float(points.reward.mean()),
        expected=Interval(value=value, low=lowest, high=highest),
    )


def describe(prediction: Prediction) -> list[str]:
    """Lines to print."""
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
    if (end := prediction.held_out) is not None:
        lines.append(
            f"  held out: {len(end.points.reward)} points, {end.within:.0%} within the 95 % band; "
            f"mean {end.mean:.3g}, expected {end.expected.low:.3g} to {end.expected.high:.3g}"
        )
    return lines + [f"  warning: {warning}" for warning in warnings(prediction)]


def warnings(prediction: Prediction) -> list[str]:
    """Why the numbers say less than they seem to."""
    series, found = prediction.fitted, prediction.fit
    first, last = found.curve(series.compute[[0, -1]])[0]
    told = []
    if prediction.num_independent < found.law.num_parameters + 1:
        told.append(
            f"errors of neighbouring points are alike, so that {len(series.reward)} count as "
            f"{prediction.num_independent:.0f}, too few for {found.law.num_parameters} parameters: "
            "trust none of the intervals. Train longer, or leave out less with --skip and "
            "--held-out."
        )
    if last < first:
        told.append(
            f"the curve falls, from {first:.3g} to {last:.3g} over these points: A is no reward to "
            "hope for. Look for what went wrong, or leave out the end with --held-out."
        )
    if found.at_edge:
        told.append(
            "these points do not tell where the curve levels off: A and C_mid are open upwards. "
            "Train longer, or give the metric's limits."
        )
    return told


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """For JSON; None stands for what is not finite."""
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
    numbers = {"value": one.value, "low": one.low, "high": one.high}
    return {name: number if np.isfinite(number) else None for name, number in numbers.items()}


def _row(name: str, one: Interval) -> str:
    return f"  {name:<14}{_short(one.value):>10}  {_short(one.low)} to {_short(one.high)}"


def _short(number: float) -> str:
    return f"{number:.4g}"
