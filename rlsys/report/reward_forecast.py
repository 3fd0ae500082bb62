"""The scaling fit of a run's reward, and its prediction for twice the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsys import metrics
from rlsys.errors import InvalidValue
from rlsys.report.curve_sampling import rounded

MIN_STEPS = 20
POINTS = 120
SKIP = 0.05  # fraction of the steps at the start
UNTIL = 2.0  # times the steps of the run


def reward_forecast(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the fitted curve with its 95 % band up to UNTIL times the last step, and a text.

    Without a fit, the result has only the text with the reason.
    """
    having = [line for line in lines if metrics.REWARD_MEAN in line]
    if len(having) < MIN_STEPS:
        return {"text": f"A fit needs {MIN_STEPS} steps with a reward."}
    import numpy as np

    from rlsys.evaluation.scaling.laws import SIGMOID
    from rlsys.evaluation.scaling.prediction import limits_of, misfit, predict, warnings
    from rlsys.evaluation.scaling.series import read_series

    try:
        series = read_series(having, name="run", metric=metrics.REWARD_MEAN, against="step")
        found = predict(
            series, SIGMOID, skip=SKIP, held_out=0.0, until=UNTIL, limits=limits_of(series)
        )
    except InvalidValue as error:
        return {"text": f"No fit: {error.rule}."}
    except (ValueError, FloatingPointError, OverflowError) as error:  # rewards beyond all scales
        return {"text": f"No fit: {error}."}
    if missed := misfit(found):
        return {"text": f"No forecast: {missed}."}
    steps = np.linspace(float(found.fitted.compute[0]), found.until, POINTS)
    curve = found.fit.curve(steps)
    at, point = found.reward, found.point
    text = (
        f"Sigmoid fit: {at.value:.3g} expected at step {found.until:,.0f} (95 % interval of the "
        f"mean {at.low:.3g} to {at.high:.3g}, of a single step {point.low:.3g} to "
        f"{point.high:.3g})."
    )
    value, low, high = ([rounded(float(x)) for x in row] for row in curve)
    return {
        "text": text,
        "warnings": warnings(found),
        "steps": [rounded(float(step)) for step in steps],
        "value": value,
        "low": low,
        "high": high,
    }
