"""What the chaos script decides and measures; and, with real clusters, what it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlsys.runs.run_files import RunFiles
from scripts.chaos import summary
from scripts.crashes import processes
from scripts.crashes.judgement import (
    Outcome,
    differences,
    sampled_twice,
    step_after,
    tokens_after,
)
from scripts.crashes.plan import ALL_KINDS, STALENESS, kills, plan
from scripts.crashes.processes import MARK, Process

ROOT = Path(__file__).parents[2]


def test_a_seed_decides_everything() -> None:
    first = [plan(3, number, num_steps=20, kinds=ALL_KINDS) for number in range(50)]
    again = [plan(3, number, num_steps=20, kinds=ALL_KINDS) for number in range(50)]
    other = [plan(4, number, num_steps=20, kinds=ALL_KINDS) for number in range(50)]
    assert first == again != other


def test_every_kind_and_every_way_has_its_turn() -> None:
    plans = [plan(0, number, num_steps=20, kinds=ALL_KINDS) for number in range(42)]
    faults = [(fault.kind, fault.how) for each in plans for fault in each.faults]
    assert {kind for kind, _ in faults} == set(ALL_KINDS)
    assert {how for _, how in faults} == {"kill", "stop", "hiccup"}
    assert ("driver", "stop") not in faults  # nobody would notice
    assert {each.max_staleness for each in plans} == set(STALENESS)
    assert all(1 <= len(each.faults) <= 3 for each in plans)
    assert all(1 <= fault.after_step <= 18 for each in plans for fault in each.faults)


def test_kills_come_before_the_end() -> None:
    for number in range(50):
        steps = kills(1, number, num_steps=12).after_steps
        assert list(steps) == sorted(set(steps))
        assert steps[0] >= 1
        assert steps[-1] <= 10


@pytest.fixture
def family() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A marked process with a child."""
    mark = uuid.uuid4().hex
    # The child prints its id itself. Until it has started its program, Linux shows no environment.
    child = "import os; print(os.getpid(), flush=True); input()"
    program = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "child.wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield mark, process
    processes.kill_all(mark)
    process.communicate(timeout=300)


def test_processes_are_found_by_their_mark_and_by_nothing_else(
    family: tuple[str, subprocess.Popen[str]],
) -> None:
    mark, process = family
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert {p.pid for p in processes.marked(mark)} == {process.pid, child}
    assert {p.pid for p in processes.below(child, mark)} == {child}
    assert {p.pid for p in processes.below(process.pid, mark)} == {process.pid, child}
    assert processes.marked(mark[:-1]) == []
    processes.kill_all(mark)
    assert processes.marked(mark) == []


def test_a_pid_that_is_used_again_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        former = Process(pid=process.pid, started=1, parent=os.getpid(), command="")
        assert not former.send(signal.SIGKILL)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(
    ("command", "is_ray"),
    [
        ("/venv/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", True),
        ("python -u /venv/site-packages/ray/dashboard/agent.py --node-ip-address=1", True),
        ("python -u /venv/site-packages/ray/autoscaler/_private/monitor.py", True),
        ("ray::IDLE", True),
        ("ray::DashboardAgent", True),
        ("ray::RolloutActor.collect", False),
        ("ray::StoreShard", False),
        ("python /tmp/ray/recipe.py", False),
    ],
)
def test_processes_of_ray_and_of_a_run_are_distinguished(command: str, is_ray: bool) -> None:
    assert Process(pid=1, started=0, parent=0, command=command).is_ray_itself == is_ray


def files_of(directory: Path, **lines: list[dict[str, Any]]) -> RunFiles:
    directory.mkdir()
    for name, content in lines.items():
        text = "".join(json.dumps(line) + "\n" for line in content)
        (directory / f"{name}.jsonl").write_text(text)
    return RunFiles(directory)


def test_a_rank_is_back_with_the_next_step(tmp_path: Path) -> None:
    times = [100.0, 101.0, 101.5, 109.0, 110.0]
    lines = [{"step": step, "time/unix_s": at} for step, at in enumerate(times, start=1)]
    files = files_of(tmp_path / "run", metrics=lines)
    assert step_after(files, 101.2, 200.0) == pytest.approx(7.8)  # 101.5 was nearly done
    assert step_after(files, 101.2, 108.0) is None  # another fault fell before
    assert step_after(files, 111.0, 200.0) is None


