"""Checks that this machine and environment can run rlsys.

    python scripts/doctor.py [--runs-dir runs]

Out: one line a check, ok, warn (it runs, with a limit) or fail, each of the latter with the fix.
Exit code 1 if something fails. Packages are imported in processes of their own, so that one that
crashes is a finding and not the end of the check.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30

# Importing vLLM compiles and probes; a cold disk makes it slow.
IMPORT_TIMEOUT_S = 180.0

# The quickstart's processes (driver, Ray, a replica, a trainer) need about 3 GiB in all.
MIN_MEMORY_GIB, GOOD_MEMORY_GIB = 2.0, 6.0
# Rollouts (cluster.store_gib) and two versions of the weights lie there. Docker's default is 64 MB.
MIN_SHM_GIB, GOOD_SHM_GIB = 0.25, 2.0
MIN_DISK_GIB, GOOD_DISK_GIB = 0.5, 10.0
SETUP = "bash scripts/setup.sh"

GOOD_OPEN_FILES = 4096  # Ray opens a few dozen per worker


@dataclass(frozen=True)
class Check:
    status: Literal["ok", "warn", "fail"]
    subject: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<5} {self.subject:<12} {self.found}"
        return f"{line}\n{'':<19}fix: {self.fix}" if self.fix else line


def check_python(version: tuple[int, int, int]) -> Check:
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Check("fail", "python", found, "rlsys needs Python 3.11 or newer: PYTHON=python3.11")
    return Check("ok", "python", found)


def check_pins(requirements: Sequence[str]) -> Iterator[Check]:
    """Installed versions against requirement strings such as "torch==2.13.0"."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Check("fail", "packaging", "not installed", SETUP)
        return
    for requirement in map(Requirement, requirements):
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Check("fail", requirement.name, "not installed", SETUP)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield Check("ok", requirement.name, version)
        else:
            found = f"{version}, tested with {requirement.specifier}"
            yield Check("fail", requirement.name, found, f"pip install '{requirement}'")


def check_import(
    subject: str, code: str, *, needed: bool, fix: str, timeout_s: float = IMPORT_TIMEOUT_S
) -> Check:
    """Run `code`, which imports something and prints a line about it."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Check("fail", subject, f"no answer within {timeout_s:g} s", fix)
    if ended.returncode == 0:
        return Check("ok", subject, (ended.stdout.strip().splitlines() or ["imports"])[-1])
    last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return Check("fail" if needed else "warn", subject, f"import fails: {last}", fix)


def check_amount(
    subject: str, gib: float, *, least: float, good: float, purpose: str, fix: str
) -> Check:
    found = f"{gib:.1f} GiB {purpose}"
    if gib < least:
        return Check("fail", subject, f"{found}, at least {least:g} needed", fix)
    if gib < good:
        return Check("warn", subject, f"{found}, enough for small models only", fix)
    return Check("ok", subject, found)


def check_port(port: int, purpose: str) -> Check:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    if taken:
        return Check(
            "warn",
            f"port {port}",
            f"in use: a Ray cluster, or another program ({purpose})",
            'join the cluster with --cluster.address auto, or end the program before "ray start"',
        )
    return Check("ok", f"port {port}", f"free ({purpose})")


def check_open_files(limit: int) -> Check:
    if limit < GOOD_OPEN_FILES:
        return Check("warn", "open files", f"limit {limit}", f"ulimit -n {GOOD_OPEN_FILES}")
    return Check("ok", "open files", f"limit {limit}")


def check_runs_dir(directory: Path) -> Check:
    try:
        from rlsys.run_directory import check_room
    except ImportError as error:
        return Check("fail", "runs", f"not checked: {error}", SETUP)
    try:
        check_room(directory, int(MIN_DISK_GIB * GIB))
    except ValueError as error:
        return Check("fail", "runs", str(error), "choose another --runs-dir")
    return check_amount(
        "runs",
        shutil.disk_usage(directory).free / GIB,
        least=MIN_DISK_GIB,
        good=GOOD_DISK_GIB,
        purpose=f"free, {directory} can be written",
        fix="free disk space, or choose another --runs-dir",
    )


def available_memory_bytes() -> int:
    """What processes can still take: the machine's, or the container's where that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # counts caches that give way
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int((group / "memory.current").read_text()))
    return free


TORCH = """
import torch
if torch.cuda.is_available():
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        print(f"{p.name}, {p.total_memory / 2**30:.0f} GiB", end="; ")
    print(f"{torch.cuda.device_count()} GPU(s)")
else:
    print(f"CPU, {torch.get_num_threads()} threads")
"""


def checks(runs_dir: Path) -> Iterator[Check]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield check_python(sys.version_info[:3])
    yield from check_pins(project["dependencies"])
    yield check_import("device", TORCH, needed=True, fix=SETUP)
    yield check_import("ray", "import ray; print('imports')", needed=True, fix=SETUP)
    yield check_import(
        "vllm",
        "import vllm; print(vllm.__version__)",
        needed=False,
        fix=f'{SETUP}; without it use rollout.engine="torch"',
    )
    yield check_amount(
        "memory",
        available_memory_bytes() / GIB,
        least=MIN_MEMORY_GIB,
        good=GOOD_MEMORY_GIB,
        purpose="available",
        fix="end other programs, or use a larger machine or container",
    )
    shm = Path("/dev/shm")
    if shm.is_dir():
        yield check_amount(
            "/dev/shm",
            shutil.disk_usage(shm).free / GIB,
            least=MIN_SHM_GIB,
            good=GOOD_SHM_GIB,
            purpose="free",
            fix="mount -o remount,size=4g /dev/shm, or docker run --shm-size=4g",
        )
    else:
        yield Check("warn", "/dev/shm", "missing; weights go through files on disk")
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_port(6379, "ray start --head")
    yield check_port(8265, "Ray's dashboard and job submission")
    yield check_runs_dir(runs_dir)


def report(results: Iterable[Check]) -> int:
    """Print each check as it ends; the exit code."""
    failed = 0
    for check in results:
        print(check, flush=True)
        failed += check.status == "fail"
    print(f"{failed} check(s) failed" if failed else "ready")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check that this machine can run rlsys.")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where runs will lie")
    return report(checks(parser.parse_args(arguments).runs_dir))


if __name__ == "__main__":
    sys.exit(main())
