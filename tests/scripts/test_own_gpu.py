"""Predictions of the training steps that were measured on a GPU."""

from __future__ import annotations

import pytest

from rlsys.planner.hardware import parse_cluster
from scripts.plan.own_gpu import predicted_s, summary, training_rows
from tests.scripts.test_gpu_check import ROOT


def test_steps_of_8b_are_predicted_within_the_interval_of_the_profile() -> None:
    rows = training_rows(ROOT / "docs" / "gpu" / "h200-2026-11-27.jsonl")
    assert {row["shape"] for row in rows} == {"8b"}
    seconds = [predicted_s(row, parse_cluster("H200")) for row in rows]
    found = summary(rows, seconds)
    assert found["rows"] == 3
    assert found["median_error"] < 0.15
    assert found["order_right"] == 1.0


def test_the_summary_compares_rows_of_one_shape_and_size() -> None:
    def row(shape: str, step_s: float, tokens: int = 8192) -> dict[str, object]:
        return {"shape": shape, "tokens": tokens, "step_s": step_s}

    rows = [row("8b", 2.0), row("8b", 4.0), row("8b", 4.1), row("4b", 1.0), row("8b", 9.0, 16384)]
    found = summary(rows, [2.2, 2.0, 4.1, 1.1, 9.0])
    assert found["pairs"] == 2  # of 2.0 with 4.0 and with 4.1; 4.0 and 4.1 are too close
    assert found["order_right"] == 0.5
    assert found["median_error"] == pytest.approx(0.1)
