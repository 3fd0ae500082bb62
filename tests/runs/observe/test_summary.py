from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.runs.observe.summary import Ends, duration, summarize, summary_rows, whole_percents


def run(num_steps: int) -> list[dict[str, float]]:
    """Reward i at step i; 2 s a step, of which 1.2 train, 0.5 wait, 0.1 sync; a pause of 0.02."""
    return [
        {
            "step": i,
            "reward/mean": float(i),
            "staleness/mean": 0.5,
            "staleness/max": 2.0 if i == 3 else 1.0,
            "rollouts/trained": 8 * i,
            "rollouts/dropped": 3,
            "rollouts/dropped/stale": 1,
            "rollouts/dropped/reward": 2,
            "time/step_s": 2.0,
            "time/train_s": 1.2,
            "time/trainer_idle_s": 0.5,
            "time/weight_sync_s": 0.1,
            "time/generation_pause_s": 0.02,
            "throughput/trained_tokens_per_s": 1500.0,
        }
        for i in range(1, num_steps + 1)
    ]


def test_a_run_in_numbers() -> None:
    rows = dict(summary_rows(summarize(run(40))))
    assert rows == {
        "reward": "5.500 → 35.500  (mean of the first and of the last 10 steps)",
        "time": "80.0 s: training 60%, waiting for rollouts 25%, weight sync 5%, other 10%; "
        "generation was paused 1.0%",
        "staleness": "mean 0.50, max 2 weight updates",
        "rollouts": "320 trained, 1,500 tokens/s; 3 dropped (reward 2, stale 1)",
    }


def test_a_run_without_rewards_is_summarized_by_accuracy_or_loss() -> None:
    pairs = [{"step": n, "loss": 1.0 / n, "preference/accuracy": n / 4} for n in range(1, 5)]
    assert summary_rows(summarize(pairs))[0] == (
        "accuracy",
        "0.375 → 0.875  (mean of the first and of the last 2 steps)",
    )
    losses = [{"step": n, "loss": 1.0 / n} for n in (1, 2)]
    assert summary_rows(summarize(losses))[0][0] == "loss"


@pytest.mark.parametrize(
    ("parts", "percents"),
    [
        ([1, 1, 1], [34, 33, 33]),
        ([75.45, 18.4, 5.9, 0.25], [76, 18, 6, 0]),
        ([0.5, 99.5], [1, 99]),
        ([0, 0, 3], [0, 0, 100]),
    ],
)
def test_shares_add_up_to_a_hundred(parts: list[float], percents: list[int]) -> None:
    assert whole_percents(parts) == percents


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(lambda parts: sum(parts) > 1e-3))
@settings(deadline=None)
def test_shares_always_add_up(parts: list[float]) -> None:
    percents = whole_percents(parts)
    assert sum(percents) == 100
    exact = [100 * part / sum(parts) for part in parts]
    assert all(abs(n - share) < 1 for n, share in zip(percents, exact, strict=True))


@pytest.mark.parametrize(
    ("num_steps", "before", "after", "window"),
    [(1, 1.0, 1.0, 1), (2, 1.0, 2.0, 1), (5, 1.5, 4.5, 2), (20, 5.5, 15.5, 10)],
)
def test_before_and_after_never_overlap_in_a_short_run(
    num_steps: int, before: float, after: float, window: int
) -> None:
    assert summarize(run(num_steps)).ends == Ends(before=before, after=after, window=window)


def test_missing_metrics_are_left_out() -> None:
    assert summary_rows(summarize([])) == [("rollouts", "0 trained")]
    assert summary_rows(summarize([{"step": 1}])) == [("rollouts", "0 trained")]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (9.99, "9.99 s"),
        (9.999, "10.0 s"),
        (10, "10.0 s"),
        (59.94, "59.9 s"),
        (99.96, "1 min 40 s"),
        (192, "3 min 12 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
