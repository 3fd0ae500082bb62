from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from actors.cluster import local_ray
from rlsys.commands.doctor_command import report
from rlsys.commands.machine_checks import (
    Check,
    check_amount,
    check_import,
    check_memory,
    check_open_files,
    check_pins,
    check_port,
    check_python,
    check_runs_dir,
    check_shared_memory,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_bad_directory_for_runs_fails_the_whole_check(tmp_path: Path) -> None:
    """The real program on this machine; /dev/null is not a directory."""
    ended = subprocess.run(
        [sys.executable, "-m", "rlsys", "doctor", "--runs-dir", "/dev/null/runs"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = ended.stdout.splitlines()
    found = {line[6:18].strip(): line.split()[0] for line in lines if not line.startswith(" ")}
    assert found["runs"] == "fail"
    assert {found[name] for name in ("python", "torch", "ray", "device")} == {"ok"}
    assert "fix: choose another --runs-dir" in ended.stdout
    assert ended.returncode == 1, ended.stderr


def test_exit_code_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    good = [Check("ok", "python", "3.11.7"), Check("warn", "memory", "3.0 GiB", "buy more")]
    assert report(good) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok    python       3.11.7",
        "warn  memory       3.0 GiB",
        "                   fix: buy more",
        "ready",
    ]
    assert report([*good, Check("fail", "ray", "import fails", "set up")]) == 1
    assert capsys.readouterr().out.endswith("1 check(s) failed\n")


def test_python_versions() -> None:
    assert check_python((3, 10, 14)).status == "fail"
    assert check_python((3, 11, 0)).status == "ok"


def test_versions_against_pins() -> None:
    pins = ["torch==2.13.0", "rich<2", "rich>=1", "no-such-package-of-ours"]
    found = [(check.subject, check.status) for check in check_pins(pins)]
    assert found == [
        ("torch", "ok"),  # 2.13.0+cpu is the same version
        ("rich", "fail"),
        ("rich", "ok"),
        ("no-such-package-of-ours", "fail"),
    ]


def test_an_import_that_fails_crashes_or_hangs_is_a_finding() -> None:
    def check(code: str, *, needed: bool = True, timeout_s: float = 60.0) -> Check:
        return check_import("x", code, needed=needed, fix="set up", timeout_s=timeout_s)

    assert check("print('noise'); print('1.0')") == Check("ok", "x", "1.0")
    missing = check("import no_such_module")
    assert (missing.status, missing.fix) == ("fail", "set up")
    assert "No module named 'no_such_module'" in missing.found
    assert check("import no_such_module", needed=False).status == "warn"
    assert check("import os; os.abort()").found == "import fails: exit code -6"
    assert check("input()", needed=False).status == "warn"  # nothing waits for the keyboard
    hangs = check("import threading; threading.Event().wait()", timeout_s=0.5)
    assert (hangs.status, hangs.found) == ("fail", "no answer within 0.5 s")


@pytest.mark.parametrize(
    ("gib", "status"), [(0.9, "fail"), (1.0, "warn"), (3.9, "warn"), (4.0, "ok")]
)
def test_amounts(gib: float, status: str) -> None:
    check = check_amount("memory", gib, least=1, good=4, purpose="available", fix="more")
    assert check.status == status


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_port_is_seen_on_each_loopback_address(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        server.listen()
        port = server.getsockname()[1]
        assert check_port(port, "x").status == "warn"
    assert check_port(port, "x").status == "ok"


def test_open_files() -> None:
    assert check_open_files(1024).fix == "ulimit -n 4096"
    assert check_open_files(4096).status == "ok"
    assert check_open_files(local_ray.MIN_OPEN_FILES).status == "warn"  # a run starts
    assert check_open_files(local_ray.MIN_OPEN_FILES - 1).status == "fail"


def test_a_missing_directory_for_runs_is_not_created(tmp_path: Path) -> None:
    assert check_runs_dir(tmp_path / "a" / "runs").status in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_a_directory_for_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "runs"):
        check = check_runs_dir(path)
        assert (check.status, check.found) == ("fail", f"{tmp_path}/file is not a directory")


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = list(os.statvfs(tmp_path))
    fields[8] |= os.ST_RDONLY  # f_flag
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    check = check_runs_dir(tmp_path)
    assert (check.status, "read-only" in check.found) == ("fail", True)


def test_memory() -> None:
    assert check_memory().subject == "memory"
    assert check_memory().found.endswith("GiB available")


def test_shared_memory_is_only_needed_for_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_shared_memory(tmp_path / "none").status == "warn"
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**26, 0, 2**26))
    assert check_shared_memory(tmp_path).found.startswith("0.1 GiB free,")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**30, 0, 2**30))
    assert check_shared_memory(tmp_path).status == "ok"
