"""Seccomp filter: the system calls that a program in the sandbox may not make.

In: the architecture of the machine and the program's pid. Out: a program of the kernel's packet
filter, which the kernel runs before each system call. A refused call fails with EPERM and the
program continues. A call that is newer than this list fails with ENOSYS.

A program may start threads, but no processes and no other programs. So its limits of memory and CPU
time cover everything that it does, and nothing is left after its end.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping

from rlsys.rewards.sandbox.inside import kernel_calls

# (x86_64, aarch64); None: the architecture has no such call.
REFUSED: Mapping[str, tuple[int | None, int | None]] = {
    # Processes and programs.
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    # The network, including named unix sockets. Socket pairs are allowed.
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Other processes: signals, memory, priorities.
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Memory and messages outside the process, which its limits do not count.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # Owners, modes and times of files, which Landlock does not protect.
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "truncate": (76, 45),
    # Namespaces, mounts, and parts of the kernel with a history of vulnerabilities.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "iopl": (172, None),
    "ioperm": (173, None),
}
# Allowed with some values of the first argument.
CLONE, KILL, TGKILL, PRLIMIT, PRCTL = (56, 220), (62, 129), (234, 131), (302, 261), (157, 167)
# The C library then falls back to clone, whose flags a filter can read.
CLONE3 = 435
FIRST_UNKNOWN = 451

CLONE_THREAD = 0x10000

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS

Instruction = tuple[int, int, int, int]  # code, places to jump if true, if false, value


def rules(machine: str, pid: int) -> list[Instruction]:
    """Return the filter, or raise ValueError for an unknown architecture."""
    if machine not in ARCHITECTURES:
        raise ValueError(
            f"the sandbox does not know the system calls of {machine}. It runs on "
            f"{' and '.join(ARCHITECTURES)}."
        )
    which, architecture = ARCHITECTURES[machine]
    found: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),  # a call with the numbers of another architecture
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, FIRST_UNKNOWN),  # including those of x32
        (RETURN, 0, 0, UNKNOWN),
        (EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, UNKNOWN),
    ]
    for numbers in REFUSED.values():
        number = numbers[which]
        if number is not None:
            found += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    found += _allowed_if(CLONE[which], (ANY_BIT, CLONE_THREAD))
    found += _allowed_if(KILL[which], (EQUAL, pid))
    found += _allowed_if(TGKILL[which], (EQUAL, pid))
    found += _allowed_if(PRLIMIT[which], (EQUAL, 0), (EQUAL, pid))
    found += [
        (EQUAL, 0, 4, PRCTL[which]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 0, 1, kernel_calls.PR_SET_PDEATHSIG),  # it must end with its parent
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    return [*found, (RETURN, 0, 0, ALLOW)]


def _allowed_if(number: int, *tests: tuple[int, int]) -> list[Instruction]:
    """Allow a call if its first argument passes one of the tests."""
    inner: list[Instruction] = [(LOAD, 0, 0, FIRST_ARGUMENT)]
    for code, value in tests:
        inner += [(code, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    inner.append((RETURN, 0, 0, REFUSE))
    return [(EQUAL, 0, len(inner), number), *inner]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install(instructions: list[Instruction]) -> None:
    """Install the filter in this process irrevocably, or raise OSError."""
    packed = b"".join(struct.pack("=HBBI", *one) for one in instructions)
    program = _Program(len(instructions), packed)
    kernel_calls.prctl(kernel_calls.PR_SET_NO_NEW_PRIVS, 1)
    kernel_calls.prctl(
        kernel_calls.PR_SET_SECCOMP, kernel_calls.SECCOMP_MODE_FILTER, ctypes.byref(program)
    )


def own_rules() -> list[Instruction]:
    """Return the filter for this process."""
    return rules(os.uname().machine, os.getpid())
