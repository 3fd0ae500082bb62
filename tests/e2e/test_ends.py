"""Runs that are ended from outside: no process, port or file is left or open to other users."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import SMALL_QUICKSTART, Job, run, start, start_command
from tests.listeners import LOOPBACK, listening, named_elsewhere

# A driver once hung for 61 s. The end takes 3 s on an idle machine, 8 to 12 s where six processes
# share a core, and 30 s if Ray has received the signal too and leaves a call unanswered.
ENDS_WITHIN_S, DEAF_ENDS_WITHIN_S = 40.0, 50.0

ENDLESS = [*SMALL_QUICKSTART, "--num-steps", "100000"]


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    """Directory for the files of local Rays; short, because socket paths are limited."""
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


def assert_ended_with_its_summary(job: Job, ray_dir: Path, within_s: float = ENDS_WITHIN_S) -> None:
    assert job.wait(timeout_s=within_s) == 130, job.output
    assert "Interrupted" in job.output
    assert "Traceback" not in job.output, job.output
    assert job.left_behind() == {}
    assert list(ray_dir.iterdir()) == []


@pytest.mark.slow  # test_failures.py has an interrupt
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_all_processes_ends_the_run_with_its_summary(
    number: signal.Signals, tmp_path: Path, ray_dir: Path
) -> None:
    # systemd and closed terminals signal all processes. Two ranks have a process group.
    ranks = ["--trainer.layout", "dp2", "--trainer.num-cpus", "0.5", "--rollout.num-cpus", "0.5"]
    arguments = [*ENDLESS, *ranks, "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path, RAY_TMPDIR=str(ray_dir))
    try:
        job.wait_for_step(tmp_path / "runs" / "quickstart", 1)
        processes = job.processes()
        open_to_others = [
            (address, processes[pid])
            for address, pid in listening(set(processes))
            if address not in LOOPBACK
        ]
        assert open_to_others == []
        (directory,) = ray_dir.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for pid in processes:
            os.kill(pid, number)
        assert_ended_with_its_summary(job, ray_dir)
    finally:
        job.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_of_a_run_with_vllm_is_open_to_others(tmp_path: Path, ray_dir: Path) -> None:
    # For any host name, and with environment variables of clusters that name an interface. One rank
    # with 16 bits has a process group too.
    own = ["--rollout.engine=vllm", "--rollout.kv-cache-gib=0.125", "--model.dtype=bfloat16"]
    command = named_elsewhere(sys.executable, "recipes/quickstart.py", *ENDLESS, *own)
    clusters = {"GLOO_SOCKET_IFNAME": "none-here", "NCCL_SOCKET_IFNAME": "none-here"}
    job = start_command(
        [*command, "--runs-dir", str(tmp_path / "runs")],
        tmp_path,
        RAY_TMPDIR=str(ray_dir),
        **clusters,
    )
    try:
        job.wait_for_step(tmp_path / "runs" / "quickstart", 1)
        processes = job.processes()
        assert any(command.startswith("VLLM::") for command in processes.values()), processes
        found = listening(processes)
        assert len({processes[pid] for _, pid in found}) > 3, found
        assert {one for one in found if one[0] not in LOOPBACK} == set()
        job.process.send_signal(signal.SIGINT)
        assert_ended_with_its_summary(job, ray_dir)
    finally:
        job.end()


@pytest.mark.slow  # where in Ray it interrupts the driver depends on the machine's load
def test_a_signal_to_all_processes_while_actors_start_ends_the_run(
    tmp_path: Path, ray_dir: Path
) -> None:
    # The driver calls Ray's processes, which are dead by then and never answer.
    arguments = [*ENDLESS, "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path, RAY_TMPDIR=str(ray_dir))
    try:
        job.wait_for_output("Loading the model into the trainer")
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert_ended_with_its_summary(job, ray_dir, DEAF_ENDS_WITHIN_S)
    finally:
        job.end()


@pytest.mark.slow
def test_a_second_interrupt_does_not_abort_the_cleanup(tmp_path: Path, ray_dir: Path) -> None:
    # Sent while actors start, with many pending calls.
    arguments = [*ENDLESS, "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path, RAY_TMPDIR=str(ray_dir))
    try:
        job.wait_for_output("Loading the model into the trainer")
        job.process.send_signal(signal.SIGINT)
        job.wait_for_output("the trainer: stopped after")
        job.process.send_signal(signal.SIGINT)
        assert_ended_with_its_summary(job, ray_dir)
    finally:
        job.end()


@pytest.mark.slow
def test_nothing_outlives_a_killed_run(tmp_path: Path, ray_dir: Path) -> None:
    # One of its processes is suspended and would never notice.
    arguments = [*ENDLESS, "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path, RAY_TMPDIR=str(ray_dir))
    try:
        job.wait_for_step(tmp_path / "runs" / "quickstart", 1)
        actor = next(p for p, name in job.processes().items() if name.startswith("ray::Rollout"))
        os.kill(actor, signal.SIGSTOP)
        os.kill(job.process.pid, signal.SIGKILL)
        job.wait()
        assert job.left_behind() == {}
        assert list(ray_dir.iterdir()) == []
    finally:
        job.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_the_death_of_rays_own_processes_ends_the_run_with_its_summary(
    part: str, tmp_path: Path, ray_dir: Path
) -> None:
    arguments = [*ENDLESS, "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path, RAY_TMPDIR=str(ray_dir))
    try:
        job.wait_for_step(tmp_path / "runs" / "quickstart", 1)
        pid = next(p for p, c in job.processes().items() if c.split()[0].endswith(f"/{part}"))
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == 1, job.output
        assert "Failed" in job.output
        assert f"Ray's process {part} has died" in job.output
        assert "Traceback" not in job.output, job.output
        assert job.left_behind() == {}
        assert list(ray_dir.iterdir()) == []
    finally:
        job.end()


def kill_first(job: Job, title: str) -> None:
    pid = next(pid for pid, name in job.processes().items() if name.startswith(title))
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_shard_that_dies_during_the_start_is_replaced(tmp_path: Path) -> None:
    arguments = [*SMALL_QUICKSTART, "--runs-dir", str(tmp_path / "runs")]
    job = start("recipes/quickstart.py", arguments, tmp_path)
    try:
        job.wait_for_output("Starting rollout-0")
        kill_first(job, "ray::StoreShard")
        assert job.wait() == 0, job.output
        started, _, _ = job.output.partition("tokens/s")
        died = re.findall(r"store shard store-\w+-(\d+) died", job.output)
        assert died == ["0"], job.output
        assert re.search(r"store shard store-\w+-0 died", started), "it was reported too late"
        assert "Traceback" not in job.output, job.output
        assert job.left_behind() == {}
    finally:
        job.end()


@pytest.mark.slow
def test_an_interrupt_at_any_moment_of_the_imports_is_one_line(tmp_path: Path) -> None:
    # The interrupt is sent when a module is imported.
    script = tmp_path / "recipe.py"
    for module in ("rlsys.config", "numpy", "torch", "ray"):
        script.write_text(
            "import importlib.abc, os, signal, sys\n"
            "class Finder(importlib.abc.MetaPathFinder):\n"
            "    def find_spec(self, name, path, target=None):\n"
            f"        if name == {module!r}:\n"
            "            os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.meta_path.insert(0, Finder())\n"
            "import recipes.quickstart\n"
            "recipes.quickstart.main()\n"
        )
        job = run(str(script), ["--runs-dir", str(tmp_path / "runs")], tmp_path)
        assert job.returncode == 130, (module, job.output)
        assert "Traceback" not in job.output, (module, job.output)
        assert len(job.output.splitlines()) <= 3, (module, job.output)
