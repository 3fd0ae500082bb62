"""Cleanup of shared memory that vLLM's processes create.

vLLM's processes share queues and locks as files in /dev/shm, and remove them only on an orderly
exit. So their names are unlinked as soon as all processes have opened them; the kernel then frees
the memory with the last process. Until then a supervisor process waits for the death of the owner,
kills the processes that the owner started and removes their files.

    with ProcessSupervisor(directory):
        start vLLM, run a first request
        unlink_shared_files(owner)
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import psutil

SHARED_MEMORY = Path("/dev/shm")
# A file that is created and opened between two updates, and whose owner dies meanwhile, would stay.
UPDATE_EVERY_S = 0.2


def shared_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files in shared memory that the processes have mapped and that have a name."""
    mapped = set()
    for process in processes:
        # The process may end at any moment.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                # maps has the original name, which a semaphore's file may no longer have.
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                    mapped.add(int(fields[4]))
    with os.scandir(SHARED_MEMORY) as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in mapped}


def unlink_shared_files(owner: int) -> None:
    """Unlink the shared files of all processes that `owner` has started."""
    for path in shared_files(psutil.Process(owner).children(recursive=True)):
        path.unlink(missing_ok=True)


class ProcessSupervisor:
    """Process that cleans up if the owner dies while vLLM starts, within the block.

    `directory` has vLLM's sockets.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        # Not a child, in a session of its own: signals to the owner's processes do not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), self._directory],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def watch(owner: int, directory: str) -> None:
    """Wait until standard input ends, which happens when the block ends or the owner dies.

    If it died, kill what it started and remove what that left.
    """
    try:
        leftovers, owner_end = Leftovers(owner), os.pidfd_open(owner)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
    poll = select.poll()
    poll.register(owner_end, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    leftovers.update()
    while not poll.poll(1000 * UPDATE_EVERY_S):
        leftovers.update()
    if _has_ended(owner_end):
        leftovers.remove()
        shutil.rmtree(directory, ignore_errors=True)


class Leftovers:
    """Processes that an owner has started, and their files."""

    def __init__(self, owner: int) -> None:
        self._owner = psutil.Process(owner)
        self._started: set[psutil.Process] = set()
        self._files: set[Path] = set()

    def update(self) -> None:
        """Add new processes and files."""
        for process in [self._owner, *self._started]:  # the parent of some may be dead
            with contextlib.suppress(psutil.NoSuchProcess):
                self._started.update(process.children(recursive=True))
        self._started.discard(psutil.Process())  # the supervisor is a child for a moment
        self._files |= shared_files(self._started)

    def remove(self) -> None:
        """Kill the processes and remove the files."""
        self.update()
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for path in self._files:
            path.unlink(missing_ok=True)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    # A dying process closes its files slightly before its pidfd signals.
    return bool(poll.poll(1000))


if __name__ == "__main__":
    # These signals are meant for the owner, whose end this process waits for.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        watch(int(sys.argv[1]), sys.argv[2])
