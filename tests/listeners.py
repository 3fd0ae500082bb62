"""Who listens where; and a machine whose name resolves to another address than 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

# 127.0.0.1, ::ffff:127.0.0.1 and ::1
LOOPBACK = {
    "0100007F",
    "0000000000000000FFFF00000100007F",
    "00000000000000000000000001000000",
}


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """(address as in /proc/net, process) of each socket on which one of the processes listens."""
    owners = {}
    for pid in pids:
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                owners[os.readlink(descriptor)] = pid
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, _, state, inode = (line.split()[i] for i in (1, 2, 3, 9))
            is_open = state == "0A" if table.startswith("tcp") else state == "07"
            if is_open and f"socket:[{inode}]" in owners:
                found.add((local.partition(":")[0], owners[f"socket:[{inode}]"]))
    return found


def named_elsewhere(*command: str) -> list[str]:
    """The command that runs `command` in a namespace where this machine is called 127.0.0.2, which
    is not 127.0.0.1 though nobody else reaches it. Skips the test where that is not allowed."""
    if shutil.which("unshare") is None or shutil.which("hostname") is None:
        pytest.skip("this needs unshare and hostname")
    prefix = ["unshare", "--map-root-user", "--uts", "sh", "-c", 'hostname 127.0.0.2 && exec "$@"']
    tried = subprocess.run([*prefix, "sh", "true"], capture_output=True, text=True, timeout=300)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr}")
    return [*prefix, "sh", *command]
