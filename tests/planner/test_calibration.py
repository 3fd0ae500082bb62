"""Profiles, their calibration, and the stored constants."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.planner.model_config import DATA
from rlsys.planner.profiles import (
    NOISE,
    PRIORS,
    SoftwareProfile,
    calibrate,
    constants_from,
    fitted_constants,
    interval,
    prior_constants,
)
from scripts.plan.fit import constants_text
from tests.errors import invalid

UNKNOWN = SoftwareProfile(name="mine", spread=0.3, moe_spread=0.4)


def test_three_rows_move_the_profile_towards_them() -> None:
    found = calibrate(UNKNOWN, [1.5, 1.45, 1.55])
    assert 1.4 < found.factor < 1.5
    assert found.moe_factor == 1.0
    assert NOISE < found.spread < 0.3
    assert found.rows == 3


def test_a_row_with_experts_moves_the_other_factor() -> None:
    found = calibrate(UNKNOWN, [2.0], moe=True)
    assert found.factor == 1.0
    assert 1.4 < found.moe_factor < 2.0
    assert found.moe_spread < UNKNOWN.moe_spread
    assert found.spread == UNKNOWN.spread


@given(ratio=st.floats(0.3, 3.0), rows=st.integers(1, 50))
def test_more_rows_weigh_more(ratio: float, rows: int) -> None:
    one = calibrate(UNKNOWN, [ratio] * rows).factor
    more = calibrate(UNKNOWN, [ratio] * (rows + 1)).factor
    assert abs(math.log(more / ratio)) <= abs(math.log(one / ratio)) + 1e-12
    assert min(1, ratio) * (1 - 1e-9) <= one <= max(1, ratio) * (1 + 1e-9)


@pytest.mark.parametrize("ratio", [math.nan, math.inf, 0.0, -1.0])
def test_measurements_that_are_no_times_are_refused(ratio: float) -> None:
    with invalid("calibration.seconds"):
        calibrate(UNKNOWN, [1.0, ratio])


def test_rows_that_contradict_each_other_are_refused() -> None:
    with invalid("calibration"):
        calibrate(UNKNOWN, [0.5, 2.5])
    with invalid("calibration"):
        calibrate(UNKNOWN, [])


def test_an_interval_is_symmetric_in_ratios() -> None:
    low, high = interval(10.0, 0.2)
    assert low * high == pytest.approx(100.0)
    assert high == pytest.approx(10 * math.exp(1.2816 * 0.2))


def test_an_unknown_stack_is_generic_with_a_wide_interval() -> None:
    constants = fitted_constants()
    found = constants.profile("a-stack-of-my-own")
    assert (found.name, found.factor) == ("a-stack-of-my-own", 1.0)
    assert found.spread >= 0.3


def test_the_stored_constants_are_complete_and_near_their_priors() -> None:
    constants = fitted_constants()
    assert set(constants.values) == set(PRIORS)
    far = {
        name: constants[name]
        for name, prior in PRIORS.items()
        if abs(math.log(constants[name] / prior.value)) > 4 * prior.spread
    }
    assert far == {}


def test_constants_survive_a_file() -> None:
    text = (DATA / "constants.json").read_text()
    constants = constants_from(text)
    assert constants_text(constants, constants.spreads) == text
    assert constants_from(constants_text(prior_constants(), {})).values == prior_constants().values


def test_a_profile_needs_positive_numbers() -> None:
    with invalid("profile.factor", 0.0):
        SoftwareProfile(name="x", factor=0.0)
    with invalid("profile.spread"):
        SoftwareProfile(name="x", spread=math.nan)
