"""Checks that this machine and environment can run rlsys.

In: the machine. Out: a `Check` for each part: ok, warn (runs work, with a limit) or fail, and how
to fix it. Each package is imported in its own process, so that a crash is a failed check. Nothing
is created.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

GIB = 2**30

# A checkout has a script that installs everything.
IS_CHECKOUT = (Path(__file__).parents[2] / "scripts" / "setup.sh").is_file()
SETUP = "bash scripts/setup.sh" if IS_CHECKOUT else "pip install --force-reinstall rlsys"
VLLM_SETUP = SETUP if IS_CHECKOUT else "pip install 'rlsys[gpu]' on a machine with a GPU"

# Importing vLLM compiles and probes; a cold disk makes it slow.
IMPORT_TIMEOUT_S = 180.0

# The processes of the quickstart (driver, Ray, a replica, a trainer) need about 3 GiB together.
MIN_MEMORY_GIB, GOOD_MEMORY_GIB = 2.0, 6.0
# vLLM's queues between its processes take 0.25 GiB per rank. Docker's default is 64 MB.
GOOD_SHM_GIB = 0.5
MIN_DISK_GIB, GOOD_DISK_GIB = 0.5, 10.0

MIN_OPEN_FILES, GOOD_OPEN_FILES = 256, 4096  # Ray opens a few dozen per worker


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    found: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<5} {self.subject:<12} {self.found}"
        return f"{line}\n{'':<19}fix: {self.fix}" if self.fix else line


def check_python(version: tuple[int, int, int]) -> Check:
    """Check the version of Python."""
    found = ".".join(map(str, version))
    if version < (3, 11):
        return Check("fail", "python", found, "rlsys needs Python 3.11 or newer: PYTHON=python3.11")
    return Check("ok", "python", found)


def dependencies() -> list[str]:
    """Return the requirements of the installed rlsys without those of its extras."""
    try:
        found = metadata.requires("rlsys") or []
    except metadata.PackageNotFoundError:
        return ["rlsys"]  # reported as not installed
    return [one for one in found if "extra ==" not in one]


def check_pins(requirements: Sequence[str]) -> Iterator[Check]:
    """Check the installed versions against requirements such as "torch==2.13.0"."""
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
    """Run `code`, which imports a package and prints a line about it, in a process."""
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
    """Check that an amount of memory or disk space is at least `least`, better `good`."""
    found = f"{gib:.1f} GiB {purpose}"
    if gib < least:
        return Check("fail", subject, f"{found}, at least {least:g} needed", fix)
    if gib < good:
        return Check("warn", subject, f"{found}, enough for small models only", fix)
    return Check("ok", subject, found)


# Ports of a cluster's head node, their purpose, and the option of `ray start` that changes them.
PORTS = (
    (6379, "ray start --head", "--port"),
    (8265, "Ray's dashboard and job submission", "--dashboard-port"),
    (52365, "Ray's agent, which job submission needs", "--dashboard-agent-listen-port"),
    (10001, "Ray's client server", "--ray-client-server-port"),
)


LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def check_port(port: int, purpose: str, option: str = "--port") -> Check:
    """Check that a port is free on 127.0.0.1 and ::1. A run on this machine alone needs none."""
    if any(_is_used(family, host, port) for family, host in LOOPBACK):
        return Check(
            "warn",
            f"port {port}",
            f"in use by a Ray cluster or another program ({purpose})",
            "join the cluster with --cluster.address auto, end the program, or choose another "
            f"port: ray start --head {option}=PORT",
        )
    return Check("ok", f"port {port}", f"free ({purpose})")


def _is_used(family: socket.AddressFamily, host: str, port: int) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((host, port)) == 0
    except OSError:  # the machine has no IPv6
        return False


def check_open_files(limit: int) -> Check:
    """Check the limit on open files."""
    if limit < GOOD_OPEN_FILES:
        status: Literal["warn", "fail"] = "fail" if limit < MIN_OPEN_FILES else "warn"
        return Check(status, "open files", f"limit {limit}", f"ulimit -n {GOOD_OPEN_FILES}")
    return Check("ok", "open files", f"limit {limit}")


def check_runs_dir(directory: Path) -> Check:
    """Check that runs can be written to a directory, which is not created."""
    try:
        from rlsys.runs.run_directory import check_room
    except ImportError as error:
        return Check("fail", "runs", f"not checked: {error}", SETUP)
    fix = "choose another --runs-dir"
    try:
        existing = _existing_part(directory)
        if not existing.is_dir():
            return Check("fail", "runs", f"{existing} is not a directory", fix)
        if os.statvfs(existing).f_flag & os.ST_RDONLY:
            return Check("fail", "runs", f"{existing} is on a read-only file system", fix)
        check_room(existing, int(MIN_DISK_GIB * GIB))
        free = shutil.disk_usage(existing).free
    except (OSError, ValueError) as error:
        return Check("fail", "runs", str(error), fix)
    return check_amount(
        "runs",
        free / GIB,
        least=MIN_DISK_GIB,
        good=GOOD_DISK_GIB,
        purpose=f"free, {directory} can be written",
        fix=f"free disk space, or {fix}",
    )


def _existing_part(path: Path) -> Path:
    """Return the path, or the closest of its parents that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if os.path.lexists(one))


