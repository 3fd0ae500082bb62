"""Supervisor of one process of reward functions and of everything that it starts.

    reward actor ──► supervisor ──► process of the reward functions ──► their child processes

Only reward_process.py runs this script. In: a JSON object as the argument, and one end of a socket.
Out: on that socket, a JSON object with the reason of the end, after all processes have ended.

The supervisor adopts every process of the tree whose parent has ended (PR_SET_CHILD_SUBREAPER),
including processes with their own session. So none escapes: when the process ends, exceeds its
limits, or the socket closes because the actor has died, the whole tree is killed. The script uses
only the standard library and one thread, because it forks and must start in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

# Time between two checks of the number and memory of the processes.
CHECK_INTERVAL_S = 0.25

# Time for killed processes to end. A process that the kernel holds longer is left behind.
EXIT_TIMEOUT_S = 10.0

PF_EXITING = 0x4  # flag in /proc/<pid>/stat

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

prctl = ctypes.CDLL(None, use_errno=True).prctl


def main() -> None:
    """Start the process, watch it, and report its end."""
    # Ctrl-C is for the recipe, which ends the run; the processes of the tree inherit this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = json.loads(sys.argv[1])
    if os.fork():
        os._exit(0)  # not a child: Ray ends the children of a worker before the worker
    os.setsid()
    control = socket.socket(fileno=spec["control"])
    control.set_inheritable(False)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    pid = start(spec)
    for fd in spec["pass_fds"]:
        os.close(fd)
    statuses: dict[int, int] = {}
    reason = watch(pid, spec, control, woken, statuses)
    end_tree(statuses)
    report = {"reason": reason, "status": statuses.get(pid, 0)}
    with contextlib.suppress(OSError):  # the actor has died
        control.sendall(json.dumps(report).encode())


def start(spec: dict[str, Any]) -> int:
    """Start the process in its own session and return its pid."""
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # if the supervisor is killed
        if os.getppid() != supervisor:
            os._exit(1)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        resource.setrlimit(resource.RLIMIT_DATA, (spec["memory_bytes"],) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the kernel ends this process first when memory runs out
        for fd in spec["pass_fds"]:
            os.set_inheritable(fd, True)
        os.execv(spec["command"][0], spec["command"])
    finally:
        os._exit(127)


def watch(
    pid: int,
    spec: dict[str, Any],
    control: socket.socket,
    woken: socket.socket,
    statuses: dict[int, int],
) -> str:
    """Wait until the process has ended or must end, and return the reason.

    A stopped process must end: it does not answer, and may never be continued.
    """
    poller = select.poll()
    for side in (control, woken):
        poller.register(side, select.POLLIN)
    next_check_s = time.monotonic() + CHECK_INTERVAL_S
    exit_by_s = math.inf
    while True:
        wait_s = max(0.0, next_check_s - time.monotonic())
        ready = {fd for fd, _ in poller.poll(wait_s * 1000)}
        if woken.fileno() in ready:
            woken.recv(4096)
        statuses.update(reap(os.WUNTRACED))
        if pid in statuses:
            return "stopped" if os.WIFSTOPPED(statuses[pid]) else "exit"
        statuses.clear()  # pids are reused
        if control.fileno() in ready:  # a request to end, or the actor's death
            if not is_exiting(pid):
                return "request"
            # The actor asks because the process has closed its connections. A dying process does so
            # before its status can be read, and the status gives the reason.
            poller.unregister(control)
            exit_by_s = time.monotonic() + EXIT_TIMEOUT_S
        if time.monotonic() >= exit_by_s:
            return "request"
        if time.monotonic() >= next_check_s:
            tree = descendants(os.getpid())
            if len(tree) > spec["max_processes"]:
                return "processes"
            if sum(map(private_bytes, tree)) > spec["memory_bytes"]:
                return "memory"
            next_check_s = time.monotonic() + CHECK_INTERVAL_S


def is_exiting(pid: int) -> bool:
    """Return whether the kernel has begun to end the process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            flags = int(file.read().rpartition(")")[2].split()[6])
    except OSError:
        return True
    return bool(flags & PF_EXITING)


def reap(options: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the pid and status of children that have ended, including adopted ones.

    With os.WUNTRACED, yield stopped children too.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | options)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def end_tree(statuses: dict[int, int]) -> None:
    """Kill processes until no child is left. A process that loses its parent becomes a child.

    Whole process groups are killed at once, so that no member can fork between two signals.
    """
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    own_group = os.getpgid(0)
    while time.monotonic() < deadline_s:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended
                group = os.getpgid(pid)
                if group == own_group:
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.killpg(group, signal.SIGKILL)
        for pid, status in reap():
            statuses.setdefault(pid, status)
        if not has_children():
            return
        time.sleep(0.002)


def has_children() -> bool:
    """Return whether this process has children, running or ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below a process."""
    listed = os.path.exists(f"/proc/{pid}/task/{pid}/children")
    by_parent = {} if listed else all_children()
    found: list[int] = []
    parents = [pid]
    while parents:
        parent = parents.pop()
        children = listed_children(parent) if listed else by_parent.get(parent, [])
        found += children
        parents += children
    return found


def listed_children(pid: int) -> list[int]:
    """Return the children that the kernel lists for a process."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def all_children() -> dict[int, list[int]]:
    """Return the children of all processes by parent, for kernels that do not list children."""
    by_parent: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            _state, parent, *_ = file.read().rpartition(")")[2].split()
            by_parent.setdefault(int(parent), []).append(int(name))
    return by_parent


def private_bytes(pid: int) -> int:
    """Return the resident memory of a process that no file backs."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * resource.getpagesize()


if __name__ == "__main__":
    main()
