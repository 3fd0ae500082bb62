"""Scores of the comparison with real runs."""

from __future__ import annotations

import pytest

from scripts.plan.own_ground import CONFIGURATIONS, Row, score, table


def row(name: str, measured_s: float, predicted_s: float, *, calibrates: bool = False) -> Row:
    return Row(
        name=name,
        calibrates=calibrates,
        measured_s=measured_s,
        predicted_s=predicted_s,
        measured_bytes=100.0,
        predicted_bytes=90.0,
    )


def test_the_score_leaves_out_calibrations_and_pairs_that_are_close() -> None:
    rows = [
        row("calibration", 1.0, 1.0, calibrates=True),
        row("a", 2.0, 2.2),
        row("b", 2.04, 2.0),  # within 5 % of a: not ordered
        row("c", 4.0, 2.1),
    ]
    found = score(rows)
    assert found["runs"] == 3
    assert found["step_mdape"] == pytest.approx(0.1)
    # calibration < a, b, c; a < c and b < c: of these five pairs only a < c is predicted wrongly
    assert found["pairs"] == 5
    assert found["order_right"] == pytest.approx(4 / 5)
    assert found["memory_mdape"] == pytest.approx(0.1)
    assert len(list(table(rows))) == 5


def test_each_run_has_a_calibration_of_its_model_and_engine() -> None:
    by_name = {one.name: one for one in CONFIGURATIONS}
    assert len(by_name) == len(CONFIGURATIONS) >= 14
    for one in CONFIGURATIONS:
        calibration = by_name[one.calibrated_by]
        assert calibration.calibrated_by == calibration.name
        assert calibration.recipe == one.recipe
        assert ("vllm" in calibration.options) == ("vllm" in one.options)