def check_memory() -> Check:
    """Check the memory that this machine or container has left."""
    try:
        from rlsys.common.available_memory import available_bytes
    except ImportError as error:
        return Check("fail", "memory", f"not checked: {error}", SETUP)
    return check_amount(
        "memory",
        available_bytes() / GIB,
        least=MIN_MEMORY_GIB,
        good=GOOD_MEMORY_GIB,
        purpose="available",
        fix="end other programs, or use a larger machine or container",
    )


def check_shared_memory(directory: Path) -> Check:
    """Check the shared memory for vLLM. Rollouts and weights need none of it."""
    if not directory.is_dir():
        return Check("warn", "/dev/shm", "missing; rollout.engine=vllm does not start without it")
    free_gib = shutil.disk_usage(directory).free / GIB
    if free_gib < GOOD_SHM_GIB:
        return Check(
            "warn",
            "/dev/shm",
            f"{free_gib:.1f} GiB free, too little for the queues of vLLM's processes",
            "mount -o remount,size=2g /dev/shm, or docker run --shm-size=2g, or --rollout.engine "
            "torch",
        )
    return Check("ok", "/dev/shm", f"{free_gib:.1f} GiB free")


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


# Reward functions have their own process, and so does this check.
SANDBOX = """
from rlsys import sandbox
assert sandbox.run_sync("print(1)", timeout_s=60).stdout == "1\\n"
found = "programs: " + sandbox.way()
try:
    assert sandbox.python_sync("1 + 1") == "2"
    found += "; snippets of Python work"
except sandbox.SandboxUnavailable:
    found += "; snippets of Python need pip install 'rlsys[sandbox]'"
print(found)
"""
SANDBOX_FIX = (
    "install the extra (pip install 'rlsys[sandbox]'); allow user namespaces (sysctl -w "
    "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0, or docker "
    "run --cap-add SYS_ADMIN --security-opt seccomp=unconfined), or boot Linux 5.13 or newer with "
    "landlock in lsm=; without it the code_tests reward and the sandbox refuse to run anything"
)


def checks(runs_dir: Path) -> Iterator[Check]:
    """Run all checks and yield each result."""
    yield check_python(sys.version_info[:3])
    yield from check_pins(dependencies())
    yield check_import("device", TORCH, needed=True, fix=SETUP)
    yield check_import("ray", "import ray; print('imports')", needed=True, fix=SETUP)
    yield check_import(
        "vllm",
        "import vllm; print(vllm.__version__)",
        needed=False,
        fix=f'{VLLM_SETUP}; without it use rollout.engine="torch"',
    )
    yield check_import("sandbox", SANDBOX, needed=False, fix=SANDBOX_FIX)
    yield check_memory()
    yield check_shared_memory(Path("/dev/shm"))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from (check_port(*port) for port in PORTS)
    yield check_runs_dir(runs_dir)
