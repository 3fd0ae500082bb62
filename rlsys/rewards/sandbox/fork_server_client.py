"""Client of the sandbox's fork server, which this process starts once and ends with itself.

    any thread, any loop ──► submit ──► queue ──► fork server ──► one thread that reads ──► futures

Programs, their input and their output are files in memory. The fork server gets their descriptors.
inside/forkserver.py is the other end.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from rlsys.common.background_tasks import report, start_thread
from rlsys.common.safe_json import dump_json, parse_json
from rlsys.rewards.sandbox.inside.confine import Bounds
from rlsys.rewards.sandbox.isolation_levels import WAYS, Way, has_user, plan

MAX_MESSAGE_BYTES = 1 << 16
# Time for an interpreter to start and import some modules on a very busy machine.
START_TIMEOUT_S = 60.0
# Time after the limit of a program until the fork server must have reported its end.
ANSWER_GRACE_S = 30.0
END_TIMEOUT_S = 10.0
POLL_S = 5.0

# User ids for programs, if this process is root. No account has such an id.
FIRST_UID, NUM_UIDS, UIDS_OF_ONE = 2_000_000_000, 100_000_000, 1024

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


class SandboxUnavailable(RuntimeError):
    """A sandbox that this machine cannot isolate. The message says what to enable."""


class SandboxFailed(RuntimeError):
    """A program did not run, or its end is unknown, because of an error of the sandbox."""


@dataclass(frozen=True, kw_only=True)
class ProgramJob:
    """A program to run, with its input and limits."""

    program: bytes
    stdin: bytes
    bounds: Bounds
    channel: socket.socket | None = None  # becomes the program's descriptor 3


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a program."""

    reason: str  # ended, time, disk or killed
    code: int  # exit code, or minus the number of the signal
    wall_s: float
    cpu_s: float
    stdout: bytes
    stderr: bytes


@dataclass(kw_only=True, eq=False)
class _Unit:
    """Jobs that run at the same time, because they communicate with each other."""

    jobs: Sequence[ProgramJob]
    futures: list[Future[Ended]]
    on_begin: Callable[[], None]
    numbers: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _Run:
    future: Future[Ended]
    unit: _Unit
    stdout: int
    stderr: int
    deadline_s: float


