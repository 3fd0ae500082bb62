"""Trackers that fail, hang and die in every way, and what arrives nevertheless."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlsys.common.safe_json import parse_json
from rlsys.runs.observe.metrics_file import read_metrics
from rlsys.runs.observe.trackers.run_trackers import RunTrackers
from rlsys.runs.observe.trackers.tracker_kinds import TrackerKind
from rlsys.runs.observe.trackers.tracker_process import (
    MAX_TRIES,
    RestartPolicy,
    TrackerLimits,
)
from rlsys.runs.observe.trackers.tracker_state import TrackerState
from tests.runs.observe.fake_trackers import BAD_STEP, kind, logged, openings
from tests.runs.observe.tracked_runs import SAMPLES_EVERY, TrackedFiles
from tests.tiers import rest_slow

ROOT = Path(__file__).parents[3]
# On a busy machine a process starts for many seconds.
LIMITS = TrackerLimits(operation_s=5.0, first_delay_s=0.05, finish_s=300.0, failed_finish_s=300.0)
IMPATIENT = TrackerLimits(first_delay_s=0.05, finish_s=2.0, failed_finish_s=2.0)
STEPS = range(1, 6)


def trackers_of(
    directory: Path, name: str, *, first_step: int = 0, limits: TrackerLimits = LIMITS
) -> RunTrackers:
    kinds = {"fake": kind(name)}
    return RunTrackers(["fake"], directory, first_step=first_step, kinds=kinds, limits=limits)


def follow(directory: Path, name: str, limits: TrackerLimits = LIMITS) -> tuple[Any, list[str]]:
    """Write STEPS while a tracker follows. Return what it has and the warnings."""
    files = TrackedFiles(directory)
    trackers = trackers_of(directory, name, limits=limits)
    files.train(STEPS, trackers.stepped)
    trackers.close(failed=False)
    files.close()
    return logged(directory), [text for is_warning, text in trackers.messages() if is_warning]


def metrics_in(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [line["values"] for line in lines if line["kind"] == "metrics"]


def test_everything_arrives_in_the_order_of_steps(tmp_path: Path) -> None:
    """Evaluations of steps 0 and 2 end before step 4, that of step 3 ends after it."""
    files = TrackedFiles(tmp_path)
    trackers = trackers_of(tmp_path, "Healthy")
    files.evaluate(0)
    trackers.evaluated()
    files.train(range(1, 4), trackers.stepped)
    files.evaluate(2)
    trackers.evaluated()
    files.train(range(4, 6), trackers.stepped)
    files.evaluate(3)
    trackers.evaluated()
    trackers.close(failed=True)
    trackers.close(failed=True)
    lines = logged(tmp_path)
    assert metrics_in(lines) == read_metrics(tmp_path / "metrics.jsonl")
    evaluations = [(one["step"], one["values"]) for one in lines if one["kind"] == "evaluation"]
    assert evaluations == [
        (step, {"eval/pass@1": step / 10, "eval/is_best": 1}) for step in (0, 2, 3)
    ]
    samples = [one for one in lines if one["kind"] == "samples"]
    assert [one["step"] for one in samples] == [1, *range(2, 6, SAMPLES_EVERY)]
    assert [row["completion"] for row in samples[-1]["values"]] == ["4.0", "4.1"]
    assert lines[-1] == {"kind": "finish", "failed": True}
    assert [*trackers.messages()] == [(False, "fake: a file")]


@pytest.mark.parametrize(
    "name",
    rest_slow(["RaisesOnce", "ExitsOnce", "KilledOnce", "HangsOnce", "HoldsTheLockOnce"], first=3),
)
def test_a_tracker_that_recovers_has_every_step_once(tmp_path: Path, name: str) -> None:
    lines, warnings = follow(tmp_path, name)
    assert metrics_in(lines) == read_metrics(tmp_path / "metrics.jsonl")
    assert [line["kind"] for line in lines].count("finish") == 1
    assert len(warnings) == 1, warnings
    assert f"metrics {BAD_STEP}" in warnings[0]
    assert ("ConnectionError: no route to host" in warnings[0]) == (name == "RaisesOnce")


def test_an_event_that_a_tracker_refuses_is_skipped_after_a_few_tries(tmp_path: Path) -> None:
    lines, warnings = follow(tmp_path, "RefusesOneEvent")
    assert [line["step"] for line in metrics_in(lines)] == [1, 2, 4, 5]
    assert len(openings(tmp_path)) == 1 + MAX_TRIES
    assert len(warnings) == 2, warnings  # the first failure, and the sum at the end


@pytest.mark.parametrize(
    "name", rest_slow(["HangsInOpen", "HangsInLog", "HangsInFinish"], only=("HangsInLog",))
)
def test_a_tracker_that_hangs_for_ever_is_ended_after_the_run(tmp_path: Path, name: str) -> None:
    lines, warnings = follow(tmp_path, name, IMPATIENT)
    num_steps = {"HangsInOpen": 0, "HangsInLog": BAD_STEP - 1, "HangsInFinish": 5}[name]
    assert len(metrics_in(lines)) <= num_steps
    assert len(warnings) == 1, warnings
    assert ("copy_run" in warnings[0]) == (len(metrics_in(lines)) < 5)
    group = {process.pid for process in psutil.Process().children()}
    assert not {opening["pid"] for opening in openings_or_none(tmp_path)} & group


def openings_or_none(directory: Path) -> list[dict[str, Any]]:
    return openings(directory) if (directory / "trackers" / "fake.jsonl").exists() else []


@pytest.mark.parametrize(
    "text", rest_slow(["import threading; threading.Event().wait()", "raise OSError(5)"])
)
def test_an_import_that_fails_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "sick_library.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    files = TrackedFiles(tmp_path / "run")
    sick = TrackerKind(adapter="sick_library:Tracker", extra="sick")
    trackers = RunTrackers(
        ["sick", "fake"],
        tmp_path / "run",
        kinds={"sick": sick, "fake": kind("Healthy")},
        limits=IMPATIENT,
    )
    files.train(STEPS, trackers.stepped)
    trackers.close(failed=False)
    warnings = [one for is_warning, one in trackers.messages() if is_warning]
    assert warnings
    assert sum("sick" in one for one in warnings) <= 2


def test_a_resumed_run_continues_the_run_of_the_tracker(tmp_path: Path) -> None:
    """The first part ends after step 5, its last checkpoint is of step 3."""
    for name, expected in (
        ("Healthy", [1, 2, 3, 4, 5, 6]),  # keeps the first values of steps 4 and 5
        ("Rewinding", [1, 2, 3, 4.5, 5.5, 6.5]),  # has the last ones
    ):
        directory = tmp_path / name
        files = TrackedFiles(directory)
        trackers = trackers_of(directory, name)
        files.evaluate(0)
        files.train(STEPS, trackers.stepped)
        trackers.close(failed=True)
        files.close()

        files = TrackedFiles(directory, first_step=3)
        trackers = trackers_of(directory, name, first_step=3)
        files.train(range(4, 7), trackers.stepped, salt=0.5)
        trackers.close(failed=False)
        lines = logged(directory)
        assert [line["step"] for line in metrics_in(lines)] == [1, 2, 3, 4, 5, 6]
        losses = [line["loss"] for line in metrics_in(lines)]
        assert losses == [*expected[:5], expected[5] if name == "Rewinding" else 6.5]
        assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0]
        assert [opening["run_id"] for opening in openings(directory)][-1] == "first"


@pytest.mark.parametrize("name", ["Healthy", "Rewinding"])
def test_training_that_goes_back_within_a_run(tmp_path: Path, name: str) -> None:
    files = TrackedFiles(tmp_path)
    trackers = trackers_of(tmp_path, name)
    files.train(STEPS, trackers.stepped)
    trackers.go_back(3)
    files.go_back(3)
    files.train(range(4, 7), trackers.stepped, salt=0.5)
    trackers.close(failed=False)
    lines = metrics_in(logged(tmp_path))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    if name == "Rewinding":
        assert lines == read_metrics(tmp_path / "metrics.jsonl")


def test_a_tracker_that_is_added_later_gets_the_earlier_steps(tmp_path: Path) -> None:
    files = TrackedFiles(tmp_path)
    files.evaluate(0)
    files.train(STEPS, lambda step: None)
    trackers = trackers_of(tmp_path, "Healthy", first_step=5)
    trackers.close(failed=False)
    assert metrics_in(logged(tmp_path)) == read_metrics(tmp_path / "metrics.jsonl")


def test_the_death_of_the_run_ends_the_tracker(tmp_path: Path) -> None:
    TrackedFiles(tmp_path).train(STEPS, lambda step: None)
    program = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from tests.runs.observe.test_run_trackers import trackers_of\n"
        "trackers = trackers_of(Path(sys.argv[1]), 'Healthy', first_step=5)\n"
        "while not [*trackers.messages()]: pass\n"  # until it is open
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, timeout=300, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    path = tmp_path / "trackers" / "fake.jsonl"
    (opening,) = (parse_json(line) for line in path.read_text().splitlines()[:1])
    if psutil.pid_exists(opening["pid"]):
        psutil.Process(opening["pid"]).wait(timeout=300)
    lines = logged(tmp_path)
    assert len(metrics_in(lines)) == 5
    assert lines[-1] == {"kind": "finish", "failed": True}


def test_a_full_pipe_never_blocks(tmp_path: Path) -> None:
    """The tracker hangs, so nobody reads the commands; they fill the pipe and are left out."""
    files = TrackedFiles(tmp_path)
    trackers = trackers_of(tmp_path, "HangsInOpen", limits=IMPATIENT)
    files.write(1)
    for _ in range(20_000):  # 140 kB
        trackers.stepped(1)
    trackers.close(failed=False)


def test_no_tracker_starts_no_process_and_writes_nothing(tmp_path: Path) -> None:
    trackers = RunTrackers([], tmp_path)
    trackers.stepped(1)
    trackers.evaluated()
    trackers.go_back(0)
    trackers.close(failed=False)
    assert [*trackers.messages()] == []
    assert [*tmp_path.iterdir()] == []


def test_the_process_of_the_run_imports_no_tracker(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rlsys.runs.observe.trackers import run_trackers, tracker_kinds\n"
        "libraries = {kind.extra for kind in tracker_kinds.TRACKERS.values()}\n"
        "assert len(libraries) == 5 and not libraries & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=300)


def test_restarts_are_delayed_more_and_more_and_events_skipped() -> None:
    policy = RestartPolicy(TrackerLimits(first_delay_s=5.0, max_delay_s=30.0))
    events = ["metrics 3", None, "metrics 3", "samples 4", "metrics 3"]
    assert [policy.failed(event) for event in events] == [5, 10, 20, 30, 30]
    assert policy.skipped == ["metrics 3"]
    assert policy.num_failures == 5
    assert [policy.failed(None) for _ in range(2000)] == [30] * 2000


def test_limits_of_a_failed_run_are_shorter_than_that_of_a_blocked_event_loop() -> None:
    from actors.cluster.local_ray import STUCK_S

    assert TrackerLimits().failed_finish_s < STUCK_S


@pytest.mark.parametrize("content", [b"", b"[]", b'{"run_id": 1}', b"\xff"])
def test_a_damaged_state_is_that_of_a_new_tracker(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "wandb.json"
    file.write_bytes(content)
    assert TrackerState.read(file) == TrackerState()
