"""Threads and asyncio tasks that nobody awaits: none of them ends unnoticed.

`start_thread` and `start_task` call `fail` with the error of the work. The default, `end_process`,
prints the traceback and ends the process, whose supervisor then treats it as dead. Pass another
`fail` where a failure must reach the callers in the same process instead. Work that must never
return, such as a sender, is started with `returns=False`: its end is a failure as well.
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

# Bound here, so that user code that replaces them changes nothing for us.
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
        run: called with `args` in the thread.
        name: name of the thread.
        fail: called in the thread with whatever `run` raises, SystemExit included.
        returns: whether `run` may return. If not, a return calls `fail` with BackgroundEnded.
        expected: exceptions that end the thread without a failure.

    Raises:
        RuntimeError: the system has no memory for another thread.
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
        except BaseException as error:  # noqa: BLE001, SystemExit ends a thread without a word
            fail(error)
        else:
            if not returns:
                fail(BackgroundEnded(f"{name} has returned, which it never should."))

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
        work: the coroutine to run. Its cancellation is not a failure.
        name: name of the task.
        fail: called on the event loop with the error of `work`.
        returns: whether `work` may return. If not, a return calls `fail` with BackgroundEnded.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)

    def ended(done: asyncio.Task[T]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None and not returns:
            error = BackgroundEnded(f"task {done.get_name()} has returned, which it never should.")
        if error is not None:
            fail(error)

    task.add_done_callback(guarded(ended, name=f"end of task {task.get_name()}"))
    return task
