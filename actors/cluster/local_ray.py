"""A Ray of this run's own on this machine: nobody else reaches it, and nothing of it stays.

It listens on 127.0.0.1 alone and has a token of its own. Its files (logs, sockets) lie in a
directory that only this user may enter, and that goes when the run ends. Where the run was killed,
a janitor ends Ray's processes and removes the directory; where that was killed or stopped too, the
next run does.
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
from rlsys.common.option_names import option
from rlsys.engines.devices.network import loopback_variables

from .janitor import janitor, users_of
from .signals import signals_raise, with_own_handlers

logger = logging.getLogger(__name__)

# Of one machine: a node that does not answer is busy or was put to sleep with all the others. Ray's
# own limit takes it for dead after half a minute, and the run with it; this one is ten.
PATIENCE = {"health_check_period_ms": 5_000, "health_check_failure_threshold": 40}

# Ray's own objects are metadata here; rollouts and weights have shared memory of their own.
OBJECT_STORE_BYTES = 128 * 2**20

PREFIX = "rlsys-ray-"
OWNER = "owner"  # a file that the run keeps locked as long as it lives
FILES = "r"  # Ray's own directory

# Processes that end may still write there, once or twice.
NUM_REMOVALS, REMOVAL_EVERY_S = 10, 0.1
# A directory without an owner is none of a run that starts, after so long.
REMAINDER_S = 600.0

# Paths of Ray's sockets are longer than their root by at most 85 characters, and may have 107.
MAX_ROOT_LENGTH = 22

# For Ray to end in good order, where its processes are well, and where some of them are dead: then
# it waits for them in vain.
SHUTDOWN_TIMEOUT_S, DEAD_SHUTDOWN_TIMEOUT_S = 15.0, 1.0

LOOK_EVERY_S = 0.2  # whether Ray's processes still live
VITAL = ("gcs_server", "raylet")  # its other processes serve people who look on
STUCK_S = 10.0  # a loop that has not turned for so long waits for Ray, where that is dead
DEAF_S = 30.0  # and where it lives, but may have got the signal that this process has got
LAST_WORDS_S = 5.0  # for the summary of a run that ends so
SIGNAL_S = 1.0  # until a signal to all processes has reached this one too

MIN_OPEN_FILES = 256  # with one worker of each kind; a few dozen more for each other one

NUM_ATTEMPTS = 2
MAX_CAUSE_LENGTH = 200


EndedEarly = Literal["interrupted", "failed"]


class RayFailed(OSError):
    """Ray did not start, or cannot be joined; the message says why."""


@contextlib.contextmanager
def local_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Start Ray, and end it with the block; `num_cpus`: that it gives out, by default as many as
    there are. Raises RayFailed where it does not start twice, and
    CancelledError for a signal meanwhile.
    """
    check_open_files()
    root = _root()
    remove_orphans(root)
    with _own_directory(root) as directory, janitor(directory, directory / OWNER), _own_settings():
        _start(directory, num_cpus)
        try:
            yield
        finally:
            stop_ray()


def stop_ray() -> None:
    """Leave or end Ray, in bounded time even if its processes are gone."""
    limit_s = SHUTDOWN_TIMEOUT_S
    if not is_intact():
        limit_s = DEAD_SHUTDOWN_TIMEOUT_S
        ray_worker._global_node.kill_all_processes(check_alive=False, allow_graceful=False)
    within(limit_s, lambda: ray.shutdown(wait_for_processes=True))


