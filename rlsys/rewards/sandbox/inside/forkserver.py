"""The fork server: an interpreter in the sandbox that forks for each program.

    rlsys ──► limits, descriptors of program, input, output, errors ──► fork ──► confine ──► program
          ◄── how it ended

Each program runs in a new process, with its own namespaces if available. The fork server never
reads a program, its input or its output: these are files in memory that only the client and the
program have. It ends when the socket closes, together with everything that it has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from rlsys.rewards.sandbox.inside import confine, kernel_calls, program

MAX_MESSAGE_BYTES = 1 << 16
MAX_DESCRIPTORS = 5
MAX_OPEN_FILES = 4096
# Processes that are forked in advance, so that a program does not wait for its fork.
MAX_WAITING = 8
CONFINED = b"confined"
# Time between two checks of the files of running programs, if no file system limits them.
CHECK_INTERVAL_S = 0.05

# Modules that most programs import. They are loaded once for all programs.
PRELOADED = """
    abc array ast bisect cmath collections contextlib copy ctypes dataclasses datetime decimal
    enum fractions functools hashlib heapq inspect io itertools json linecache math numbers
    operator random re statistics string struct textwrap threading time traceback types typing
    rlsys.rewards.sandbox.inside.examiner rlsys.rewards.sandbox.inside.subject
