"""Local Ray of one run: other users cannot connect to it, and it leaves nothing behind.

It listens on 127.0.0.1 only and has its own token. Its files (logs, sockets) are in a directory
that only this user may enter and that is removed when the run ends. If the run is killed, a janitor
ends Ray's processes and removes the directory. If the janitor is killed or suspended too, the next
run does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import re
import resource
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
from ray._private import node as ray_node
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from rlsys.common.background_tasks import start_thread
from rlsys.common.environment_variables import variables
from rlsys.common.keyboard_interrupt import INTERRUPTED
from rlsys.common.number_text import counted
from rlsys.common.option_names import option
from rlsys.common.supervision import LOCAL_RAY, Supervisor
from rlsys.engines.devices.network import loopback_variables

from .janitor import janitor, users_of
from .signals import signals_raise, with_own_handlers

logger = logging.getLogger(__name__)

# On one machine, a node that does not answer is busy, or suspended together with the others. Ray's
# default limit would end the run after half a minute; this one is ten times longer.
PATIENCE = {"health_check_period_ms": 5_000, "health_check_failure_threshold": 40}

# Ray's object store holds metadata only; rollouts and weights have their own shared memory.
OBJECT_STORE_BYTES = 128 * 2**20

PREFIX = "rlsys-ray-"
OWNER = "owner"  # locked by the run while it is alive
FILES = "r"  # Ray's own directory

# Processes that are ending may still write to the directory, so removal is repeated.
NUM_REMOVALS, REMOVAL_EVERY_S = 10, 0.1
# Age after which a directory without an owner file is not one of a run that is starting.
REMAINDER_S = 600.0

# Ray's socket paths are up to 85 characters longer than their root, and limited to 107.
MAX_ROOT_LENGTH = 22

# Limits for a clean shutdown of Ray, and for one after some of its processes have died, for which
# Ray waits in vain.
SHUTDOWN_TIMEOUT_S, DEAD_SHUTDOWN_TIMEOUT_S = 15.0, 1.0

LOOK_EVERY_S = 0.2  # between checks that Ray's processes are alive
VITAL = ("gcs_server", "raylet")  # the other processes serve the dashboard
STUCK_S = 10.0  # an event loop blocked for this long waits for a dead Ray
DEAF_S = 30.0  # the same if Ray is alive but may have received this process's signal
SUMMARY_TIMEOUT_S = 5.0  # limit of the closing summary in this case
SIGNAL_S = 1.0  # until a signal to the process group has reached this process too

MIN_OPEN_FILES = 256  # enough for one worker of each kind; each other one needs a few dozen

MAX_CAUSE_LENGTH = 200


EndedEarly = Literal["interrupted", "failed"]


class RayFailed(OSError):
    """Ray did not start or cannot be joined. The message gives the reason."""


@contextlib.contextmanager
def local_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Start Ray with `num_cpus` CPUs (default: those of the machine) until the block ends.

    Raises:
        RayFailed: Ray did not start twice.
        CancelledError: A signal arrived meanwhile.
    """
    check_open_files()
    root = _root()
    remove_orphans(root)
    with own_directory(root) as directory, janitor(directory, directory / OWNER), _own_settings():
        _start(directory, num_cpus)
        try:
            yield
        finally:
            stop_ray()


def stop_ray() -> None:
    """Leave or end Ray within bounded time, even if its processes are dead."""
    limit_s = SHUTDOWN_TIMEOUT_S
    if not is_intact():
        limit_s = DEAD_SHUTDOWN_TIMEOUT_S
        ray_worker._global_node.kill_all_processes(check_alive=False, allow_graceful=False)
    within(limit_s, lambda: ray.shutdown(wait_for_processes=True))


