"""Waiting for a coroutine where no loop waits for it: in a script, a notebook or a thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

# For a thread that has been told to start, on a machine that is busy.
START_S = 60.0


def run_to_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `work()`, or raise its error.

    Ctrl-C, or a signal that raises CancelledError here, cancels the work, waits for it to end in
    good order, and is raised again. Where a loop runs in this thread already, as in a notebook, a
    thread of its own runs the work meanwhile.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run = _here  # called below: an error of the work has no other one before it
    else:
        run = _in_a_thread
    return run(work)


def _here(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work())
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        return asyncio.run(work())
    finally:
        signal.signal(signal.SIGINT, on_interrupt)  # the work may have set one of its own


def _in_a_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        started.set_result((asyncio.get_running_loop(), task))
        return await work()

    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(asyncio.run(cancellable()))
        except BaseException as error:  # noqa: BLE001, it is raised where it is waited for
            ended.set_exception(error)

    thread = threading.Thread(target=run, name="rlsys", daemon=True)
    try:
        thread.start()
        return ended.result()
    except (KeyboardInterrupt, asyncio.CancelledError):
        loop, task = started.result(START_S)
        with contextlib.suppress(RuntimeError):  # the loop has just closed
            loop.call_soon_threadsafe(task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            ended.result()
        raise