class ForkServerClient:
    """Client of one fork server.

    It starts the fork server in the first of `ways` that works, or raises SandboxUnavailable.
    """

    def __init__(self, ways: Sequence[Way] = WAYS) -> None:
        self._lock = threading.Lock()
        self._max_units = len(os.sched_getaffinity(0))
        self._units: set[_Unit] = set()
        self._waiting: deque[_Unit] = deque()
        self._runs: dict[int, _Run] = {}
        self._next = 0
        self._has_ended = False
        self.tmp = ""
        self.way, self.version = self._start(ways)
        start_thread(self._read, name="sandbox", fail=self._failed)

    @property
    def has_ended(self) -> bool:
        """Return whether the fork server has ended."""
        return self._has_ended

    @property
    def pid(self) -> int:
        """The pid of the fork server."""
        return self._process.pid

    def submit(
        self, *jobs: ProgramJob, on_begin: Callable[[], None] = lambda: None
    ) -> list[Future[Ended]]:
        """Run jobs at the same time, as soon as a processor is free.

        Each future gets the end of its job, or SandboxFailed. `on_begin` is called in any thread
        when the jobs start.
        """
        unit = _Unit(jobs=jobs, futures=[Future() for _ in jobs], on_begin=on_begin)
        with self._lock:
            if self._has_ended:
                raise SandboxFailed("the fork server of the sandbox has ended. Try again.")
            self._waiting.append(unit)
            self._send_waiting()
        return unit.futures

    def kill(self, future: Future[Ended]) -> None:
        """End the program of a future, if it has not ended. The future gets this end."""
        with self._lock:
            for unit in self._waiting:
                if future in unit.futures:
                    self._waiting.remove(unit)
                    for one in unit.futures:
                        one.cancel()
                    return
            for number, run in self._runs.items():
                if run.future is future:
                    self._send({"kill": number})

    def close(self) -> None:
        """End the fork server and what it runs, and wait until it has ended."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._reap()

    def forget(self) -> None:
        """Close this copy in a forked process. The parent keeps the fork server."""
        self._has_ended = True
        self._control.close()

    def _start(self, ways: Sequence[Way]) -> tuple[Way, str]:
        found = []
        for way in ways:
            try:
                return way, self._start_one(way)
            except ValueError as error:
                found.append(f"- {way}: {error}")
        raise SandboxUnavailable(
            "programs cannot be isolated on this machine, so none is run:\n" + "\n".join(found)
        )

    def _start_one(self, way: Way) -> str:
        planned = plan(way)
        first_uid = FIRST_UID + os.getpid() * UIDS_OF_ONE % NUM_UIDS
        spec = planned.spec | {
            "tmp_parent": tempfile.gettempdir(),
            "num_places": 2 * self._max_units,
            "first_uid": first_uid,
            "has_users": has_user(first_uid),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                [*planned.command, str(theirs.fileno()), dump_json(spec)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that Ctrl-C does not reach it
            )
            theirs.close()
            ours.settimeout(START_TIMEOUT_S)
            try:
                self._control = ours
                answer = ours.recv(MAX_MESSAGE_BYTES)
                if answer:
                    self._check_isolation()
                    ours.settimeout(None)
                    ready = parse_json(answer)
                    self.tmp = ready["tmp"]  # the path that programs see
                    return str(ready["ready"])
            except (OSError, SandboxFailed) as error:
                self._reap()
                raise ValueError(f"{error}. {_fix(way)}") from error
            self._reap()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["it ended"]
            raise ValueError(f"{lines[-1]}. {_fix(way)}")

    def _check_isolation(self) -> None:
        """Run a trial program, or raise SandboxFailed if it is not isolated."""
        bounds = Bounds(timeout_s=START_TIMEOUT_S / 2, memory_bytes=2**26, output_bytes=2**16)
        job = ProgramJob(program=TRIAL, stdin=b"", bounds=bounds)
        unit = _Unit(jobs=[job], futures=[Future()], on_begin=lambda: None)
        self._send_unit(unit)
        self._take(parse_json(self._control.recv(MAX_MESSAGE_BYTES)))
        ended = unit.futures[0].result(0)
        if ended.stdout != b"isolated\n":
            raise SandboxFailed(f"the trial program was not isolated: {ended}")

    def _send_waiting(self) -> None:
        """Send waiting jobs while there is room. Needs the lock."""
        while self._waiting and len(self._units) < self._max_units:
            self._send_unit(self._waiting.popleft())

    def _send_unit(self, unit: _Unit) -> None:
        self._units.add(unit)
        unit.on_begin()
        for job, future in zip(unit.jobs, unit.futures, strict=True):
            self._next += 1
            unit.numbers.append(self._next)
            opened: list[int] = []
            try:
                for name, content in (("program", job.program), ("stdin", job.stdin)):
                    opened.append(_in_memory(name, content))
                outputs = [os.memfd_create(name) for name in ("stdout", "stderr")]
                self._runs[self._next] = _Run(
                    future=future,
                    unit=unit,
                    stdout=outputs[0],
                    stderr=outputs[1],
                    deadline_s=time.monotonic() + job.bounds.timeout_s + ANSWER_GRACE_S,
                )
                fds = [*opened, *outputs]
                if job.channel is not None:
                    fds.append(job.channel.fileno())
                self._send({"run": self._next, "bounds": asdict(job.bounds)}, fds)
            finally:
                for fd in opened:
                    os.close(fd)
                if job.channel is not None:
                    job.channel.close()

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # it has ended; the reading thread reports it
            socket.send_fds(self._control, [dump_json(message).encode()], fds)

    def _read(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while True:
            ready = poller.poll(POLL_S * 1000)
            if not ready and not self._is_late():
                continue
            with contextlib.suppress(OSError):
                message = self._control.recv(MAX_MESSAGE_BYTES) if ready else b""
                if message:
                    self._take(parse_json(message))
                    continue
            break
        if not self._control._closed:  # type: ignore[attr-defined]
            self._end()

    def _failed(self, error: BaseException) -> None:
        """End the fork server after an error of the reading thread. All callers get an error."""
        report(error)
        self._end()

    def _is_late(self) -> bool:
        with self._lock:
            now_s = time.monotonic()
            return any(run.deadline_s < now_s for run in self._runs.values())

    def _take(self, message: dict[str, Any]) -> None:
        with self._lock:
            run = self._runs.pop(message["run"])
            run.unit.numbers.remove(message["run"])
            if not run.unit.numbers:
                self._units.discard(run.unit)
                self._send_waiting()
        try:
            stdout, stderr = _content(run.stdout), _content(run.stderr)
        finally:
            os.close(run.stdout)
            os.close(run.stderr)
        if not run.future.set_running_or_notify_cancel():
            return
        if "failed" in message:
            run.future.set_exception(SandboxFailed(f"a program did not begin: {message['failed']}"))
            return
        ended = Ended(
            reason=message["reason"],
            code=message["code"],
            wall_s=message["wall_s"],
            cpu_s=message["cpu_s"],
            stdout=stdout,
            stderr=stderr,
        )
        run.future.set_result(ended)

    def _end(self) -> None:
        """Fail all jobs after the fork server has ended or stopped answering."""
        self._reap()
        if self.way == "landlock":  # a killed fork server could not remove it
            shutil.rmtree(self.tmp, ignore_errors=True)
        with self._lock:
            self._has_ended = True
            runs, waiting = list(self._runs.values()), list(self._waiting)
            self._runs.clear()
            self._waiting.clear()
        for run in runs:
            os.close(run.stdout)
            os.close(run.stderr)
        futures = [run.future for run in runs] + [one for unit in waiting for one in unit.futures]
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(SandboxFailed("the fork server of the sandbox has ended."))

    def _reap(self) -> None:
        self._control.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)


# Prints "isolated" only if forbidden operations fail. Every machine has these files.
TRIAL = b"""
import os, socket
def refused(action, *args):
    try:
        action(*args)
    except OSError:
        return True
