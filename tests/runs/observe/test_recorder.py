"""What the recorder makes of the time between two optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlsys import metrics
from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.state import RolloutNote, RunningGroup, TrainedStep
from rlsys.controller.worker_protocols import FinishedRollout, RolloutText
from rlsys.dataflow.scheduling.ledger import Ledger
from rlsys.rewards import RewardFailure
from rlsys.runs.observe import recorder
from rlsys.runs.observe.trace import Tracer
from rlsys.runs.observe.trackers.run_trackers import RunTrackers
from rlsys.types import FinishReason, Prompt, StepResult

IGNORED: Any = SimpleNamespace(write=lambda *_: None, step=lambda *_: None)
RESULT = StepResult(policy_version=1, metrics={}, num_tokens=8, train_s=2.0)


def recorder_of(**parts: Any) -> recorder.Recorder:
    """Of a run with steps of 4 groups of 2."""
    defaults: dict[str, Any] = {
        "metrics_writer": IGNORED,
        "rollout_writer": IGNORED,
        "trackers": RunTrackers([], Path()),
        "publish": lambda line: None,
        "console": IGNORED,
        "ledger": Ledger(lambda event: None, groups_per_step=4),
    }
    return recorder.Recorder(
        group_size=2,
        groups_per_step=4,
        queue_depths=dict,
        tracer=Tracer("controller"),
        stepped=AsyncCondition(),
        **defaults | parts,
    )


def test_a_greedy_baseline_is_recorded_and_in_no_mean() -> None:
    lines: list[Mapping[str, float]] = []
    records: list[Any] = []

    def note(index: int, num_tokens: int, *, is_greedy: bool) -> RolloutNote:
        return RolloutNote(
            index=index,
            is_greedy=is_greedy,
            finished=FinishedRollout(
                request_id=f"0.{index}.0",
                cell=Any,  # type: ignore[arg-type]
                num_prompt_tokens=1,
                num_tokens=num_tokens,
                min_version=2**31 - 1 if is_greedy else 0,
                max_version=0,
                num_injected=num_tokens if is_greedy else 0,
                finish_reason=FinishReason.LENGTH if is_greedy else FinishReason.STOP,
            ),
            text=RolloutText(prompt="?", completion="!", token_ids=[5], policy_versions=[-1]),
        )

    group = RunningGroup(
        group_id=0,
        prompt=Prompt(index=0, token_ids=(1,), text="?", metadata={}),
        rows=[0, 1],
        rollouts=[note(0, 3, is_greedy=False), note(1, 9, is_greedy=True)],
    )
    watcher = recorder_of(
        metrics_writer=SimpleNamespace(write=lines.append),
        rollout_writer=SimpleNamespace(write=records.extend),
    )
    columns = {0: {"reward": [0.25, 1.0], "advantages": [-0.75, 0.0]}}
    gaps = {(0, 0): np.array([0.1234567, np.nan], np.float32)}
    result = replace(RESULT, gaps=gaps)
    watcher.step_trained(TrainedStep(step=1, result=result, groups=[group], columns=columns))
    (line,) = lines
    assert (line["reward/mean"], line["reward/std"]) == (0.25, 0.0)
    assert line["reward/best_of_group"] == 0.25  # without the baseline
    assert (line["completion/tokens_mean"], line["completion/truncated_frac"]) == (3, 0)
    assert line["groups/zero_advantage_frac"] == 0
    assert [(one.is_greedy, one.staleness, one.reward) for one in records] == [
        (False, 0, 0.25),
        (True, 0, 1.0),
    ]
    assert [one.logprob_gaps for one in records] == [[0.12346, None], []]


def test_a_metric_that_is_not_finite_is_left_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_rollout_metrics", lambda trained: {})
    warnings: list[str] = []
    lines: list[Mapping[str, float]] = []
    watcher = recorder_of(
        console=SimpleNamespace(warn=warnings.append, step=lambda *_: None),
        metrics_writer=SimpleNamespace(write=lines.append),
    )
    for step, value in enumerate((1.0, math.inf, math.nan, 2.0), 1):
        result = replace(RESULT, metrics={"loss": 0.5, "my/odds": value})
        watcher.step_trained(TrainedStep(step=step, result=result, groups=[], columns={}))
    assert [line.get("my/odds") for line in lines] == [1.0, None, None, 2.0]
    assert [line["loss"] for line in lines] == [0.5] * 4
    assert len(warnings) == 1
    assert "my/odds=inf of step 2" in warnings[0]


@pytest.mark.parametrize(
    ("num_continued", "num_dropped", "expected"),
    [
        (0, 0, ""),
        (5, 0, "; unfinished rollouts: 5 continue"),
        (0, 4, "; unfinished rollouts: 4 are dropped with their groups"),
        (
            1234,
            4,
            "; unfinished rollouts: 1,234 continue, 4 are dropped with their groups",
        ),
    ],
)
def test_a_death_is_reported_with_what_follows_for_its_rollouts(
    num_continued: int, num_dropped: int, expected: str
) -> None:
    warnings: list[str] = []
    watcher = recorder_of(console=SimpleNamespace(warn=warnings.append))
    watcher.replica_died(
        "rollout-1",
        "rollout-1 died: out of memory.",
        num_continued=num_continued,
        num_dropped=num_dropped,
    )
    assert warnings == [f"rollout-1 died: out of memory{expected}"]


def test_refused_groups_are_reported_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_rollout_metrics", lambda trained: {})
    warnings: list[str] = []
    console: Any = SimpleNamespace(warn=warnings.append, step=lambda *_: None)
    watcher = recorder_of(console=console)
    warned_after: list[int] = []
    for number in range(1, 101):
        watcher.group_refused("picky", {"reward": [0.0, 0.5]})
        if len(warnings) > len(warned_after):
            warned_after.append(number)
    assert warned_after == [16, 32, 64]  # four steps' worth, and twice as many each time
    assert warnings[0].startswith(
        "16 groups were refused since step 0 (picky 16), and a step needs 4 that are not. "
        "The mean of their rewards is 0.25."
    )
    watcher.step_trained(TrainedStep(step=1, result=RESULT, groups=[], columns={}))
    for _ in range(127):
        watcher.group_refused("picky", {"num_tokens": [1.0, 1.0]})
    assert len(warnings) == 3
    watcher.group_refused("other", {"num_tokens": [1.0, 1.0]})
    assert warnings[-1].startswith("128 groups were refused since step 0 (picky 127, other 1), and")
    assert "rewards" not in warnings[-1]


def test_failed_rollouts_are_reported_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_rollout_metrics", lambda trained: {})
    warnings: list[str] = []
    console: Any = SimpleNamespace(warn=warnings.append, step=lambda *_: None)
    watcher = recorder_of(console=console)
    failure = RewardFailure(kind="timeout", reward="slow", message="slow took longer")
    for _ in range(15):
        watcher.reward_failed(failure)
    assert warnings[0] == "reward 'slow' failed: slow took longer"  # the first in full
    assert [line.partition(" rollouts failed")[0] for line in warnings[1:]] == ["4", "8"]
    assert "since step 0 (timeout 4)." in warnings[1]
    watcher.step_trained(TrainedStep(step=1, result=RESULT, groups=[], columns={}))
    for _ in range(4):
        watcher.reward_failed(failure)
    assert [line.partition(" rollouts failed")[0] for line in warnings[3:]] == ["4"]


def test_a_failure_is_shown_in_full_for_each_line_that_raises() -> None:
    warnings: list[str] = []
    console: Any = SimpleNamespace(warn=warnings.append)
    watcher = recorder_of(console=console)
    for line, words in [(13, "one"), (13, "two"), (20, "one"), (13, "three"), (20, "two")]:
        message = (
            f'play raised ValueError: {words}\n  File "a.py", line 3\n  File "b.py", line {line}\n'
        )
        watcher.reward_failed(
            RewardFailure(kind="exception", reward="play", message=message, what="environment")
        )
    shown = [line for line in warnings if line.startswith("environment 'play' failed")]
    assert [line.rpartition(" ")[2].strip() for line in shown] == ["13", "20"]


def test_the_summary_includes_rollouts_dropped_outside_of_steps() -> None:
    ledger = Ledger(lambda event: None, groups_per_step=4)
    for group_id, reason in enumerate(["refused", "stale", "refused"]):
        ledger.issue(group_id, prompt_index=group_id, version=0)
        ledger.drop(group_id, reason=reason)
    found: list[Mapping[str, float]] = []
    closed: Any = SimpleNamespace(close=lambda **_: None)
    recorder_of(
        ledger=ledger,
        metrics_writer=closed,
        rollout_writer=closed,
        console=SimpleNamespace(dropped=found.append),
    ).close(failed=True)
    assert found == [{"refused": 4, "stale": 2}]


def test_a_paused_trainer_does_not_wait_for_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10 s it works 2, waits 3 for a checkpoint, 1 for an evaluation, 4 for rollouts."""
    monkeypatch.setattr(recorder, "_rollout_metrics", lambda trained: {})
    lines: list[Mapping[str, float]] = []
    now = [100.0]
    writer = SimpleNamespace(write=lines.append)
    watcher = recorder_of(metrics_writer=writer, clock=lambda: now[0])
    watcher.waited("train", metrics.CHECKPOINT, 3.0)
    watcher.waited("train", metrics.EVALUATION, 1.0)
    watcher.waited("train", "groups", 4.0)
    now[0] = 110.0
    watcher.step_trained(TrainedStep(step=1, result=RESULT, groups=[], columns={}))
    assert lines[0][metrics.TIME_TRAINER_IDLE_S] == 4.0
    assert lines[0]["time/wait_s/train/checkpoint"] == 3.0
    now[0] = 113.0
    watcher.step_trained(TrainedStep(step=2, result=RESULT, groups=[], columns={}))
    assert lines[1][metrics.TIME_TRAINER_IDLE_S] == 1.0


