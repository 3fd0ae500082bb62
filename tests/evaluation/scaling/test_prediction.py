from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlsys.evaluation.scaling import SIGMOID, Series, read_series
from rlsys.evaluation.scaling.laws import Array
from rlsys.evaluation.scaling.prediction import (
    Prediction,
    as_dict,
    describe,
    limits_of,
    misfit,
    predict,
    warnings,
)
from rlsys.evaluation.scaling.scaling_fit import Interval
from rlsys.evaluation.scaling.series import Against
from rlsys.runs.observe.metrics_file import read_metrics
from tests.errors import invalid
from tests.evaluation.scaling.synthetic_curves import steps
from tests.tiers import rest_slow

# recipes/quickstart.py --trainer.schedule constant, 250 steps on two cores; four of its metrics.
REAL_RUN = Path(__file__).with_name("quickstart_metrics.jsonl")


def real_run(against: Against = "step") -> Series:
    lines = read_metrics(REAL_RUN)
    return read_series(lines, name="quickstart", metric="reward/mean", against=against)


def last_third(skip: float, against: Against = "step") -> Prediction:
    series = real_run(against)
    return predict(series, SIGMOID, skip=skip, held_out=1 / 3, until=2.0, limits=limits_of(series))


@pytest.mark.parametrize("skip", rest_slow([0.0, 0.05, 0.1]))
@pytest.mark.parametrize("against", ["step", "tokens", "hours"])
def test_the_last_third_of_a_real_run_is_predicted(skip: float, against: Against) -> None:
    end = last_third(skip, against).held_out
    assert end is not None
    assert len(end.points.reward) == 83
    assert end.within >= 0.9
    assert end.expected.low <= end.mean <= end.expected.high


def test_a_wrong_prediction_is_seen_as_one() -> None:
    series = real_run()
    fallen = Series(
        name="fallen",
        metric=series.metric,
        against=series.against,
        compute=series.compute,
        reward=np.where(series.compute > 170, series.reward - 0.3, series.reward),
    )
    found = predict(fallen, SIGMOID, skip=0.05, held_out=1 / 3, until=1.0, limits=(0.0, 1.0))
    assert found.held_out is not None
    assert found.held_out.within < 0.1
    assert found.held_out.mean < found.held_out.expected.low


def test_the_printed_lines_of_a_run() -> None:
    found = last_third(0.05)
    text = "\n".join(describe(found))
    assert "quickstart: reward/mean, 0 to 1, against optimizer steps" in text
    for name in ("A ", "R_0", "C_mid", "B ", "R(500)"):
        assert f"\n  {name}" in text
    assert "held out: 83 points" in text
    report = json.loads(json.dumps(as_dict(found), allow_nan=False))
    assert report["parameters"]["A"]["low"] <= report["parameters"]["A"]["high"] <= 1
    assert report["predicted"]["at"] == 500
    assert report["num_points"] == 250 - 12 - 83


def warned_of(reward: Array) -> list[str]:
    series = Series(
        name="", metric="", against="step", compute=steps(len(reward)), reward=np.asarray(reward)
    )
    found = predict(series, SIGMOID, skip=0.0, held_out=0.0, until=2.0, limits=(0.0, 1.0))
    text = describe(found)
    assert all(f"  warning: {warning}" in text for warning in warnings(found))
    assert as_dict(found)["warnings"] == warnings(found)
    return warnings(found)


def test_points_with_similar_errors_cause_a_warning() -> None:
    rising = 0.3 + 0.02 * steps(12)
    waves = 0.1 * np.sin(steps(12) / 2)
    (warning,) = (text for text in warned_of(rising + waves) if "neighbouring" in text)
    assert "12 count as 1, too few for 4 parameters" in warning
    assert not warnings(last_third(0.05))


def test_a_curve_below_what_the_run_has_reached_does_not_fit() -> None:
    """The last ten points have the mean 0.5 + 0.01 * (40 + ... + 49) / 10 = 0.945."""
    series = Series(
        name="", metric="", against="step", compute=steps(50), reward=0.49 + 0.01 * steps(50)
    )
    found = predict(series, SIGMOID, skip=0.0, held_out=0.0, until=2.0, limits=None)
    assert misfit(found) == ""
    below, at = (
        replace(found, reward=Interval(value=0.9, low=0.85, high=high)) for high in (0.944, 0.946)
    )
    assert "0.945" in misfit(below)
    assert any(misfit(below) in warning for warning in warnings(below))
    assert misfit(at) == ""


def test_a_single_step_may_exceed_the_interval_of_the_mean() -> None:
    """A plateau at 1.4 with a deviation of 0.06: 1.96 * 0.06 = 0.12 to both sides of a step."""
    noise = 0.06 * np.random.default_rng(1).standard_normal(60)
    reward = 0.5 + 0.9 * (1 - np.exp(-steps(60) / 6)) + noise
    series = Series(name="", metric="", against="step", compute=steps(60), reward=reward)
    found = predict(series, SIGMOID, skip=0.05, held_out=0.0, until=2.0, limits=None)
    assert found.reward.high - found.reward.low < 0.1
    assert reward.max() > found.reward.high
    assert found.point.high - found.point.low == pytest.approx(0.24, abs=0.05)
    assert misfit(found) == ""


def test_a_falling_curve_causes_a_warning() -> None:
    noise = 0.02 * np.random.default_rng(0).standard_normal(100)
    (falls,) = warned_of(0.6 - 0.003 * steps(100) + noise)
    assert falls.startswith("the curve falls, from 0.5")
    assert not any("falls" in warning for warning in warned_of(0.3 + 0.003 * steps(100) + noise))


def test_limits_are_those_of_a_pass_rate_where_rewards_are_one() -> None:
    series = real_run()
    assert limits_of(series) == (0.0, 1.0)
    beyond = Series(
        name="",
        metric="",
        against="step",
        compute=series.compute,
        reward=series.reward * 1.2,
    )
    assert limits_of(beyond) is None


@pytest.mark.parametrize(
    ("wrong", "field", "value"),
    [
        ({"skip": 0.7, "held_out": 0.3}, "(skip, held_out)", (0.7, 0.3)),
        ({"skip": -0.1}, "(skip, held_out)", (-0.1, 0.0)),
        ({"until": 0.5}, "until", 0.5),
        ({"held_out": 0.98}, "quickstart, reward/mean: points", 5),
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, float], field: str, value: object) -> None:
    shares = {"skip": 0.0, "held_out": 0.0, "until": 2.0} | wrong
    with invalid(field, value):
        predict(
            real_run(),
            SIGMOID,
            skip=shares["skip"],
            held_out=shares["held_out"],
            until=shares["until"],
            limits=None,
        )
