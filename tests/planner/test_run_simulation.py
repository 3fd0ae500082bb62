"""Steps of a simulated run: which count, and the work in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.planner.run_simulation import MAX_AHEAD, NUM_MEASURED, measured_steps, num_played


@given(st.integers(0, MAX_AHEAD))
def test_the_measured_steps_are_whole_periods_after_the_first_burst(ahead: int) -> None:
    num_steps, warm_up = measured_steps(ahead)
    measured = num_steps - warm_up - 1  # the first of them starts at the end of another one
    assert warm_up > ahead
    assert measured >= NUM_MEASURED
    assert measured % (ahead + 1) == 0


@pytest.mark.parametrize(
    ("max_staleness", "updates", "expected"),
    [
        (0, 1, 9),  # 3 + 1 + 5
        (1, 1, 4 + 1 + 6 + 1),
        (3, 4, 9),  # within a step of four updates
        (7, 4, 4 + 1 + 6 + 1),
        (1000, 1, 19 + 1 + 17 + 16),
    ],
)
def test_a_simulation_plays_as_many_steps(max_staleness: int, updates: int, expected: int) -> None:
    assert num_played(max_staleness, updates) == expected
