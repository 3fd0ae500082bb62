"""Early stop: lines of a run against its conditions."""

from __future__ import annotations

from rlsys.config.stop_condition import StopCondition
from rlsys.runs.early_stop import EarlyStop


def rule(*texts: str) -> EarlyStop:
    return EarlyStop([StopCondition.parse(text) for text in texts])


def test_the_first_condition_that_is_met_gives_the_reason() -> None:
    stop = rule("reward/mean > 0.9", "entropy < 0.1")
    assert stop.observe({"step": 1, "reward/mean": 0.5, "entropy": 0.5}) is None
    reason = stop.observe({"step": 2, "reward/mean": 0.6, "entropy": 0.05})
    assert reason is not None
    assert "'entropy < 0.1'" in reason
    assert "step 2" in reason


def test_a_line_without_the_metric_changes_nothing() -> None:
    """An evaluation arrives between two steps, and says nothing about a metric of steps."""
    stop = rule("reward/mean > 0.9")
    assert stop.observe({"step": 1, "reward/mean": 0.5}) is None
    assert stop.observe({"step": 1, "eval/mean@1": 1.0}) is None
    assert rule().observe({"step": 1, "reward/mean": 0.5}) is None


def test_steps_that_are_trained_again_count_once() -> None:
    stop = rule("reward/mean not rising for 3")
    for step, value in enumerate([0.5, 0.4, 0.4], start=1):
        assert stop.observe({"step": step, "reward/mean": value}) is None
    assert stop.observe({"step": 2, "reward/mean": 0.3}) is None  # of a restarted trainer
    assert stop.observe({"step": 3, "reward/mean": 0.3}) is None
    reason = stop.observe({"step": 4, "reward/mean": 0.3})
    assert reason is not None
    assert "0.5 at step 1" in reason


def test_an_unknown_metric_is_reported_once_with_similar_names() -> None:
    stop = rule("reward/means > 0.9", "eval/pass@8 > 0.5", "loss < 0")
    (warning,) = stop.unknown({"step": 1, "reward/mean": 0.5, "loss": 1.0})
    assert "'reward/means'" in warning
    assert "reward/mean" in warning.split("Similar: ")[1]
    assert stop.unknown({"step": 2, "reward/mean": 0.5}) == []
    (warning,) = stop.unknown({"step": 5, "eval/pass@1": 0.5})
    assert "'eval/pass@8'" in warning
    assert stop.unknown({"step": 10, "eval/pass@1": 0.5}) == []