def within(limit_s: float, call: Callable[[], object]) -> bool:
    """Whether the call ended in time; else it goes on in its thread, and nobody waits for it."""
    thread = threading.Thread(target=call, name="rlsys-bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


async def while_intact(work: Coroutine[Any, Any, None]) -> None:
    """Wait for it, but no longer than Ray's processes live: without them no call is answered."""
    task = asyncio.create_task(work)
    while not task.done() and is_intact():
        await asyncio.wait([task], timeout=LOOK_EVERY_S)
    if task.done():
        task.result()
    else:
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def ends_with_ray(last_words: Callable[[EndedEarly], None]) -> AsyncIterator[None]:
    """The block ends with RayFailed when a VITAL process of `local_ray` dies: Ray itself would go
    on for a minute, and then end this process without a word of ours.

    Where the block waits inside a call of Ray's for what is dead or deaf, this process ends, after
    `last_words` has told, in another thread, what the run came to.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    watching = asyncio.create_task(_cancel_without_ray(task))

    def is_signalled() -> bool:
        by_ray = 1 if watching.done() else 0
        return task.cancelling() > by_ray or _has_signal(loop)

    is_over = threading.Event()
    start_thread(_end_without_ray, loop, is_signalled, is_over, last_words, name="rlsys-ray-watch")
    try:
        yield
    except BaseException as error:
        is_signal = isinstance(error, asyncio.CancelledError) and (
            not watching.done() or is_signalled()
        )
        dead = _dead(VITAL)
        if not dead or is_signal or not isinstance(error, Exception | asyncio.CancelledError):
            raise
        raise RayFailed(_without(dead)) from error
    finally:
        is_over.set()
        watching.cancel()


def _end_without_ray(
    loop: asyncio.AbstractEventLoop,
    is_signalled: Callable[[], bool],
    is_over: threading.Event,
    last_words: Callable[[EndedEarly], None],
) -> None:
    """End this process when the loop's thread is inside a call of Ray's that Ray will not answer,
    because it is dead, or as deaf as a signal to all processes leaves it: it would wait there for a
    minute, until Ray ends the process without a word of ours. The janitor ends whatever else there
    is.
    """
    while not is_over.wait(LOOK_EVERY_S):
        if not (dead := _dead(VITAL)) and not is_signalled():
            continue
        answered = threading.Event()
        with contextlib.suppress(RuntimeError):  # closed
            loop.call_soon_threadsafe(answered.set)
            if not answered.wait(STUCK_S if dead else DEAF_S) and not is_over.is_set():
                interrupted = is_signalled()
                outcome: EndedEarly = "interrupted" if interrupted else "failed"
                # It reads the run's files, and calls nothing of Ray's.
                within(LAST_WORDS_S, functools.partial(last_words, outcome))
                said = "Interrupted." if interrupted else f"error: {_without(dead)}"
                print(said, file=sys.stderr, flush=True)
                os._exit(INTERRUPTED if interrupted else 1)


def _has_signal(loop: Any) -> bool:
    """Whether one has come for which its thread had no turn yet: asyncio has it written to a socket
    of the loop's, where other wakeups are zeros.
    """
    try:
        waiting: bytes = loop._ssock.recv(4096, socket.MSG_PEEK)
    except (AttributeError, OSError):
        return False
    return any(waiting)


def _without(dead: Collection[str]) -> str:
    return (
        f"Ray's process {', '.join(dead)} has died, without which no actor answers: it was "
        f"killed, or the machine is short of memory. Continue with {option('resume', True)}."
    )


async def _cancel_without_ray(task: asyncio.Task[Any]) -> None:
    while not _dead(VITAL):
        await asyncio.wait([task], timeout=LOOK_EVERY_S)
    await asyncio.sleep(SIGNAL_S)
    task.cancel()


def is_intact() -> bool:
    """Whether all processes live that `local_ray` started; True for a cluster that was joined."""
    return not _dead()


def _dead(kinds: Collection[str] | None = None) -> list[str]:
    """Those of Ray's own processes that have died, of these kinds."""
    node = ray_worker._global_node
    dead = [str(kind) for kind, _ in node.dead_processes()] if node is not None else []
    return [kind for kind in dead if kinds is None or kind in kinds]


def remove_orphans(root: Path) -> None:
    """Remove the directories of this user's runs that were killed."""
    for directory in root.glob(f"{PREFIX}*"):
        # It may be another user's, be locked by a living run, or go at any moment.
        with contextlib.suppress(OSError), (directory / OWNER).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end_users(directory)
        # Or have been made once more by a process of Ray's that ended after its run.
        with contextlib.suppress(OSError):
            age_s = time.time() - directory.stat().st_mtime
            if age_s > REMAINDER_S and not (directory / OWNER).exists():
                shutil.rmtree(directory)


def _start(directory: Path, num_cpus: int | None) -> None:
    for attempt in range(1, NUM_ATTEMPTS + 1):
        before = _children()
        try:
            with signals_raise():
                _init(directory, num_cpus)
            return
        except BaseException as error:  # Ray raises whatever its processes met
            started = _children() - before  # those of a process that ends are no children any more
            stop_ray()
            _end(started | (_children() - before))
            if not isinstance(error, Exception):
                raise
            if attempt == NUM_ATTEMPTS:
                cause = _said(directory) or last_line(error)
                raise RayFailed(
                    f"Ray did not start on this machine, tried {NUM_ATTEMPTS} times: {cause}. "
                    "See whether memory, disk, processes (ulimit -u) or open files (ulimit -n) are "
                    "short: python scripts/doctor.py; or whether the machine has too much else to "
                    "do."
                ) from None


def check_open_files() -> None:
    """Raise RayFailed where a process may have too few. Ray's own processes would die of it a
    minute later, with nothing but a dump to tell why.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES:
        raise RayFailed(
            f"Ray cannot start on this machine: a process may have {limit} open files (ulimit -n), "
            f"fewer than the {MIN_OPEN_FILES} that Ray needs at least; raise the limit first: "
            "ulimit -n 4096."
        )


def _init(directory: Path, num_cpus: int | None) -> None:
    # The only way to keep Ray's processes, and not just its dashboard, off the other interfaces:
    # it does so on systems where it supports no clusters.
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
            _temp_dir=str(directory / FILES),  # which Ray opens to everybody
        )
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        ray_worker.connect, ray_node.GcsClient = connect, gcs_client


def _said(directory: Path) -> str:
    """What Ray's head, else its node, has complained about last in its log."""
    for name in ("gcs_server", "raylet"):
        for log in sorted(directory.glob(f"{FILES}/session_2*/logs/{name}.out"), reverse=True):
            # An assertion stands within a longer text; other errors are lines such as
            # "[2026-11-22 02:41:33,383 E 23351 23351] file.cc:1: message".
            text = log.read_text(errors="replace")
            errors = re.findall(r"Check failed: (?:\w+\.has_value\(\) *)?(.*)", text) or re.findall(
                r"^\[[\d\-: ,]+ [EF] [^\]]*\] *(.*)", text, re.MULTILINE
            )
            if errors:
                return f"{name}: {textwrap.shorten(errors[-1], MAX_CAUSE_LENGTH).rstrip('.')}"
    return ""


def last_line(error: Exception) -> str:
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
            "RAY_TMPDIR=%r is too long for the paths of Ray's sockets, which lie below /tmp "
            "instead; set it to at most %d characters",
            root,
            MAX_ROOT_LENGTH,
        )
    return Path("/tmp")


