"""Clean up after a local Ray whose run was killed.

Ray's own processes end with the run. Processes that they have started notice it seconds later, and
a suspended one never does. A janitor is a process that waits for the death of the run, kills every
process that has a file of the Ray directory open, and removes the directory. It has a file of the
directory open itself, so that the next run ends a suspended janitor too.

This module is also the janitor's program; it uses only the standard library.
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
    """Run a janitor that waits for the death of this process while the block runs.

    `own_file` is a file below the directory, which the janitor keeps open.
    """
    # In its own session, so that it survives a signal to this process group.
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
            process.kill()  # ends a suspended process too


def clean_up_after(owner: int, directory: Path) -> None:
    """Wait for the death of `owner`, then kill its processes and remove the directory."""
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
        time.sleep(ROUND_EVERY_S)  # killed processes may have started children in the meantime
    shutil.rmtree(directory, ignore_errors=True)


def users_of(directory: Path) -> Iterator[int]:
    """Yield the processes that have a file below the directory open."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            # The process may belong to another user or end at any moment.
            with contextlib.suppress(OSError):
                links = (os.readlink(descriptor) for descriptor in (entry / "fd").iterdir())
                if any(link.startswith(f"{directory}/") for link in links):
                    yield int(entry.name)


if __name__ == "__main__":
    # These signals are meant for the owner.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    clean_up_after(int(sys.argv[1]), Path(sys.argv[2]))
