"""Sick runs of every kind and healthy ones: each has its advisory, and the healthy have none."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlsys.planner.run_record import RecordedRole, RunRecord, record_text
from rlsys.report.advisory_titles import ABOUT, SPEED, TITLES, anchor
from rlsys.report.report_model import RunReader
from rlsys.runs.observe import diagnosis, speed_findings
from rlsys.runs.observe.advised_settings import AdvisedSettings
from rlsys.runs.observe.diagnosis import EvaluationPoint, diagnose, overfits, stalled
from rlsys.runs.run_directory import RunDirectory
from tests.planner.cpu_examples import TINY_CONFIG
from tests.report.synthetic_runs import START_S, Line, SyntheticRun, write_run

ROOT = Path(__file__).parents[2]


def late(changes: Callable[[int, Line], Mapping[str, float]]) -> Callable[..., Mapping[str, float]]:
    """Return a shape that is healthy for the first 40 steps."""
    return lambda step, line: changes(step, line) if step > 40 else {}


def always(**changes: float) -> Callable[..., Mapping[str, float]]:
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    return lambda step, line: named


SICK = {
    "equal_rewards": SyntheticRun(
        shape=late(lambda step, line: {"groups/zero_advantage_frac": 0.95})
    ),
    "truncated": SyntheticRun(shape=always(completion__truncated_frac=0.6)),
    "failed_rewards": SyntheticRun(
        shape=late(lambda step, line: {"rewards/failed": 4, "rewards/failed/timeout": 4})
    ),
    "memory_bound": SyntheticRun(
        shape=lambda step, line: {
            "engine/running/rollout-0": 8.0,
            "engine/waiting/rollout-0": 40.0,
            "engine/kv_usage/rollout-0": 0.9,
        }
    ),
    "entropy_collapse": SyntheticRun(
        shape=late(lambda step, line: {"entropy": 0.01, "groups/zero_advantage_frac": 0.7})
    ),
    "kl_sampler_trainer": SyntheticRun(
        shape=late(lambda step, line: {"kl/sampler_trainer": 0.02 * (step - 40)})
    ),
    "staleness_pinned": SyntheticRun(
        shape=lambda step, line: {"staleness/mean": 1.0, "time/trainer_idle_s": 0.02}
    ),
    "trainer_idle": SyntheticRun(shape=always(time__trainer_idle_s=1.6)),
    "stages_slow": SyntheticRun(
        shape=always(
            **{
                "time/trainer_idle_s": 1.6,
                "time/work_s/rollout-0": 0.1,
                "time/wait_s/rollout-0": 1.9,
            }
        )
    ),
    "replicas_idle": SyntheticRun(
        shape=always(**{"time/work_s/rollout-0": 0.1, "time/wait_s/rollout-0": 1.9})
    ),
    "wasted_drafts": SyntheticRun(
        shape=always(**{"engine/draft_acceptance/rollout-0": 0.05}),
    ),
    "straggler": SyntheticRun(
        replicas=4,
        shape=lambda step, line: {
            "time/work_s/rollout-2": 1.9,
            "time/wait_s/rollout-2": 0.1,
            **{f"time/work_s/rollout-{i}": 0.5 for i in (0, 1, 3)},
            **{f"time/wait_s/rollout-{i}": 1.5 for i in (0, 1, 3)},
        },
    ),
    "diverging": SyntheticRun(
        shape=late(lambda step, line: {"grad_norm": line["grad_norm"] * 1.6 ** (step - 40)})
    ),
    "overfitting": SyntheticRun(
        evaluations=lambda step: 0.4 + (0.01 * step if step < 40 else -0.1)
    ),
    "stall": SyntheticRun(outcome=None, planned_steps=100),
}

HEALTHY = {
    "plain": SyntheticRun(seed=1),
    "several replicas": SyntheticRun(seed=2, replicas=4, evaluations=lambda step: 0.3 + step / 200),
    "solved": SyntheticRun(
        seed=3,
        num_steps=400,
        shape=late(
            lambda step, line: {
                "entropy": 0.02,
                "reward/mean": 0.99,
                "reward/std": 0.05,
                "groups/zero_advantage_frac": 0.75,
            }
        ),
    ),
    # Half of the tasks need a call, which costs 0.3: the best reward is 0.7 or 1. 95 % are right.
    "solved at a cost": SyntheticRun(
        seed=5,
        shape=lambda step, line: {
            "entropy": 0.8 * math.exp(-step / 12) + 0.02,
            "reward/mean": 0.8 - 0.15 * math.exp(-step / 12),
            "reward/std": 0.27 + 0.1 * math.exp(-step / 12),
            "reward/best_of_group": 0.85,
            "groups/zero_advantage_frac": 0.79 - 0.5 * math.exp(-step / 12),
        },
    ),
    # Hard prompts remain, while the policy does better and better on held-out ones.
    "better and better": SyntheticRun(
        seed=6,
        evaluations=lambda step: 0.3 + step / 200,
        shape=late(lambda step, line: {"entropy": 0.01, "groups/zero_advantage_frac": 0.7}),
    ),
    "one spike": SyntheticRun(
        seed=4, shape=lambda step, line: {"grad_norm": 500.0} if step == 58 else {}
    ),
}


def advisories(path: Path, now_s: float = START_S + 10_000) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = RunReader(path, clock=lambda: now_s).read()["advisories"]
    return found


@pytest.mark.parametrize("kind", SICK)
def test_a_sick_run_has_its_advisory_alone(kind: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SICK[kind])
    os.utime(path / "config.json", (START_S, START_S))
    with RunDirectory(path):  # locked, as a running run is; outcome.json says that it has ended
        found = advisories(path)
    assert [one["kind"] for one in found] == [kind]
    assert found[0]["cause"]
    assert found[0]["fix"]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_advisory(name: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", HEALTHY[name])
    assert advisories(path) == []


@pytest.mark.parametrize(("cluster", "has_room"), [("1x2xCPU", False), ("1x4xCPU", True)])
def test_no_replica_is_advised_without_room_for_it(
    cluster: str, has_room: bool, tmp_path: Path
) -> None:
    """A trainer and a replica reserve a core each."""
    path = write_run(tmp_path / "run", SICK["trainer_idle"])
    role = RecordedRole(name="policy", model="tiny", config=TINY_CONFIG, samples=True)
    record = RunRecord(cluster=cluster, prompt_tokens=4.0, roles=(role,))
    (path / "plan.json").write_text(record_text(record))
    (found,) = advisories(path)
    assert ("rollout.num_replicas" in found["fix"]) == has_room


def test_a_run_that_makes_steps_does_not_stall(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SICK["stall"])
    os.utime(path / "config.json", (START_S, START_S))
    last_s = START_S + 60 * 2.0
    with RunDirectory(path):
        assert advisories(path, now_s=last_s + 59) == []
        assert [one["kind"] for one in advisories(path, now_s=last_s + 61)] == ["stall"]
    assert advisories(path) == []  # the process has ended: the page says that it died


def lines(num_steps: int, **changed: float) -> list[Line]:
    return [
        {"step": 2 + i, "time/step_s": 3.0, "time/unix_s": 1000.0 + 3 * i, **changed}
        for i in range(num_steps)
    ]


def test_a_stall_counts_from_the_start_of_the_process() -> None:
    run = lines(10)
    last_s = run[-1]["time/unix_s"]
    assert stalled(run, started_s=0, now_s=last_s + 59) == []
    assert stalled(run, started_s=0, now_s=last_s + 61)
    assert stalled(run, started_s=last_s + 500, now_s=last_s + 520) == []  # resumed
    assert stalled([], started_s=0, now_s=1e9) == []
    slow = [{**line, "time/step_s": 30.0} for line in run]
    assert stalled(slow, started_s=0, now_s=last_s + 299) == []
    assert stalled(slow, started_s=0, now_s=last_s + 301)


@pytest.mark.parametrize(("factor", "is_found"), [(9.9, False), (10.1, True)])
def test_the_gradient_norm_is_compared_with_its_median(factor: float, is_found: bool) -> None:
    run = [{"step": i, "grad_norm": 2.0} for i in range(1, 31)]
    run += [{"step": i, "grad_norm": 2.0 * factor} for i in range(31, 36)]
    assert [one.kind for one in diagnose(run, settings=AdvisedSettings())] == [
        "diverging"
    ] * is_found


def test_a_collapse_is_measured_against_the_first_steps() -> None:
    first = [{"step": i, "entropy": 2.0} for i in range(1, 6)]
    late = [
        {"step": i, "entropy": 0.15, "groups/zero_advantage_frac": 0.6, "reward/std": 0.3}
        for i in range(500, 505)
    ]
    assert [one.kind for one in diagnose(late, settings=AdvisedSettings(), first=first)] == [
        "entropy_collapse"
    ]
    assert diagnose(late, settings=AdvisedSettings()) == []  # without them, nothing has fallen
    solved = [{**line, "reward/std": 0.05} for line in late]
    assert diagnose(solved, settings=AdvisedSettings(), first=first) == []
    # All rewards are 0 now: the policy has collapsed to one answer, which is wrong.
    before = [{**line, "reward/mean": 0.3} for line in first]
    wrong = [{**line, "reward/mean": 0.0, "reward/std": 0.0} for line in late]
    assert [one.kind for one in diagnose(wrong, settings=AdvisedSettings(), first=before)] == [
        "entropy_collapse"
    ]


@pytest.mark.parametrize(
    ("reward", "fix", "is_found"),
    [
        (0.81, "", False),
        (0.79, "Use", True),
        (0.29, "Go back", True),
    ],
)
def test_a_task_is_solved_when_the_mean_reaches_the_best_of_early_groups(
    reward: float, fix: str, is_found: bool
) -> None:
    """The best of groups had 0.9 and the deviation was 0.4, so that 0.8 is enough."""
    first = [
        {
            "step": i,
            "entropy": 2.0,
            "reward/mean": 0.3,
            "reward/std": 0.4,
            "reward/best_of_group": 0.9,
        }
        for i in range(1, 6)
    ]
    late = [
        {
            "step": i,
            "entropy": 0.1,
            "groups/zero_advantage_frac": 0.7,
            "reward/mean": reward,
            "reward/std": 0.3,
            "reward/best_of_group": reward + 0.01,
        }
        for i in range(500, 550)
    ]
    found = diagnose(late, settings=AdvisedSettings(), first=first)
    assert [one.kind for one in found] == ["entropy_collapse"] * is_found
    assert all(one.fix.startswith(fix) for one in found)


@pytest.mark.parametrize(
    ("last", "reward", "is_found"),
    [
        (0.5, 0.9, True),
        (0.64, 0.9, False),  # the intervals, 0.04 to both sides, overlap
        (0.5, 0.6, False),  # the reward has fallen too
    ],
)
def test_overfitting_needs_a_significant_fall(last: float, reward: float, is_found: bool) -> None:
    def point(step: int, score: float, reward: float) -> EvaluationPoint:
        name = "eval/mean@4"
        line = {
            "step": step,
            name: score,
            f"{name}/low": score - 0.04,
            f"{name}/high": score + 0.04,
        }
        return EvaluationPoint(line=line, reward=reward)

    points = [point(0, 0.3, 0.2), point(10, 0.7, 0.7), point(20, last, reward)]
    assert [one.kind for one in overfits(points)] == ["overfitting"] * is_found


def test_two_equal_workers_are_no_stragglers() -> None:
    def run(slow: float, others: float) -> list[Line]:
        actors = {f"time/work_s/trainer-{i}": others for i in (0, 1)} | {
            "time/work_s/trainer-2": slow
        }
        waits = {name.replace("work", "wait"): 10 - value for name, value in actors.items()}
        return [{"step": i, **actors, **waits} for i in range(2, 7)]

    assert diagnose(run(9, 8), settings=AdvisedSettings()) == []
    assert [one.kind for one in diagnose(run(9, 4), settings=AdvisedSettings())] == ["straggler"]
    assert diagnose(run(6, 1), settings=AdvisedSettings()) == []  # it waits, too: no bottleneck


def test_a_standby_worker_waits_for_nobody() -> None:
    """An environment has a worker that plays and an idle one, which replaces it if it dies."""

    def run(work: dict[str, float]) -> list[Line]:
        actors = {f"time/work_s/environment-0.{name}": value for name, value in work.items()}
        waits = {name.replace("work", "wait"): 10 - value for name, value in actors.items()}
        return [{"step": i, **actors, **waits} for i in range(2, 7)]

    settings = AdvisedSettings()
    assert diagnose(run({"0": 9.9, "1": 0.0}), settings=settings) == []
    assert diagnose(run({"0": 9.9, "1": 9.0, "2": 0.0}), settings=settings) == []
    assert [one.kind for one in diagnose(run({"0": 9.9, "1": 1, "2": 0}), settings=settings)] == [
        "straggler"
    ]


def test_every_kind_is_titled_explained_and_documented() -> None:
    source = Path(diagnosis.__file__).read_text() + Path(speed_findings.__file__).read_text()
    page = (ROOT / "docs" / "report.md").read_text()
    assert TITLES.keys() == ABOUT.keys()
    assert TITLES.keys() > SPEED
    assert set(re.findall(r"Finding\(\s*\"(\w+)\"", source)) == set(TITLES)
    plain = " ".join(page.replace("`", "").split())
    for kind, title in TITLES.items():
        assert f"\n### {title}\n" in page
        assert anchor(kind) == f"docs/report.md#{title.lower().replace(' ', '-')}"
        assert " ".join(ABOUT[kind].split()) in plain
    assert set(SICK) == set(TITLES)