""".split()  # noqa: SIM905, they are words


@dataclass(kw_only=True, eq=False)
class Child:
    """A forked process. It waits for a program while `number` is None."""

    pid: int
    pidfd: int
    place: int
    tmp: str
    channel: socket.socket
    number: int | None = None
    began_s: float = 0.0
    deadline_s: float = math.inf
    reason: str = "ended"


class ForkServer:
    """Server that forks processes and runs programs in them."""

    def __init__(self, control: socket.socket, around: confine.Surroundings, tmp: str) -> None:
        self._control = control
        self._around = around
        self._tmp = tmp  # directory of all programs, or parent of their directories
        self._children: dict[int, Child] = {}  # by pidfd
        self._waiting: list[Child] = []
        self._free = list(range(around.num_places))
        self._num_forked = 0
        self._may_fork_ahead = True
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)

    def serve(self) -> None:
        """Run programs until the socket closes."""
        while True:
            is_short = self._is_short_of_waiting()
            events = self._poller.poll(0 if is_short else self._wait_ms())
            for fd, _ in events:
                if fd != self._control.fileno():
                    self._report_end(self._children.pop(fd))
                elif not self._receive():
                    return
            self._check_limits()
            if is_short and not events:
                self._fork_ahead()

    def end(self) -> None:
        """Kill all programs and remove their files."""
        for one in self._children.values():
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
            if not self._around.has_namespaces:
                _remove(one.tmp)
        if not self._around.has_namespaces:
            os.rmdir(self._tmp)

    def _is_short_of_waiting(self) -> bool:
        is_short = len(self._waiting) < MAX_WAITING and bool(self._free)
        return is_short and self._may_fork_ahead

    def _fork_ahead(self) -> None:
        try:
            self._waiting.append(self._fork())
        except OSError:  # the next program reports it
            self._may_fork_ahead = False

    def _wait_ms(self) -> int | None:
        until_s = min((one.deadline_s for one in self._children.values()), default=math.inf)
        wait_s = until_s - time.monotonic()
        if not self._around.has_namespaces and len(self._children) > len(self._waiting):
            wait_s = min(wait_s, CHECK_INTERVAL_S)
        return None if wait_s == math.inf else max(0, int(wait_s * 1000) + 1)

    def _check_limits(self) -> None:
        now_s = time.monotonic()
        for one in self._children.values():
            if now_s >= one.deadline_s:
                self._kill(one, "time")
            elif self._is_too_large(one):
                self._kill(one, "disk")

    def _is_too_large(self, one: Child) -> bool:
        is_bounded = self._around.has_namespaces or one.number is None
        return not is_bounded and _num_bytes(one.tmp) > confine.DISK_BYTES

    def _kill(self, one: Child, reason: str) -> None:
        if one.reason == "ended":
            one.reason = reason
        one.deadline_s = time.monotonic() + 1.0  # check again
        os.kill(one.pid, signal.SIGKILL)

    def _receive(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not message:
            return False
        request: dict[str, Any] = json.loads(message)
        if "kill" in request:
            for one in self._children.values():
                if one.number == request["kill"]:
                    self._kill(one, "killed")
            return True
        try:
            self._start(request["run"], request["bounds"], fds)
        except OSError as error:
            self._send({"run": request["run"], "failed": str(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, number: int, bounds: dict[str, Any], fds: list[int]) -> None:
        self._may_fork_ahead = True
        child = self._waiting.pop() if self._waiting else self._fork()
        child.number = number
        child.began_s = time.monotonic()
        child.deadline_s = child.began_s + bounds["timeout_s"]
        with contextlib.suppress(OSError):  # it has died; its end is reported
            socket.send_fds(child.channel, [json.dumps(bounds).encode()], fds)

    def _fork(self) -> Child:
        """Fork a process that waits for a program, or raise OSError."""
        place = self._free[-1]
        self._num_forked += 1
        tmp = self._tmp
        if not self._around.has_namespaces:
            tmp = f"{tmp}/{self._num_forked}"
            os.mkdir(tmp, 0o700)
            if self._around.is_root:
                uid = self._around.first_uid + place
                os.chown(tmp, uid, uid)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            if self._around.has_namespaces:
                pid = kernel_calls.fork(
                    kernel_calls.CLONE_NEWPID | kernel_calls.CLONE_NEWNS, signal.SIGCHLD
                )
            else:
                pid = os.fork()
            if pid == 0:
                wait_and_run(self._around, theirs.fileno(), place=place, tmp=tmp)
        self._free.pop()
        pidfd = os.pidfd_open(pid)
        child = Child(pid=pid, pidfd=pidfd, place=place, tmp=tmp, channel=ours)
        self._children[pidfd] = child
        self._poller.register(pidfd, select.POLLIN)
        return child

    def _report_end(self, one: Child) -> None:
        self._poller.unregister(one.pidfd)
        os.close(one.pidfd)
        _, status, usage = os.wait4(one.pid, 0)
        self._free.append(one.place)
        try:
            began = one.channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            began = b""
        one.channel.close()
        if not self._around.has_namespaces:
            _remove(one.tmp)
        if one.number is None:
            self._waiting.remove(one)
            self._may_fork_ahead = False  # the same may end the next one; a program will report it
            return
        report: dict[str, Any] = {
            "run": one.number,
            "reason": one.reason,
            "code": os.waitstatus_to_exitcode(status),
            "wall_s": time.monotonic() - one.began_s,
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }
        if began != CONFINED:
            report["failed"] = began.decode(errors="replace") or "it ended before it began"
        self._send(report)

    def _send(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode())


def wait_and_run(around: confine.Surroundings, channel: int, *, place: int, tmp: str) -> NoReturn:
    """Confine the new process, then wait for a program and run it."""
    parent = 0 if around.has_namespaces else SERVER_PID
    kept = 3  # the first descriptor above the standard ones
    try:
        os.dup2(_above(channel), kept)
        confine.confine(around, place=place, tmp=tmp, parent=parent, num_open=kept + 1)
    except BaseException as error:  # noqa: BLE001, no program may run
        with contextlib.suppress(OSError):
            os.write(channel, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    try:
        mine = socket.socket(fileno=kept)
        mine.send(CONFINED)
        message, fds, _, _ = socket.recv_fds(mine, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        mine.detach()
        if not message:
            os._exit(0)  # the fork server has ended
        source = _read(fds[0])
        # Move them above the kept ones first, so that none is overwritten.
        for i, fd in enumerate([_above(fd) for fd in fds[1:]]):
            os.dup2(fd, i)
        confine.limit(confine.Bounds(**json.loads(message)), around, num_open=len(fds) - 1)
    except BaseException:  # noqa: BLE001, as above
        os._exit(1)
    program.run(source, tmp)


SERVER_PID = os.getpid()


def _read(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0)


def _is_hidden(path: str) -> bool:
    """Return whether other users cannot access a directory above a path."""
    directory = os.path.dirname(path)
    while directory != "/":
        if not os.stat(directory).st_mode & 0o001:
            return True
        directory = os.path.dirname(directory)
    return False


def _opened(path: str) -> int:
    """Open a path with a descriptor above those of programs."""
    low = os.open(path, os.O_PATH)
    high = _above(low)
    os.close(low)
    return high


def _above(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 2 * MAX_DESCRIPTORS)


def _num_bytes(directory: str) -> int:
    with os.scandir(directory) as entries:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 + 512 for entry in entries)


def _remove(directory: str) -> None:
    """Remove a directory of files. Programs cannot create directories."""
    with os.scandir(directory) as entries:
        for entry in entries:
            os.unlink(entry.path)
    os.rmdir(directory)


def main(control_fd: int, spec: dict[str, Any]) -> None:
    """Prepare the fork server and serve until the socket closes."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    soft, hard = MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard))
    for name in PRELOADED:
        importlib.import_module(name)
    is_root = os.getuid() == 0 and spec["has_users"]
    around = confine.Surroundings(
        has_namespaces=spec["has_namespaces"],
        is_root=is_root,
        num_places=spec["num_places"],
        first_uid=spec["first_uid"],
        readable=tuple(map(_opened, spec["readable"])),
        writable=tuple(map(_opened, spec["writable"])),
        is_hidden=is_root and not spec["has_namespaces"] and _is_hidden(os.__file__),
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if around.has_namespaces:  # mounts of a program stay in its own namespace
        kernel_calls.mount(None, "/", kernel_calls.MS_REC | kernel_calls.MS_PRIVATE)
    gc.collect()
    gc.freeze()  # so that garbage collection does not copy shared pages
    tmp = "/tmp"
    if not around.has_namespaces:
        tmp = tempfile.mkdtemp(prefix="rlsys-sandbox-", dir=spec["tmp_parent"])
        os.chmod(tmp, 0o711)  # programs run as other users and need access to their directories
    server = ForkServer(control, around, tmp)
    try:
        control.sendall(json.dumps({"ready": sys.version.split()[0], "tmp": tmp}).encode())
        server.serve()
    finally:
        server.end()
