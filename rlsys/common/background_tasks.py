"""Threads and asyncio tasks that are not awaited, but whose failures are noticed.

`start_thread` and `start_task` call `fail` with the error of the work. The default, `end_process`,
prints the traceback and ends the process, which its supervisor then treats as dead. Pass another
`fail` to report failures within the process instead. With `returns=False` the end of the work is a
failure too, for example for a sender that must run forever.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Fail = Callable[[BaseException], object]

# Bound at import, so that replacements by user code have no effect here.
_exit, _write, _format = os._exit, os.write, traceback.format_exception

FAILED_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h


class BackgroundEnded(RuntimeError):
    """A thread or task that must never return has returned."""


def end_process(error: BaseException) -> None:
    """Print the traceback of `error` and end this process at once."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        _write(2, "".join(_format(error)).encode(errors="replace"))
    finally:
        _exit(FAILED_EXIT_CODE)


def report(error: BaseException) -> None:
    """Print the traceback of `error` to the log of this process."""
    _write(2, "".join(_format(error)).encode(errors="replace"))


def start_thread(
    run: Callable[..., object],
    *args: Any,
    name: str,
    fail: Fail = end_process,
    returns: bool = True,
    expected: tuple[type[BaseException], ...] = (),
) -> threading.Thread:
    """Start a daemon thread and return it.

    Args:
        run: Called with `args` in the thread.
        *args: Arguments of `run`.
        name: Name of the thread.
        fail: Called in the thread with whatever `run` raises, SystemExit included.
        returns: Whether `run` may return. If not, a return calls `fail` with BackgroundEnded.
        expected: Exceptions that end the thread without a failure.

    Raises:
        RuntimeError: The system has no memory for another thread.
    """
    guard = guarded(run, name=name, fail=fail, returns=returns, expected=expected)
    thread = threading.Thread(target=guard, args=args, name=name, daemon=True)
    thread.start()
    return thread


def guarded(
    run: Callable[..., object],
    *,
    name: str,
    fail: Fail = end_process,
    returns: bool = True,
    expected: tuple[type[BaseException], ...] = (),
) -> Callable[..., None]:
    """Return `run` as a callback whose error goes to `fail` instead of to the caller.

    Use it for callbacks of an event loop, which logs their errors and goes on.
    """

    def guard(*args: Any) -> None:
        try:
            run(*args)
        except expected:
            return
        except BaseException as error:  # noqa: BLE001, SystemExit ends a thread silently
            fail(error)
        else:
            if not returns:
                fail(BackgroundEnded(f"{name} must not return, but has returned."))

    return guard


def start_task(
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    fail: Fail = end_process,
    returns: bool = True,
) -> asyncio.Task[T]:
    """Start a task on the running event loop and return it.

    Args:
        work: The coroutine to run. Its cancellation is not a failure.
        name: Name of the task.
        fail: Called on the event loop with the error of `work`.
        returns: Whether `work` may return. If not, a return calls `fail` with BackgroundEnded.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)

    def ended(done: asyncio.Task[T]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None and not returns:
            error = BackgroundEnded(f"task {done.get_name()} must not return, but has returned.")
        if error is not None:
            fail(error)

    task.add_done_callback(guarded(ended, name=f"end of task {task.get_name()}"))
    return task