def within(limit_s: float, call: Callable[[], object]) -> bool:
    """Return whether the call ends in time; otherwise it continues in a daemon thread."""
    thread = threading.Thread(target=call, name="rlsys-bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


async def while_intact(work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work` while Ray's processes are alive; without them no call is answered."""
    task = asyncio.create_task(work)
    while not task.done() and is_intact():
        await asyncio.wait([task], timeout=LOOK_EVERY_S)
    if task.done():
        task.result()
    else:
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def ends_with_ray(on_early_end: Callable[[EndedEarly], None]) -> AsyncIterator[None]:
    """End the block with RayFailed when a VITAL process of `local_ray` dies.

    Ray itself would continue for a minute and then end this process without a message. If the block
    is blocked inside a call of a dead or unresponsive Ray, a thread calls `on_early_end` with the
    outcome and ends this process.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    watching = asyncio.create_task(_cancel_without_ray(task))

    def is_signalled() -> bool:
        by_ray = 1 if watching.done() else 0
        return task.cancelling() > by_ray or _has_signal(loop)

    is_over = threading.Event()
    start_thread(
        _end_without_ray, loop, is_signalled, is_over, on_early_end, name="rlsys-ray-watch"
    )
    try:
        yield
    except BaseException as error:
        is_signal = isinstance(error, asyncio.CancelledError) and (
            not watching.done() or is_signalled()
        )
        dead = dead_processes(VITAL)
        if not dead or is_signal or not isinstance(error, Exception | asyncio.CancelledError):
            raise
        raise RayFailed(_death_message(dead)) from error
    finally:
        is_over.set()
        watching.cancel()


def _end_without_ray(
    loop: asyncio.AbstractEventLoop,
    is_signalled: Callable[[], bool],
    is_over: threading.Event,
    on_early_end: Callable[[EndedEarly], None],
) -> None:
    """End this process when the event loop is blocked in a call that Ray will not answer.

    This happens when Ray is dead, or unresponsive after a signal to all processes. Ray would end
    this process after a minute without a message. The janitor ends the other processes.
    """
    while not is_over.wait(LOOK_EVERY_S):
        if not (dead := dead_processes(VITAL)) and not is_signalled():
            continue
        answered = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answered.set)
            if not answered.wait(STUCK_S if dead else DEAF_S) and not is_over.is_set():
                interrupted = is_signalled()
                outcome: EndedEarly = "interrupted" if interrupted else "failed"
                # The callback reads the run's files and does not call Ray.
                within(SUMMARY_TIMEOUT_S, functools.partial(on_early_end, outcome))
                message = "Interrupted." if interrupted else f"error: {_death_message(dead)}"
                print(message, file=sys.stderr, flush=True)
                os._exit(INTERRUPTED if interrupted else 1)


def _has_signal(loop: Any) -> bool:
    """Return whether a signal has arrived that the loop's thread could not handle yet.

    asyncio writes signal numbers to a socket of the loop; other wake-ups are zeros.
    """
    try:
        waiting: bytes = loop._ssock.recv(4096, socket.MSG_PEEK)
    except (AttributeError, OSError):
        return False
    return any(waiting)


def _death_message(dead: Collection[str]) -> str:
    return (
        f"Ray's process {', '.join(dead)} has died: it was killed, or the machine is out of "
        f"memory. Continue with {option('resume', True)}."
    )


async def _cancel_without_ray(task: asyncio.Task[Any]) -> None:
    while not dead_processes(VITAL):
        await asyncio.wait([task], timeout=LOOK_EVERY_S)
    await asyncio.sleep(SIGNAL_S)
    task.cancel()


def is_intact() -> bool:
    """Return whether all processes that `local_ray` started are alive.

    Return True for a joined cluster.
    """
    return not dead_processes()


def dead_processes(kinds: Collection[str] | None = None) -> list[str]:
    """Return the processes of the local Ray that have died, of these kinds."""
    node = ray_worker._global_node
    dead = [str(kind) for kind, _ in node.dead_processes()] if node is not None else []
    return [kind for kind in dead if kinds is None or kind in kinds]


def remove_orphans(root: Path) -> None:
    """Remove the directories of this user's killed runs."""
    for directory in root.glob(f"{PREFIX}*"):
        # The directory may be another user's, be locked by a live run, or vanish at any moment.
        with contextlib.suppress(OSError), (directory / OWNER).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end_users(directory)
        # A process of Ray that ended after its run may have created the directory again.
        with contextlib.suppress(OSError):
            age_s = time.time() - directory.stat().st_mtime
            if age_s > REMAINDER_S and not (directory / OWNER).exists():
                shutil.rmtree(directory)


def _start(directory: Path, num_cpus: int | None) -> None:
    supervisor = Supervisor[str](LOCAL_RAY)
    while True:
        before = _children()
        try:
            with signals_raise():
                _init(directory, num_cpus)
            return
        except BaseException as error:  # Ray raises any type
            # children of ended processes are missing from a later list
            started = _children() - before
            stop_ray()
            _end(started | (_children() - before))
            if not isinstance(error, Exception):
                raise
            if supervisor.died(str(error)).gives_up:
                num_attempts = LOCAL_RAY.restart.max_restarts + 1
                cause = last_error_in_logs(directory) or last_line(error)
                raise RayFailed(
                    f"Ray did not start on this machine in {counted(num_attempts, 'attempt')}: "
                    f"{cause}. Check memory, disk, processes (ulimit -u) and open files "
                    "(ulimit -n) with rlsys doctor, and whether the machine is overloaded."
                ) from None


def check_open_files() -> None:
    """Raise RayFailed if a process may open too few files.

    Ray's own processes would crash a minute later and leave only a dump.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES:
        raise RayFailed(
            f"Ray cannot start on this machine: a process may have {limit} open files (ulimit -n), "
            f"and Ray needs at least {MIN_OPEN_FILES}. Raise the limit first: ulimit -n 4096."
        )


def _init(directory: Path, num_cpus: int | None) -> None:
    # The only way to keep all processes of Ray, not just the dashboard, off the other network
    # interfaces: Ray binds to localhost on systems for which it supports no clusters.
    ray_constants.ENABLE_RAY_CLUSTER, before = False, ray_constants.ENABLE_RAY_CLUSTER
    connect, gcs_client = ray_worker.connect, ray_node.GcsClient
    ray_worker.connect = functools.partial(with_own_handlers, connect)
    # Its threads would take a signal that the main thread blocks while it connects.
    ray_node.GcsClient = functools.partial(with_own_handlers, gcs_client)
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level="CRITICAL",
            _system_config=PATIENCE,
            _temp_dir=str(directory / FILES),  # Ray makes it readable for all users
        )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        ray_worker.connect, ray_node.GcsClient = connect, gcs_client


def last_error_in_logs(directory: Path) -> str:
    """Return the last error in the log of Ray's head, else of its node, else ""."""
    for name in ("gcs_server", "raylet"):
        for log in sorted(directory.glob(f"{FILES}/session_2*/logs/{name}.out"), reverse=True):
            # Assertions are inside a longer text; other errors are lines such as
            # "[2026-11-22 02:41:33,383 E 23351 23351] file.cc:1: message".
            text = log.read_text(errors="replace")
            errors = re.findall(r"Check failed: (?:\w+\.has_value\(\) *)?(.*)", text) or re.findall(
                r"^\[[\d\-: ,]+ [EF] [^\]]*\] *(.*)", text, re.MULTILINE
            )
            if errors:
                return f"{name}: {textwrap.shorten(errors[-1], MAX_CAUSE_LENGTH).rstrip('.')}"
    return ""


def last_line(error: Exception) -> str:
    """Return the last line of an error's message, without the final period."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _end(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)


def _root() -> Path:
    root = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    if len(root) <= MAX_ROOT_LENGTH:
        return Path(root)
    if "RAY_TMPDIR" in os.environ:
        logger.warning(
            "RAY_TMPDIR=%r is too long for the paths of Ray's sockets, so /tmp is used instead; "
            "set it to at most %d characters",
            root,
            MAX_ROOT_LENGTH,
        )
    return Path("/tmp")


@contextlib.contextmanager
def own_directory(root: Path) -> Iterator[Path]:
    """Yield a new directory of this run below `root`, locked and removed at the end."""
    root.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))  # mode 0700
    unlocked = directory / f"{OWNER}.new"
    with unlocked.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(directory / OWNER)  # the file becomes visible only when it is locked
        try:
            yield directory
        finally:
            _end_users(directory)


def _end_users(directory: Path) -> None:
    """Kill all processes that have a file of a directory open, and remove the directory.

    This includes suspended processes of Ray and the janitor of a dead run.
    """
    for _ in range(NUM_REMOVALS):
        for pid in users_of(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if _remove(directory):
            break
        time.sleep(REMOVAL_EVERY_S)


def _remove(directory: Path) -> bool:
    """Return whether the directory is removed; otherwise its lock stays for the next run."""
    shutil.rmtree(directory / FILES, ignore_errors=True)
    if not (directory / FILES).exists():
        shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Set Ray's settings as environment variables for the processes that it starts."""
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray would run actors at a low priority.
        "RAY_worker_niceness": "0",
        # Limit for Ray's own helpers, which load for seconds, or for a minute on a busy machine.
        "RAY_agent_register_timeout_ms": "300000",
        # Ray's own events and metrics are not used; sending them to dead processes would delay the
        # end of the driver by seconds.
        "RAY_task_events_report_interval_ms": "0",
        "RAY_enable_metrics_collection": "0",
        # Ports of actors are for each other, whatever an environment for clusters sets.
        **loopback_variables(),
    }
    try:
        with variables(settings):
            _reload_settings()
            yield
    finally:
        _reload_settings()


def _reload_settings() -> None:
    """Reload the settings, because this process may have used another Ray before."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
