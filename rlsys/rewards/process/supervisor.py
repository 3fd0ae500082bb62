"""Keeps one process of reward functions, with everything that it starts, within bounds; run as a
script, by reward_process.py alone.

    reward actor ──► keeper ──► process of the reward functions ──► whatever these start

In: a JSON object as the argument, and one end of a socket. Out: on that socket, a JSON object that
says how the process ended, once nothing of it is left.

The keeper adopts every process of the tree whose parent has ended (PR_SET_CHILD_SUBREAPER), one
with a session of its own too. So none escapes: when the process ends, takes more than its bounds,
or the socket closes because the actor has died, the whole tree is killed. Standard library only,
one thread: it forks, and it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

# How often the tree is counted; a process that grows is seen within this time.
COUNT_EVERY_S = 0.25

# For killed processes to vanish; one that the kernel holds longer is left to it.
VANISH_TIMEOUT_S = 10.0

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

prctl = ctypes.CDLL(None, use_errno=True).prctl


def main() -> None:
    spec = json.loads(sys.argv[1])
    if os.fork():
        os._exit(0)  # nobody's child: Ray ends the children of a worker before the worker
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
    """The process itself, in a session of its own; its pid."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # for a keeper that is killed itself
        if os.getppid() != keeper:
            os._exit(1)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        resource.setrlimit(resource.RLIMIT_DATA, (spec["memory_bytes"],) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the first that the kernel ends when memory runs out
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
    """Return why the process has ended or must end, when it does.

    A process that is stopped must end: it answers nothing, and may never be continued.
    """
    poller = select.poll()
    for side in (control, woken):
        poller.register(side, select.POLLIN)
    next_count_s = time.monotonic() + COUNT_EVERY_S
    while True:
        wait_s = max(0.0, next_count_s - time.monotonic())
        ready = {fd for fd, _ in poller.poll(wait_s * 1000)}
        if woken.fileno() in ready:
            woken.recv(4096)
        statuses.update(reap(os.WUNTRACED))
        if pid in statuses:
            return "stopped" if os.WIFSTOPPED(statuses[pid]) else "exit"
        statuses.clear()  # pids come again
        if control.fileno() in ready:  # a byte that asks for the end, or the actor's death
            return "exit"
        if time.monotonic() >= next_count_s:
            tree = descendants(os.getpid())
            if len(tree) > spec["max_processes"]:
                return "processes"
            if sum(map(private_bytes, tree)) > spec["memory_bytes"]:
                return "memory"
            next_count_s = time.monotonic() + COUNT_EVERY_S


def reap(options: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the pid and status of children that have ended, adopted ones too.

    With os.WUNTRACED, yield those that were stopped as well.
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
    """Kill until there is no child left: whoever loses its parent becomes one.

    Whole groups at once, since no member of a group can fork between its signals.
    """
    deadline_s = time.monotonic() + VANISH_TIMEOUT_S
    own_group = os.getpgid(0)
    while time.monotonic() < deadline_s:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
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
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    listed = os.path.exists(f"/proc/{pid}/task/{pid}/children")
    everybody = {} if listed else all_children()
    found: list[int] = []
    parents = [pid]
    while parents:
        parent = parents.pop()
        children = listed_children(parent) if listed else everybody.get(parent, [])
        found += children
        parents += children
    return found


def listed_children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += map(int, file.read().split())
    return children


def all_children() -> dict[int, list[int]]:
    """By parent, for kernels that list no children."""
    by_parent: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            _state, parent, *_ = file.read().rpartition(")")[2].split()
            by_parent.setdefault(int(parent), []).append(int(name))
    return by_parent


def private_bytes(pid: int) -> int:
    """Resident memory that the process shares with no file."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except OSError:
        return 0
    return (resident - shared) * resource.getpagesize()


if __name__ == "__main__":
    main()
