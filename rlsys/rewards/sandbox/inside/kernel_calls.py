"""System calls that Python does not offer."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

# This keeps the interpreter lock, which a call that returns in two processes needs.
_locked_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_locked_syscall.restype = ctypes.c_long

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 8, 22, 38
SECCOMP_MODE_FILTER = 2
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x20000, 0x8000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000

SYS_CLONE = {"x86_64": 56, "aarch64": 220}
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2


def syscall(number: int, *args: object) -> int:
    """Make a system call and return its result, or raise OSError."""
    return _checked(_syscall(ctypes.c_long(number), *map(_wide, args)))


def prctl(option: int, *args: object) -> None:
    """Call prctl, or raise OSError."""
    _checked(_libc.prctl(option, *map(_wide, args), *(ctypes.c_long(0),) * (4 - len(args))))


def mount(kind: str | None, target: str, flags: int, options: str = "") -> None:
    """Mount a file system, or raise OSError."""
    name = None if kind is None else kind.encode()
    _checked(_libc.mount(name, target.encode(), name, ctypes.c_ulong(flags), options.encode()))


def fork(flags: int, signal_at_end: int) -> int:
    """Fork with new namespaces. Return the pid of the child, and 0 in the child."""
    api = ctypes.pythonapi
    number = SYS_CLONE[os.uname().machine]
    nothing = ctypes.c_void_p(0)
    api.PyOS_BeforeFork()
    pid: int = _locked_syscall(
        ctypes.c_long(number), ctypes.c_ulong(flags | signal_at_end), *(nothing,) * 4
    )
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error), "clone")
    return pid


def drop_capabilities(*, but: int = 0) -> None:
    """Drop all capabilities of this thread except those of a mask, or raise OSError."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(but, but, 0, 0, 0, 0)  # effective, permitted, inheritable
    syscall(SYS_CAPSET[os.uname().machine], header, data)


def _wide(argument: object) -> object:
    """Return a number as a long: ctypes would set only the lower half of the register."""
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
