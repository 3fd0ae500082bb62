"""Medians of a run's steps, and lines that no run writes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlsys.planner.run_measurement import MIN_STEPS, WARM_UP, step_medians
from tests.errors import invalid


def line(step: int, **changes: float) -> dict[str, float]:
    values = {
        "step": step,
        "completion/tokens_mean": 10.0,
        "time/step_s": 2.0,
        "time/train_s": 1.0,
        "time/generation_pause_s": 0.1,
        "time/work_s/rollout-0": 0.9,
        "time/wait_s/rollout-0": 0.1,
        "time/work_s/rollout-1": 0.5,
        "time/wait_s/rollout-1": 0.5,
        "time/work_s/reward-0": 0.1,
        "time/wait_s/reward-0": 0.9,
    }
    return values | {name.replace("__", "/"): value for name, value in changes.items()}


def lines(count: int = WARM_UP + MIN_STEPS, **changes: float) -> list[dict[str, float]]:
    return [line(step, **changes) for step in range(1, count + 1)]


def test_medians_leave_out_the_first_steps_and_an_evaluation() -> None:
    steps = lines(12)
    for cold in steps[:WARM_UP]:
        cold["time/step_s"] = 60.0
    steps[7]["time/step_s"] = 30.0  # an evaluation
    found = step_medians("run", steps)
    assert found.num_steps == 10
    assert found.step_s == 2.0
    assert found.train_s == 1.0
    assert found.sync_s == 0.1
    assert found.completion_tokens == 10.0
    # replicas work 0.9 and 0.5 of the time, the reward process 0.1
    assert found.generation_s == pytest.approx(2.0 * 0.7)
    assert found.reward_s == pytest.approx(0.2)


def test_last_steps_without_generation_do_not_count_if_enough_are_left() -> None:
    steps = lines(WARM_UP + MIN_STEPS + 4)
    for alone in steps[-4:]:
        alone["time/step_s"] = 1.5
    found = step_medians("run", steps, num_last=4)
    assert (found.num_steps, found.step_s) == (MIN_STEPS, 2.0)
    found = step_medians("run", steps, num_last=7)
    assert (found.num_steps, found.step_s) == (MIN_STEPS, 2.0)


def test_the_time_of_a_step_is_a_mean_over_steps_that_end_at_once() -> None:
    steps = lines(WARM_UP + 12)
    for number, one in enumerate(steps):
        one["time/step_s"] = 6.0 if number % 3 == 0 else 1.0
        one["time/train_s"] = 0.5
    assert step_medians("run", steps).step_s == 1.0
    assert step_medians("run", steps, period=3).step_s == pytest.approx(8 / 3)
    assert step_medians("run", steps, period=99).step_s == pytest.approx(8 / 3)


def test_cpu_time_beyond_the_work_of_an_actor_counts_as_other_work() -> None:
    cpu = {"time/cpu_s/rollout-0": 1.2, "time/cpu_s/rollout-1": 0.3, "time/cpu_s/reward-0": 0.15}
    found = step_medians("run", [one | cpu for one in lines()])
    # of each second: 0.3 of the first replica, none of the second, 0.05 of the rewards
    assert found.other_s == pytest.approx(2.0 * (0.3 + 0.05))
    assert step_medians("run", lines()).other_s == 0.0


def test_a_run_without_reports_of_actors_has_no_time_of_generation() -> None:
    plain = [{k: v for k, v in one.items() if "work_s" not in k} for one in lines()]
    assert step_medians("run", plain).generation_s == 0.0


def test_equal_steps_have_no_spread() -> None:
    assert step_medians("run", lines()).spread == 0.0


def test_too_few_steps() -> None:
    count = WARM_UP + MIN_STEPS - 1
    with invalid("runs/x", count):
        step_medians("runs/x", lines(count))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time/step_s", math.nan),
        ("time/train_s", math.inf),
        ("time/work_s/rollout-0", -1.0),
    ],
)
def test_an_impossible_number_is_named_with_its_run_and_step(name: str, value: float) -> None:
    steps = lines()
    steps[4][name] = value
    with invalid(f"runs/x, step 5, {name}"):
        step_medians("runs/x", steps)


def test_training_that_is_longer_than_the_steps_is_refused() -> None:
    steps = lines()
    steps[4]["time/train_s"] = 5.0  # its end was recorded late, which shortens the next step
    assert step_medians("runs/x", steps).train_s == 1.0
    with invalid("runs/x, time/train_s", 5.0 * MIN_STEPS):
        step_medians("runs/x", lines(time__train_s=5.0))


def test_a_run_that_does_not_generate_is_refused() -> None:
    steps: list[dict[str, Any]] = lines()
    for one in steps:
        del one["completion/tokens_mean"]
    with invalid("runs/x, step 3, completion/tokens_mean"):
        step_medians("runs/x", steps)


def test_a_step_without_time_is_refused() -> None:
    steps = lines()
    steps[3]["time/step_s"] = 0.0
    with invalid("runs/x, step 4, time/step_s", 0.0):
        step_medians("runs/x", steps)
