"""Ends what a local Ray leaves where its run was killed, at once and whatever state it is in.

Ray's own processes end with the run; those that they have started notice it seconds later, and one
that is stopped never does. A janitor is a process that waits for the death of the run, and then
kills whoever has a file of its Ray's directory open, which is every one of them, and removes that.
It has one open itself: where it was stopped too, the next run ends it with them.

This module is also the janitor's program; it takes no more than the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NUM_ROUNDS, ROUND_EVERY_S = 100, 0.1


@contextlib.contextmanager
def janitor(directory: Path, own_file: Path) -> Iterator[None]:
    """Have it wait for the death of this process while the block runs. `own_file`, below the
    directory, is what it is known by.
    """
    # In a session of its own, so that it outlives what ends a group of processes.
    with (
        own_file.open("rb") as opened,
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(directory)],
            stdin=opened,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield
        finally:
            process.kill()  # which ends a stopped one too


def clean_up_after(owner: int, directory: Path) -> None:
    """Wait for the owner's death first."""
    with contextlib.suppress(ProcessLookupError):
        death = select.poll()
        death.register(os.pidfd_open(owner), select.POLLIN)
        death.poll()
    for _ in range(NUM_ROUNDS):
        found = list(users_of(directory))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
        time.sleep(ROUND_EVERY_S)  # the dead ones' children may have been born meanwhile
    shutil.rmtree(directory, ignore_errors=True)


def users_of(directory: Path) -> Iterator[int]:
    """Processes that have a file below the directory open."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            # It may be another user's, or end at any moment.
            with contextlib.suppress(OSError):
                links = (os.readlink(descriptor) for descriptor in (entry / "fd").iterdir())
                if any(link.startswith(f"{directory}/") for link in links):
                    yield int(entry.name)


if __name__ == "__main__":
    # Meant for the owner, whose end it waits for.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    clean_up_after(int(sys.argv[1]), Path(sys.argv[2]))
