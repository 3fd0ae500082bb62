"""The simulation of lending that docs/cluster.md names."""

from __future__ import annotations

import json

import pytest

from scripts.plan import simulate_lending


@pytest.mark.slow
def test_lending_never_slows_a_run_down(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_lending.main(["--quick"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["workloads"] == 2
    for split in ("train_4_of_8", "train_6_of_8", "train_7_of_8"):
        assert found[split]["least_gain"] >= 0.99
    assert found["train_7_of_8"]["worst_over_best"] <= 1.05
