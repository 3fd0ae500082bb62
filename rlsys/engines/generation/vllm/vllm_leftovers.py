"""What vLLM's processes would leave behind in shared memory, and how nothing of it stays.

vLLM's processes share queues and locks as files in /dev/shm, and count on an orderly end to remove
them. So their names are taken away as soon as all of them have opened what they need; from then on
the kernel frees the memory with the last of them. Until then a watchman waits for the death of
their owner, ends what the owner had started and removes what that had opened.

    with Watchman(directory):
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
# A file that is made and opened, and whose owner dies, all between two looks, would stay.
LOOK_EVERY_S = 0.2


def shared_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """The files in shared memory that the processes have mapped and that still have a name."""
    mapped = set()
    for process in processes:
        # It may end at any moment.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                # The name stands there as it was at first, which a semaphore's is not any more.
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                    mapped.add(int(fields[4]))
    with os.scandir(SHARED_MEMORY) as entries:
        return {Path(entry.path) for entry in entries if entry.inode() in mapped}


def unlink_shared_files(owner: int) -> None:
    """Take the names away from what the processes have opened that `owner` has started."""
    for path in shared_files(psutil.Process(owner).children(recursive=True)):
        path.unlink(missing_ok=True)


class ProcessSupervisor:
    """For the time in which vLLM starts, with `directory` for its sockets; ends with the block, or
    when its work is done.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        # Nobody's child, and in no group of the owner's: whatever ends these spares it.
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
    """Until standard input ends, which it does when the owner says so or dies; in the latter case
    end what the owner had started, and remove what that has left.
    """
    try:
        leftovers, owner_end = Leftovers(owner), os.pidfd_open(owner)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
    poll = select.poll()
    poll.register(owner_end, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    leftovers.look()
    while not poll.poll(1000 * LOOK_EVERY_S):
        leftovers.look()
    if _has_ended(owner_end):
        leftovers.remove()
        shutil.rmtree(directory, ignore_errors=True)


class Leftovers:
    """What has been seen of the processes that an owner has started, and of their files."""

    def __init__(self, owner: int) -> None:
        self._owner = psutil.Process(owner)
        self._started: set[psutil.Process] = set()
        self._files: set[Path] = set()

    def look(self) -> None:
        for process in [self._owner, *self._started]:  # whose owner may be dead by now
            with contextlib.suppress(psutil.NoSuchProcess):
                self._started.update(process.children(recursive=True))
        self._started.discard(psutil.Process())  # the watchman, a child for its first moments
        self._files |= shared_files(self._started)

    def remove(self) -> None:
        self.look()
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for path in self._files:
            path.unlink(missing_ok=True)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    # A dying process closes its files a little before it counts as dead.
    return bool(poll.poll(1000))


if __name__ == "__main__":
    # Meant for the owner, whose end it waits for.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        watch(int(sys.argv[1]), sys.argv[2])
