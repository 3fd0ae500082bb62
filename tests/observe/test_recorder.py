"""What the recorder makes of the time between two optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rlsys import metrics
from rlsys.controller import TrainedStep
from rlsys.dataflow.ledger import Ledger
from rlsys.dataflow.signal import Signal
from rlsys.observe import recorder
from rlsys.observe.trace import Tracer
from rlsys.types import StepResult


def test_a_trainer_that_stands_still_does_not_wait_for_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10 s it works 2, waits 3 for a checkpoint, 1 for an evaluation, 4 for rollouts."""
    monkeypatch.setattr(recorder, "_rollout_metrics", lambda trained: {})
    lines: list[Mapping[str, float]] = []
    now = [100.0]
    nobody: Any = SimpleNamespace(write=lambda *_: None, log=lambda *_: None, step=lambda *_: None)
    watcher = recorder.Recorder(
        metrics_writer=SimpleNamespace(write=lines.append),  # type: ignore[arg-type]
        rollout_writer=nobody,
        wandb=nobody,
        console=nobody,
        ledger=Ledger(lambda event: None, groups_per_step=4),
        group_size=2,
        queue_depths=dict,
        tracer=Tracer("controller"),
        stepped=Signal(),
        clock=lambda: now[0],
    )
    watcher.waited("train", metrics.CHECKPOINT, 3.0)
    watcher.waited("train", metrics.EVALUATION, 1.0)
    watcher.waited("train", "groups", 4.0)
    now[0] = 110.0
    result = StepResult(policy_version=1, metrics={}, num_tokens=8, train_s=2.0)
    watcher.step_trained(TrainedStep(step=1, result=result, groups=[], columns={}))
    assert lines[0][metrics.TIME_TRAINER_IDLE_S] == 4.0
    assert lines[0]["time/wait_s/train/checkpoint"] == 3.0
    now[0] = 113.0
    watcher.step_trained(TrainedStep(step=2, result=result, groups=[], columns={}))
    assert lines[1][metrics.TIME_TRAINER_IDLE_S] == 1.0