def test_the_cpu_time_of_the_process_is_that_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_rollout_metrics", lambda trained: {})
    lines: list[Mapping[str, float]] = []
    cpu = iter((10.0, 12.5, 13.0))
    writer = SimpleNamespace(write=lines.append)
    watcher = recorder_of(metrics_writer=writer, cpu_clock=lambda: next(cpu))
    for step in (1, 2):
        watcher.step_trained(TrainedStep(step=step, result=RESULT, groups=[], columns={}))
    assert [line[metrics.TIME_CONTROLLER_S] for line in lines] == [2.5, 0.5]


def test_lending_is_counted_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_rollout_metrics", lambda trained: {})
    lines: list[Mapping[str, float]] = []
    watcher = recorder_of(metrics_writer=SimpleNamespace(write=lines.append))
    watcher.devices_lent(2.5, num_rollouts=3)
    watcher.devices_lent(0.5, num_rollouts=1)
    watcher.step_trained(TrainedStep(step=1, result=RESULT, groups=[], columns={}))
    watcher.not_lent("too_short")
    watcher.step_trained(TrainedStep(step=2, result=RESULT, groups=[], columns={}))
    lending = [{k: v for k, v in line.items() if k.startswith("lending/")} for line in lines]
    assert lending == [
        {metrics.LENT_S: 3.0, metrics.HAND_OVERS: 2, metrics.LENT_ROLLOUTS: 4},
        {"lending/not_lent/too_short": 1},
    ]


def test_the_load_of_engines_is_a_mean_over_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_rollout_metrics", lambda trained: {})
    lines: list[Mapping[str, float]] = []
    watcher = recorder_of(metrics_writer=SimpleNamespace(write=lines.append))
    tracer = Tracer("rollout-0")
    for running, waiting in ((8, 0), (4, 6)):
        tracer.counter("running", running)
        tracer.counter("waiting", waiting)
    tracer.counter("episodes", 3)
    watcher.actor_reported(tracer.drain())
    for step in (1, 2):
        watcher.step_trained(TrainedStep(step=step, result=RESULT, groups=[], columns={}))
    assert lines[0]["time/cpu_s/rollout-0"] >= 0
    loads = [{k: v for k, v in line.items() if k.startswith("engine/")} for line in lines]
    assert loads == [{"engine/running/rollout-0": 6, "engine/waiting/rollout-0": 3}, {}]
