"""Processes that share memory like vLLM's, and an owner that dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from rlsys.engines.generation.vllm.vllm_leftovers import (
    Leftovers,
    shared_files,
    unlink_shared_files,
)

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 300.0

# The resource tracker would die with its group.
SHARING = """
import sys, time
from multiprocessing import resource_tracker
resource_tracker.register = lambda *_: None
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
memory.buf[0] = 7
print(memory.name, flush=True)
sys.stdin.readline()
print(memory.buf[0], flush=True)
"""

OWNER = f"""
import subprocess, sys
from rlsys.engines.generation.vllm.vllm_leftovers import ProcessSupervisor
with ProcessSupervisor(sys.argv[1]):
    sharing = subprocess.Popen(
        [sys.executable, "-c", {SHARING!r}],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(sharing.pid, sharing.stdout.readline().strip(), flush=True)
    sys.stdin.readline()
print("started", flush=True)
sys.stdin.readline()
"""


def start_owner(directory: Path) -> tuple[subprocess.Popen[str], psutil.Process, Path]:
    """Start an owner; return it, the process that shares memory, and that memory's file."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    pid, name = owner.stdout.readline().split()
    return owner, psutil.Process(int(pid)), Path("/dev/shm", name)


def test_processes_of_a_dead_owner_are_cleaned_up(tmp_path: Path) -> None:
    owner, sharing, file = start_owner(tmp_path)
    leftovers = Leftovers(owner.pid)
    leftovers.update()
    assert shared_files([sharing]) == {file}
    os.killpg(owner.pid, signal.SIGKILL)  # like Ray, which kills the process group of a dead actor
    owner.wait(TIMEOUT_S)  # Python may unlink the file first
    leftovers.remove()
    assert not file.exists()


def test_a_process_that_outlives_its_owner_is_killed(tmp_path: Path) -> None:
    owner, sharing, file = start_owner(tmp_path)
    leftovers = Leftovers(owner.pid)
    leftovers.update()
    owner.kill()
    owner.wait(TIMEOUT_S)
    leftovers.remove()
    with contextlib.suppress(psutil.TimeoutExpired):  # a zombie, if orphans are not reaped
        sharing.wait(1)
    assert not sharing.is_running() or sharing.status() == psutil.STATUS_ZOMBIE
    assert not file.exists()


def test_the_supervisor_outlives_its_owners_group(tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    owner, _, file = start_owner(directory)
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait(TIMEOUT_S)
    deadline = time.monotonic() + TIMEOUT_S
    while directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # another process removes it at an unknown time
    file.unlink(missing_ok=True)  # created after the supervisor's last update


def test_a_successful_start_is_left_alone(tmp_path: Path) -> None:
    owner, sharing, file = start_owner(tmp_path)
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        owner.stdin.write("go on\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "started\n"
        assert file.exists()
        assert sharing.is_running()
        assert tmp_path.exists()
    finally:
        owner.kill()
        sharing.kill()
        owner.wait(TIMEOUT_S)
        file.unlink(missing_ok=True)


@pytest.fixture
def sharing() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SHARING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_unlinked_memory_is_usable_and_freed_with_its_users(
    sharing: subprocess.Popen[str],
) -> None:
    assert sharing.stdout is not None
    name = sharing.stdout.readline().strip()
    memory = SharedMemory(name=name)
    unlink_shared_files(os.getpid())
    assert not Path("/dev/shm", name).exists()
    assert memory.buf is not None
    memory.buf[0] = 8
    output, _ = sharing.communicate("\n", timeout=TIMEOUT_S)
    assert output == "8\n"
    memory.close()
