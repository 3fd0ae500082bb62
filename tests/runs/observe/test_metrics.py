from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlsys import metrics
from rlsys.metrics import by_reason, without_times
from rlsys.runs.observe.metrics_file import MetricsWriter, read_metrics
from tests.errors import invalid

CONTRACT = {
    "step",
    "policy_version",
    "reward/mean",
    "reward/std",
    "groups/zero_advantage_frac",
    "completion/tokens_mean",
    "completion/truncated_frac",
    "staleness/mean",
    "staleness/max",
    "kl/sampler_trainer",
    "entropy",
    "loss",
    "grad_norm",
    "rollouts/issued",
    "rollouts/trained",
    "rollouts/dropped",
    "time/step_s",
    "time/train_s",
    "time/trainer_idle_s",
    "time/weight_sync_s",
    "time/generation_pause_s",
    "throughput/trained_tokens_per_s",
    "throughput/generated_tokens_per_s",
    "throughput/trained_rollouts_per_s",
}


def test_every_name_of_the_contract_is_defined_once() -> None:
    names = [value for key, value in vars(metrics).items() if key.isupper() and type(value) is str]
    assert len(names) == len(set(names))
    assert set(names) >= CONTRACT


def test_two_equal_runs_are_equal_without_times() -> None:
    line = {
        metrics.STEP: 3,
        metrics.REWARD_MEAN: 0.5,
        metrics.TIME_STEP_S: 1.5,
        metrics.TIME_UNIX_S: 1.7e9,
        metrics.actor_wait_s("rollout 0"): 0.25,
        metrics.THROUGHPUT_TRAINED_TOKENS: 9e3,
        metrics.queue_depth("score"): 4,
        metrics.rollouts_dropped("stale"): 2,
    }
    assert without_times(line) == {"step": 3, "reward/mean": 0.5, "rollouts/dropped/stale": 2}


def test_numbers_of_any_kind_are_written_exactly(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    third = np.float32(1) / np.float32(3)
    writer.write({"step": np.int64(1), "loss": third, "entropy": torch.tensor(0.1), "x": 2})
    writer.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line == {"step": 1, "loss": float(third), "entropy": torch.tensor(0.1).item(), "x": 2}
    assert type(line["step"]) is type(line["x"]) is int


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_a_number_that_is_not_finite_is_refused_by_name(tmp_path: Path, value: float) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    with invalid("metric loss"):
        writer.write({"step": 1, "loss": value})
    assert read_metrics(path) == []
    writer.write({"step": 1, "loss": 0.0})  # the writer is still good
    assert read_metrics(path) == [{"step": 1, "loss": 0.0}]


@pytest.mark.parametrize("step", [2, 1, 0, 2.0, None])
def test_steps_are_written_once_and_in_order(tmp_path: Path, step: float | None) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 2})
    line = {} if step is None else {"step": step}
    with invalid("step", step):
        writer.write(line)


def test_a_resumed_run_trains_its_lost_steps_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    crashed = MetricsWriter(path)
    for step in range(1, 8):
        crashed.write({"step": step, "loss": 1.0})
    resumed = MetricsWriter(path, after_step=5)
    for step in range(6, 9):
        resumed.write({"step": step, "loss": 2.0})
    resumed.close()
    lines = read_metrics(path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == [1.0] * 5 + [2.0] * 3


def test_training_that_goes_back_writes_its_steps_again(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        writer.write({"step": step, "loss": 1.0})
    writer.go_back(3)
    for step in range(4, 7):
        writer.write({"step": step, "loss": 2.0})
    writer.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 7)]
    assert [line["loss"] for line in lines] == [1.0] * 3 + [2.0] * 3


@pytest.mark.parametrize(
    ("name", "own"),
    [
        *[(name, True) for name in ("step", "loss", "grad_norm", "entropy", "staleness/max")],
        *[(name, True) for name in ("reward/mean", "kl/sampler_trainer", "updates/repeated")],
        *[(name, True) for name in ("time/mine", "rollouts/dropped/mine", "prompts", "is_best")],
        *[(name, False) for name in ("preference/accuracy", "kl/reference", "checkpoint")],
        *[(name, False) for name in ("my/loss", "clip_frac", "rewards/margins")],
    ],
)
def test_metrics_of_rlsys_differ_from_those_of_losses(name: str, own: bool) -> None:
    assert metrics.is_own(name) is own


def test_reasons_come_largest_first_and_without_zeros() -> None:
    line = {
        "rollouts/dropped": 9.0,
        "rollouts/dropped/stale": 2.0,
        "rollouts/dropped/reward": 7.0,
        "rollouts/dropped/aborted": 0.0,
        "rollouts/trained": 5.0,
    }
    assert list(by_reason(line, metrics.ROLLOUTS_DROPPED).items()) == [("reward", 7), ("stale", 2)]