def test_a_replica_is_back_when_a_new_one_samples(tmp_path: Path) -> None:
    files = files_of(tmp_path / "run")

    def running(pid: int, second: float) -> dict[str, Any]:
        counted = {"value": 0}  # what was asked has been answered
        return {"ph": "C", "name": "running", "pid": pid, "ts": second * 1e6, "args": counted}

    def submit(pid: int, second: float) -> dict[str, Any]:
        given = {"rollouts": 4}
        return {"ph": "i", "name": "submit", "pid": pid, "ts": second * 1e6, "args": given}

    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "origin", "pid": 0, "args": {"unix_ns": 100 * 10**9}},
        *(
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for pid, name in ((1, "rollout-0"), (2, "rollout-1"), (3, "rollout-0.1"), (4, "score"))
        ),
        *(submit(1, 0.5), running(1, 1.0), submit(2, 0.5), running(2, 1.0), running(2, 9.0)),
        *(submit(4, 5.0), running(4, 6.0)),
        *(running(3, 7.0), submit(3, 7.5), running(3, 8.0), running(3, 9.0)),
    ]
    files.trace.write_text(json.dumps(events))
    assert tokens_after(files, 105.0, 200.0) == pytest.approx(3.0)
    assert tokens_after(files, 105.0, 107.5) is None
    assert tokens_after(files, 107.5, 200.0) is None  # it was there already
    files.trace.write_text("[{")
    assert tokens_after(files, 105.0, 200.0) is None


def test_only_what_is_younger_than_the_checkpoint_may_be_sampled_twice(tmp_path: Path) -> None:
    def issued(group: int) -> dict[str, Any]:
        return {"event": "issued", "group": group, "prompt": group, "version": 0}

    def trained(step: int, *groups: int) -> dict[str, Any]:
        versions = [0] * len(groups)
        return {"event": "trained", "step": step, "groups": groups, "oldest_versions": versions}

    resumed = {"event": "resumed", "step": 2}
    before = [issued(0), issued(1), trained(1, 0), issued(2), trained(2, 1), issued(3)]
    young = [{"event": "reissued", "group": 3, "version": 2}]
    old = [{"event": "reissued", "group": 2, "version": 2}]
    files = files_of(tmp_path / "young", ledger=[*before, resumed, *young])
    assert sampled_twice(files) == (1, 0)
    files = files_of(tmp_path / "old", ledger=[*before, resumed, *young, *old])
    assert sampled_twice(files) == (2, 1)


def test_numbers_that_differ_from_an_undisturbed_run_are_named(tmp_path: Path) -> None:
    def run(name: str, loss: float, token: int, weights: bytes) -> RunFiles:
        rollout = {"step": 1, "group_id": 0, "index": 0, "token_ids": [token]}
        rest = {"policy_versions": [0], "reward": 1.0, "advantage": 0.5}
        files = files_of(
            tmp_path / name,
            metrics=[{"step": 1, "loss": loss, "time/step_s": token, "rollouts/issued": len(name)}],
            rollouts=[{**rollout, **rest}],
        )
        files.hf.mkdir()
        (files.hf / "model.safetensors").write_bytes(weights)
        return files

    reference = run("reference", 0.5, 1, b"w")
    assert differences(run("same", 0.5, 1, b"w"), reference) == []
    found = differences(run("other", 0.25, 2, b"v"), reference)
    assert found == [
        "step 1 differs from the undisturbed run: loss 0.25 instead of 0.5",
        "rollouts differ from the undisturbed run, first in step 1",
        "hf/model.safetensors differs from the undisturbed run's",
    ]


def test_the_summary_counts_and_takes_the_longest() -> None:
    outcomes = [
        Outcome(number=0, title="", ended_well=True, back_s={"replica": [3.0, 4.44]}),
        Outcome(
            number=1, title="", audit_errors=["a", "b"], leftovers=["c"], back_s={"rank": [9.0]}
        ),
    ]
    assert summary(outcomes) == {
        "runs": 2,
        "ended_well": 1,
        "audit_errors": 2,
        "leftovers": 1,
        "replica_back_s": 4.4,
        "rank_back_s": 9.0,
        "node_back_s": None,
        "resampled": 0,
        "resampled_older": 0,
    }
    assert summary([])["rank_back_s"] is None


def chaos(*arguments: str, timeout_s: float) -> dict[str, Any]:
    """The last line of the script, which must find nothing wrong."""
    process = subprocess.run(
        [sys.executable, "scripts/chaos.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_is_hurt_ends_well() -> None:
    found = chaos("--runs", "1", "--seed", "0", "--steps", "10", timeout_s=840)
    names = ("runs", "ended_well", "audit_errors", "leftovers")
    assert [found[name] for name in names] == [1, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_runs_that_are_hurt_end_well() -> None:
    found = chaos("--runs", "14", "--seed", "1", timeout_s=7100)
    assert (found["ended_well"], found["audit_errors"], found["leftovers"]) == (14, 0, 0)
    # Which of the two is measured depends on who was hit when.
    back = {name: found[name] for name in ("replica_back_s", "rank_back_s") if found[name]}
    assert back
    assert back.get("replica_back_s", 0) <= 15
    assert back.get("rank_back_s", 0) <= 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_that_are_killed_and_resumed_give_the_same_numbers() -> None:
    found = chaos("--runs", "6", "--seed", "2", "--resume-only", timeout_s=3500)
    assert (found["ended_well"], found["audit_errors"], found["leftovers"]) == (6, 0, 0)
    assert found["resampled_older"] == 0
