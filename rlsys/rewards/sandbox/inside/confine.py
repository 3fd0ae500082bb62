"""Restrictions of a forked process before it runs a program. They cannot be lifted again."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass

from rlsys.rewards.sandbox.inside import kernel_calls, landlock, seccomp

# Threads of one program. They cannot be counted for an ordinary user without namespaces.
MAX_THREADS = 64
MAX_OPEN_FILES = 64
MAX_FILES_IN_TMP, DISK_BYTES = 4096, 16 * 2**20  # in a program's own directory

# Address space of the interpreter and its libraries, before a program is loaded.
INTERPRETER_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of one program, in the units of their names."""

    timeout_s: float  # run time, and CPU time
    memory_bytes: int
    output_bytes: int  # of each written file, including stdout and stderr


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Settings of all programs of this fork server."""

    has_namespaces: bool
    is_root: bool  # and may become other users
    num_places: int
    first_uid: int
    readable: tuple[int, ...] = ()  # descriptors, without namespaces
    writable: tuple[int, ...] = ()
    is_hidden: bool = (
        False  # the interpreter is where other users have no access, such as below /root
    )


def confine(around: Surroundings, *, place: int, tmp: str, parent: int, num_open: int) -> None:
    """Restrict this process.

    Args:
        around: Settings of the fork server.
        place: Number of the process among those that exist, from 0.
        tmp: The program's own directory.
        parent: Pid of the fork server, or 0 in a pid namespace.
        num_open: Number of descriptors from 0 that stay open.

    Raises:
        OSError: A restriction failed, so no program may run.
    """
    os.setsid()
    uid = around.first_uid + place
    if around.has_namespaces:
        _own_tmp(tmp, uid if around.is_root else os.getuid())
    os.chdir(tmp)
    directory = os.open(tmp, os.O_PATH)
    if around.is_root:
        kernel_calls.prctl(kernel_calls.PR_SET_KEEPCAPS, 1)
        _become(uid)
    # With this one it can read what any user can. Landlock limits that to the readable files.
    kernel_calls.drop_capabilities(but=kernel_calls.CAP_DAC_READ_SEARCH if around.is_hidden else 0)
    kernel_calls.prctl(kernel_calls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the fork server has ended
    kernel_calls.prctl(kernel_calls.PR_SET_NO_NEW_PRIVS, 1)
    if not around.has_namespaces:
        landlock.restrict(list(around.readable), list(around.writable), directory)
    os.closerange(num_open, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    seccomp.install(seccomp.own_rules())


def _own_tmp(tmp: str, uid: int) -> None:
    flags = kernel_calls.MS_NOSUID | kernel_calls.MS_NODEV | kernel_calls.MS_NOEXEC
    options = f"mode=700,uid={uid},size={DISK_BYTES},nr_inodes={MAX_FILES_IN_TMP}"
    kernel_calls.mount("tmpfs", tmp, flags, options)


def limit(bounds: Bounds, around: Surroundings, *, num_open: int) -> None:
    """Set the limits of one program in a confined process, or raise OSError."""
    os.closerange(num_open, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    cpu_s = int(bounds.timeout_s) + 1
    limits = {
        resource.RLIMIT_AS: INTERPRETER_BYTES + bounds.memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: bounds.output_bytes,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if around.is_root:
        limits[resource.RLIMIT_NPROC] = MAX_THREADS  # no other process has its user
    elif around.has_namespaces:
        limits[resource.RLIMIT_NPROC] = MAX_THREADS * (around.num_places + 1)
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
