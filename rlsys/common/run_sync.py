"""Running a coroutine from synchronous code: a script, a notebook or a thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

# Time limit for the start of a thread on a busy machine.
START_S = 60.0


def run_to_end(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of `work()`, or raise its error.

    Ctrl-C, or a signal that raises CancelledError here, cancels the work, waits for its end, and is
    raised again. If this thread already runs an event loop, as in a notebook, another thread runs
    the work.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run = _here  # called below, so that errors of the work have no __context__
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
        signal.signal(signal.SIGINT, on_interrupt)  # the work may have replaced it


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
        except BaseException as error:  # noqa: BLE001, raised by the waiting thread
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
