"""Restriction of file access with the kernel's Landlock (https://landlock.io).

In: open descriptors of paths to read, and one directory to write. Out: this process and its
children can open no other files, irrevocably. They still see whether other files exist,
and their size.
"""

from __future__ import annotations

import os
import stat
import struct

from rlsys.rewards.sandbox.inside import kernel_calls

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG, PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
OF_VERSION_1 = (1 << 13) - 1
BIND_TCP_AND_CONNECT_TCP = 3
ABSTRACT_SOCKETS_AND_SIGNALS = 3

READ = EXECUTE | READ_FILE | READ_DIR
WRITE = (
    WRITE_FILE | READ_FILE | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | TRUNCATE
)
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV


def version() -> int:
    """Return the version of the kernel's Landlock, or raise OSError if it has none."""
    return kernel_calls.syscall(CREATE_RULESET, None, 0, VERSION_FLAG)


def handled(of_version: int) -> int:
    """Return the rights over files that a Landlock of this version can restrict."""
    rights = OF_VERSION_1
    for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)):
        if of_version >= since:
            rights |= right
    return rights


def restrict(readable: list[int], writable_files: list[int], directory: int) -> None:
    """Restrict this process, or raise OSError. It needs no_new_privs or CAP_SYS_ADMIN."""
    known = version()
    rights = handled(known)
    attributes = struct.pack("=Q", rights)
    if known >= 4:
        attributes += struct.pack("=Q", BIND_TCP_AND_CONNECT_TCP)
    if known >= 6:
        attributes += struct.pack("=Q", ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = kernel_calls.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow(ruleset, path, READ & rights)
        for path in writable_files:
            _allow(ruleset, path, (READ_FILE | WRITE_FILE) & rights)
        _allow(ruleset, directory, WRITE & rights)
        kernel_calls.syscall(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: int, rights: int) -> None:
    if not stat.S_ISDIR(os.fstat(path).st_mode):
        rights &= OF_FILES
    rule = struct.pack("=Qi", rights, path)
    kernel_calls.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
