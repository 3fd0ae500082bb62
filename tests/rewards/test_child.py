"""The process of reward functions, when its supervisor goes away."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys.common import process_child

ROOT = Path(__file__).parents[2]
LOAD = pickle.dumps(
    {
        "path": [str(ROOT), *sys.path],
        "module": "rlsys.rewards.process.reward_service",
        "arguments": {"rewards": pickle.dumps(()), "concurrency": 1, "num_rows": 2},
    }
)
SENT = {
    "nothing": b"",
    "a part of what to load": struct.pack("<Q", len(LOAD)) + LOAD[:20],
    "what to load": struct.pack("<Q", len(LOAD)) + LOAD,
    "a call in part": struct.pack("<Q", len(LOAD)) + LOAD + struct.pack("<Q", 100) + b"half",
}


@pytest.mark.parametrize("sent", SENT)
def test_it_ends_quietly_at_any_moment(sent: str) -> None:
    ours, theirs = socket.socketpair()
    table = os.memfd_create("table")
    os.truncate(table, 4096)
    process = subprocess.Popen(
        [sys.executable, str(Path(process_child.__file__)), str(theirs.fileno()), str(table)],
        pass_fds=(theirs.fileno(), table),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    theirs.close()
    os.close(table)
    ours.sendall(SENT[sent])
    ours.close()
    output, _ = process.communicate(timeout=300)
    assert (process.returncode, output) == (0, b"")
