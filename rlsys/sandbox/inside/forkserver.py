"""The fork server: an interpreter that waits in the sandbox, and forks for each program.

    rlsys ──► limits, descriptors of program, input, output, errors ──► fork ──► confine ──► program
          ◄── how it ended

The process that runs a program is new, with namespaces of its own where there are any, and runs
nothing else. This one never reads a program, its input or what it writes; those lie in files in
memory that only the two ends have. It ends when the socket closes, and what it has started with it.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from rlsys.sandbox.inside import confine, kernel, program

MAX_MESSAGE_BYTES = 1 << 16
MAX_DESCRIPTORS = 5
MAX_OPEN_FILES = 4096
# Between looks at the files of running programs, where no file system bounds them.
LOOK_EVERY_S = 0.05

# Loaded once, for all programs: what most of them import.
PRELOADED = """
    abc array ast bisect cmath collections contextlib copy ctypes dataclasses datetime decimal
    enum fractions functools hashlib heapq inspect io itertools json linecache math numbers
    operator random re statistics string struct textwrap threading time traceback types typing
    rlsys.sandbox.inside.examiner rlsys.sandbox.inside.subject
""".split()  # noqa: SIM905, they are words


@dataclass(kw_only=True)
class Running:
    number: int
    pid: int
    pidfd: int
    place: int
    tmp: str
    confined: int  # a pipe that says whether the program began, or why not
    began_s: float
    deadline_s: float
    disk_bytes: int
    reason: str = "ended"


class ForkServer:
    def __init__(self, control: socket.socket, around: confine.Surroundings, tmp: str) -> None:
        self._control = control
        self._around = around
        self._tmp = tmp  # of all programs, or the directory that holds those of each
        self._running: dict[int, Running] = {}  # by pidfd
        self._free = list(range(around.num_places))
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def serve(self) -> None:
        """Until the socket closes."""
        while True:
            for fd, _ in self._poller.poll(self._wait_ms()):
                if fd != self._control.fileno():
                    self._tell_end(self._running.pop(fd))
                elif not self._receive():
                    return
            self._look()

    def end(self) -> None:
        """Kill what runs, and leave nothing."""
        for one in self._running.values():
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
            if not self._around.has_namespaces:
                _remove(one.tmp)
        if not self._around.has_namespaces:
            os.rmdir(self._tmp)

    def _wait_ms(self) -> int | None:
        if not self._running:
            return None
        wait_s = min(one.deadline_s for one in self._running.values()) - time.monotonic()
        if not self._around.has_namespaces:
            wait_s = min(wait_s, LOOK_EVERY_S)
        return max(0, int(wait_s * 1000) + 1)

    def _look(self) -> None:
        now_s = time.monotonic()
        for one in self._running.values():
            if now_s >= one.deadline_s:
                self._kill(one, "time")
            elif not self._around.has_namespaces and _num_bytes(one.tmp) > one.disk_bytes:
                self._kill(one, "disk")

    def _kill(self, one: Running, reason: str) -> None:
        if one.reason == "ended":
            one.reason = reason
        one.deadline_s = time.monotonic() + 1.0  # look again
        os.kill(one.pid, signal.SIGKILL)

    def _receive(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            return False
        told: dict[str, Any] = json.loads(message)
        if "kill" in told:
            for one in self._running.values():
                if one.number == told["kill"]:
                    self._kill(one, "killed")
            return True
        try:
            self._start(told["run"], confine.Bounds(**told["bounds"]), fds)
        except OSError as error:
            self._tell({"run": told["run"], "failed": str(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, number: int, bounds: confine.Bounds, fds: list[int]) -> None:
        confined, confining = os.pipe()
        place = self._free[-1]
        try:
            tmp = self._tmp
            if not self._around.has_namespaces:
                tmp = f"{tmp}/{number}"
                os.mkdir(tmp, 0o700)
                if self._around.is_root:
                    uid = self._around.first_uid + place
                    os.chown(tmp, uid, uid)
            pid = self._fork()
            if pid == 0:
                self._run(bounds, fds, place=place, tmp=tmp, confining=confining)
        except OSError:
            os.close(confined)
            raise
        finally:
            os.close(confining)
        self._free.pop()
        began_s = time.monotonic()
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = Running(
            number=number,
            pid=pid,
            pidfd=pidfd,
            place=place,
            tmp=tmp,
            confined=confined,
            began_s=began_s,
            deadline_s=began_s + bounds.timeout_s,
            disk_bytes=bounds.disk_bytes,
        )
        self._poller.register(pidfd, select.POLLIN)

    def _fork(self) -> int:
        if not self._around.has_namespaces:
            return os.fork()
        flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS
        return kernel.fork(flags, signal.SIGCHLD)

    def _run(
        self, bounds: confine.Bounds, fds: list[int], *, place: int, tmp: str, confining: int
    ) -> None:
        """In the new process; never returns."""
        try:
            source_fd, *streams = fds
            source = _read(source_fd)
            num_kept = len(streams)
            # Above all that is kept, so that none is overwritten before it is moved.
            high = [_above(fd) for fd in (*streams, confining)]
            for i, fd in enumerate(high):
                os.dup2(fd, i)
            confine.confine(
                bounds,
                self._around,
                place=place,
                tmp=tmp,
                parent=0 if self._around.has_namespaces else self._pid,
                num_open=num_kept + 1,
            )
            os.write(num_kept, b"k")
            os.close(num_kept)
        except BaseException as error:  # noqa: BLE001, whatever it is, no program may run
            os.write(confining, f"{type(error).__name__}: {error}".encode()[:1000])
            os._exit(1)
        del self
        program.run(source, tmp)

    def _tell_end(self, one: Running) -> None:
        self._poller.unregister(one.pidfd)
        os.close(one.pidfd)
        _, status, usage = os.wait4(one.pid, 0)
        self._free.append(one.place)
        began = os.read(one.confined, 1000)
        os.close(one.confined)
        if not self._around.has_namespaces:
            _remove(one.tmp)
        told: dict[str, Any] = {
            "run": one.number,
            "reason": one.reason,
            "code": os.waitstatus_to_exitcode(status),
            "wall_s": time.monotonic() - one.began_s,
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }
        if began != b"k":
            told["failed"] = began.decode(errors="replace") or "it was ended before it began"
        self._tell(told)

    def _tell(self, told: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(told).encode())

    @property
    def _pid(self) -> int:
        return SERVER_PID


SERVER_PID = os.getpid()


def _read(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0)


def _is_hidden(path: str) -> bool:
    """Whether a directory above it is closed to other users."""
    directory = os.path.dirname(path)
    while directory != "/":
        if not os.stat(directory).st_mode & 0o001:
            return True
        directory = os.path.dirname(directory)
    return False


def _opened(path: str) -> int:
    """A descriptor above those that a program begins with."""
    low = os.open(path, os.O_PATH)
    high = _above(low)
    os.close(low)
    return high


def _above(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, MAX_DESCRIPTORS)


def _num_bytes(directory: str) -> int:
    with os.scandir(directory) as entries:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 + 512 for entry in entries)


def _remove(directory: str) -> None:
    """It is flat: its program could make files, and no directories."""
    with os.scandir(directory) as entries:
        for entry in entries:
            os.unlink(entry.path)
    os.rmdir(directory)


def main(control_fd: int, spec: dict[str, Any]) -> None:
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    soft, hard = MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard))
    for name in PRELOADED:
        importlib.import_module(name)
    around = confine.Surroundings(
        has_namespaces=spec["has_namespaces"],
        is_root=os.getuid() == 0,
        num_places=spec["num_places"],
        first_uid=spec["first_uid"],
        readable=tuple(map(_opened, spec["readable"])),
        writable=tuple(map(_opened, spec["writable"])),
        is_hidden=os.getuid() == 0 and not spec["has_namespaces"] and _is_hidden(os.__file__),
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if around.has_namespaces:  # what a program mounts is in its own namespace alone
        kernel.mount(None, "/", kernel.MS_REC | kernel.MS_PRIVATE)
    gc.collect()
    gc.freeze()  # no page is copied because its garbage is counted
    tmp = "/tmp"
    if not around.has_namespaces:
        tmp = tempfile.mkdtemp(prefix="rlsys-sandbox-", dir=spec["tmp_parent"])
        os.chmod(tmp, 0o711)  # programs of other users reach their own directories in it
    server = ForkServer(control, around, tmp)
    try:
        control.sendall(json.dumps({"ready": sys.version.split()[0], "tmp": tmp}).encode())
        server.serve()
    finally:
        server.end()
