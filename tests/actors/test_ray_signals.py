"""A signal during the start of Ray ends the start cleanly, whichever handlers are installed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Ray's core has just installed its handlers, and Python's are not back yet.
PROGRAM = """
import asyncio, os, signal, sys
from ray._private import worker
from actors.cluster.local_ray import local_ray
from actors.cluster.signals import cancel_on_signals

real = worker.connect
def connect(*args, **named):
    real(*args, **named)
    os.kill(os.getpid(), int(sys.argv[1]))
worker.connect = connect

async def main():
    cancel_on_signals()
    with local_ray(1):
        print("started", flush=True)

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("cancelled", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_rays_own_handlers_ends_the_start(number: signal.Signals) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.stdout, ended.returncode) == ("cancelled\n", 0), ended.stderr
    assert "SIGTERM" not in ended.stderr
    assert "@" not in ended.stderr  # frames of a C++ stack trace