@contextlib.contextmanager
def _own_directory(root: Path) -> Iterator[Path]:
    root.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))  # mode 0700
    unlocked = directory / f"{OWNER}.new"
    with unlocked.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(directory / OWNER)  # nobody may see it without its lock
        try:
            yield directory
        finally:
            _end_users(directory)


def _end_users(directory: Path) -> None:
    """End whoever has a file of a directory open, stopped ones too (Ray's processes, a janitor
    beside a dead run), and remove it.
    """
    for _ in range(NUM_REMOVALS):
        for pid in users_of(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if _remove(directory):
            break
        time.sleep(REMOVAL_EVERY_S)


def _remove(directory: Path) -> bool:
    """Whether it is gone; else its lock stays, so that the next run tries again."""
    shutil.rmtree(directory / FILES, ignore_errors=True)
    if not (directory / FILES).exists():
        shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Ray's settings by environment variable, for the processes that it starts."""
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray would run actors at a low priority, behind whatever else the machine does.
        "RAY_worker_niceness": "0",
        # Of Ray's own helpers, which load for seconds, or for a minute where much else runs.
        "RAY_agent_register_timeout_ms": "300000",
        # Nobody looks at Ray's own events and metrics; a driver at its end would wait for seconds
        # to hand them to processes that are dead.
        "RAY_task_events_report_interval_ms": "0",
        "RAY_enable_metrics_collection": "0",
        # What its actors open is for each other, whatever an environment for clusters says.
        **loopback_variables(),
    }
    try:
        with variables(settings):
            _read_settings_again()
            yield
    finally:
        _read_settings_again()


def _read_settings_again() -> None:
    """This process may have had another Ray before."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