assert refused(open, "/etc/passwd") and refused(os.listdir, "/proc") and refused(os.fork)
assert refused(socket.socket) and refused(os.kill, os.getppid() or 2, 0)
open("own", "w").close()
print("isolated")
"""


def _fix(way: Way) -> str:
    if way == "landlock":
        return "Landlock needs Linux 5.13 or newer, x86_64 or aarch64."
    return (
        "Namespaces need user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or root with CAP_SYS_ADMIN (docker run "
        "--cap-add SYS_ADMIN --security-opt seccomp=unconfined)."
    )


def _in_memory(name: str, content: bytes) -> int:
    fd = os.memfd_create(name)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _content(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


_of_this_process: ForkServerClient | None = None
_starting = threading.Lock()


def host() -> ForkServerClient:
    """Return the client of this process, and start its fork server if there is none.

    Raises:
        SandboxUnavailable: Programs cannot be isolated on this machine.
    """
    global _of_this_process
    with _starting:
        if _of_this_process is None or _of_this_process.has_ended:
            _of_this_process = ForkServerClient()
        return _of_this_process


def _forget() -> None:
    global _of_this_process, _starting
    _starting = threading.Lock()
    if _of_this_process is not None:
        _of_this_process.forget()
        _of_this_process = None


os.register_at_fork(after_in_child=_forget)
