"""The processes of one trial, identified by a mark in their environment.

Everything that a trial starts inherits the mark: the recipe, Ray's nodes, actors and their
children. Several trials may run at once, and none touches the processes of another.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "RLSYS_CHAOS_MARK"

# Command lines of the parts that faults hit, by kind. Ray names an actor by its class and, after a
# dot, the method that it runs.
KINDS = {
    "rollout": re.compile(r"ray::RolloutActor\b"),
    "trainer": re.compile(r"ray::TrainerActor\b"),
    "reward": re.compile(r"ray::RewardActor\b"),
    "shard": re.compile(r"ray::\w*Shard\w*\b"),
    "keeper": re.compile(r"ray::\w*(Keeper|Snapshot)\w*\b"),
}

# Processes of a Ray node without a job.
RAY_ITSELF = re.compile(r"/ray/(core|_private|dashboard|autoscaler)/|ray::(IDLE|\w*Agent)\b")


@dataclass(frozen=True)
class Process:
    """A process, with its start time."""

    pid: int
    started: int  # clock ticks since boot; tells processes with a reused pid apart
    parent: int
    command: str

    @property
    def is_ray_itself(self) -> bool:
        """Return whether it belongs to a Ray node without a job."""
        return RAY_ITSELF.search(self.command) is not None

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return False if the process is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if _stat(self.pid)[1] != self.started:
                return False
            signal.pidfd_send_signal(descriptor, number)
        except (ProcessLookupError, FileNotFoundError):
            return False
        finally:
            os.close(descriptor)
        return True


def marked(mark: str) -> list[Process]:
    """Return every living process of a trial, in no particular order."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
                parent, started = _stat(pid)
                if command:
                    found.append(Process(pid, started, parent, command.decode(errors="replace")))
    return found


def of_kind(kind: str, mark: str) -> list[Process]:
    """Return the processes of a kind, sorted by pid."""
    return sorted(
        (p for p in marked(mark) if KINDS[kind].match(p.command)), key=lambda process: process.pid
    )


def below(pid: int, mark: str) -> list[Process]:
    """Return a process and all its descendants."""
    processes = {process.pid: process for process in marked(mark)}
    family, added = {pid}, True
    while added:
        more = {p.pid for p in processes.values() if p.parent in family} - family
        family, added = family | more, bool(more)
    return [processes[number] for number in family if number in processes]


def shared_files(mark: str) -> set[str]:
    """Return the files in /dev/shm that the trial's processes map or hold open."""
    found: set[str] = set()
    for process in marked(mark):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found.update(re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE))
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if target.startswith("/dev/shm/"):
                        found.add(target)
    return {path for path in found if not path.endswith(" (deleted)")}


def gone_within(mark: str, timeout_s: float, *, but_ray: bool) -> list[Process]:
    """Return the processes of a trial that are left after at most `timeout_s`.

    `but_ray` leaves Ray's nodes out.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = [p for p in marked(mark) if not (but_ray and p.is_ray_itself)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)  # no notification when a process is gone


def kill_all(mark: str) -> None:
    """Kill all processes of a trial."""
    while left := marked(mark):
        for process in left:
            process.send(signal.SIGKILL)
        time.sleep(0.05)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> tuple[int, int]:
    """Return the parent and the start in clock ticks since boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[1]), int(fields[19])
