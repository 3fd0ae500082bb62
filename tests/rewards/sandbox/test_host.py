"""Start, loss and end of the fork server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlsys.rewards import sandbox
from rlsys.rewards.sandbox import fork_server_client as hosts
from rlsys.rewards.sandbox import isolation_levels
from rlsys.rewards.sandbox.fork_server_client import (
    ForkServerClient,
    SandboxFailed,
    SandboxUnavailable,
)
from rlsys.rewards.sandbox.inside import landlock
from rlsys.rewards.sandbox.isolation_levels import has_user
from rlsys.rewards.sandbox.programs import job, limits

ROOT = Path(__file__).parents[3]


def until(found: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_fork_server_that_dies_fails_its_programs_and_is_replaced(way: str) -> None:
    host = ForkServerClient([way])  # type: ignore[list-item]
    (future,) = host.submit(job("import time; time.sleep(60)", "", limits(60, 64, 1)))
    server = psutil.Process(host.pid)
    until(lambda: len(server.children(recursive=True)) >= 1 + (way == "namespaces"))
    processes = [server, *server.children(recursive=True)]
    for process in processes[:2]:  # bubblewrap and the server
        if process.is_running():
            process.send_signal(signal.SIGKILL)
    with pytest.raises(SandboxFailed):
        future.result(60)
    for process in processes:
        until(lambda pid=process.pid: has_ended(pid))  # type: ignore[misc]
    until(lambda: host.has_ended)
    assert way == "namespaces" or not Path(host.tmp).exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "_of_this_process", host)
        assert sandbox.run_sync("print(1)").stdout == "1\n"
        hosts.host().close()


USER = """
import sys
from rlsys.rewards import sandbox
from rlsys.rewards.sandbox import fork_server_client as hosts
hosts._of_this_process = host = hosts.ForkServerClient([sys.argv[1]])
(future,) = host.submit(hosts.ProgramJob(program=b"import time; time.sleep(600)", stdin=b"",
    bounds=hosts.Bounds(timeout_s=600, memory_bytes=2**26, output_bytes=2**16)))
sandbox.run_sync("print(1)")
print(host.pid, host.tmp, flush=True)
if sys.argv[2] == "wait":
    future.result()
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_nothing_is_left_after_the_end_of_its_client(way: str, how: str) -> None:
    user = subprocess.Popen(
        [sys.executable, "-c", USER, way, "wait" if how == "killed" else "end"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    line = user.stdout.readline()
    pid, tmp = int(line.split()[0]), Path(line.split()[1])
    if how == "killed":
        user.send_signal(signal.SIGKILL)
    user.wait(60)
    until(lambda: has_ended(pid))
    if way == "landlock":  # with namespaces the directory is not visible here
        until(lambda: not tmp.exists())


def test_a_forked_process_starts_its_own(way: str) -> None:
    before = hosts.host()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, sandbox.run_sync("print(2)").stdout.encode())
        os._exit(0)
    assert os.read(read, 10) == b"2\n"
    os.waitpid(pid, 0)
    assert sandbox.run_sync("print(1)").stdout == "1\n"
    assert hosts.host() is before


def test_a_machine_without_isolation_gets_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_landlock() -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(landlock, "version", no_landlock)
    monkeypatch.setattr(isolation_levels, "bubblewrap", lambda: None)
    with pytest.raises(SandboxUnavailable) as found:
        ForkServerClient()
    message = str(found.value)
    assert "pip install 'rlsys[sandbox]'" in message
    assert "Linux 5.13 or newer" in message
    monkeypatch.setattr(isolation_levels, "bubblewrap", lambda: "/bin/false")
    with pytest.raises(SandboxUnavailable) as found:
        ForkServerClient()
    assert "kernel.unprivileged_userns_clone=1" in str(found.value)


OTHERS_FILE = """
import sys
from rlsys.rewards import sandbox
from rlsys.rewards.sandbox import fork_server_client as hosts
hosts._of_this_process = hosts.ForkServerClient([sys.argv[1]])
print(sandbox.run_sync("print(1)").stdout, end="")
print(sandbox.run_sync("open('/etc/shadow')").exit_code)
"""


@pytest.mark.parametrize("one_way", ["namespaces", "landlock"])
def test_a_container_without_other_users_can_isolate(one_way: str) -> None:
    """A container of an unprivileged user may have a single user, who is root in it."""
    only_root = ["unshare", "--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*only_root, "true"]).returncode:
        pytest.skip("this machine has no user namespaces")
    found = subprocess.run(
        [*only_root, sys.executable, "-c", OTHERS_FILE, one_way],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.stdout == "1\n1\n", found.stderr


def test_the_users_of_a_user_namespace_are_known(tmp_path: Path) -> None:
    uid_map = tmp_path / "uid_map"
    uid_map.write_text("         0     100000      65536\n     70000       1000          1\n")
    users = [uid for uid in (0, 65535, 65536, 70000, 70001) if has_user(uid, uid_map)]
    assert users == [0, 65535, 70000]


def test_a_sandbox_that_does_not_isolate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "TRIAL", b"print('I read /etc/passwd')")
    with pytest.raises(SandboxUnavailable) as found:
        ForkServerClient()
    assert "I read /etc/passwd" in str(found.value)
