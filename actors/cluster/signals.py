"""Signal handling: signals and the end of the program cancel the task of the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from ray._private import utils as ray_utils

T = TypeVar("T")

LOOK_EVERY_S = 0.5  # between checks that the main thread is alive

AGAIN_S = 0.05  # delay before a signal that must not raise yet is handled again
HOLDING_LOCKS = {subprocess.__file__, logging.__file__}

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def cancel_on_signals() -> None:
    """Cancel the current task on SIGINT, SIGTERM, SIGHUP and SIGQUIT.

    A signal that is ignored (SIGHUP under nohup) stays ignored. A second signal cancels what the
    cleanup waits for. asyncio.run would instead raise KeyboardInterrupt at a second Ctrl-C, out of
    any code, and leave the loop without cleanup. Only the main thread receives signals.
    """
    if _is_main() and (task := asyncio.current_task()) is not None:
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                # The loop's handler only wakes the loop, and is removed when it closes. The task is
                # cancelled in the signal handler itself, so that the cancellation is visible at
                # once.
                asyncio.get_running_loop().add_signal_handler(number, lambda: None)
                signal.signal(number, lambda *_: task.cancel())
                signal.siginterrupt(number, False)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Raise CancelledError inside the block when a signal arrives.

    Use it around blocking code, which keeps the event loop from handling signals. A task that was
    cancelled before raises at once. Within a fork or a logging call, which hold locks of Python's
    own that would stay locked, the signal is deferred. Ray's own handler would raise everywhere.
    """
    if not _is_main():  # signal handlers run in the main thread only
        yield
        return
    received: list[int] = []
    is_over = False

    def end(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            received.append(number)
        if is_over:
            return
        if _holds_locks(frame):
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            raise asyncio.CancelledError

    handlers = {n: signal.getsignal(n) for n in (signal.SIGALRM, *ENDING)}
    ignored = (None, signal.SIG_IGN)
    before = {number: own for number, own in handlers.items() if own not in ignored}
    set_ray_handler = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    for number in before.keys() - {signal.SIGALRM}:
        signal.signal(number, end)
    try:
        _raise_if_cancelled()
        yield
    finally:
        is_over = True
        if received:
            signal.setitimer(signal.ITIMER_REAL, 0)
        ray_utils.set_sigterm_handler = set_ray_handler
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            raise asyncio.CancelledError(signal.Signals(received[0]).name)


def with_own_handlers(call: Callable[..., T], *args: Any, **named: Any) -> T:
    """Call a function of Ray that installs handlers in C++, and restore Python's handlers.

    Ray's handlers print a stack trace and end the process. Signals are blocked meanwhile.
    """
    if not _is_main():
        return call(*args, **named)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        return call(*args, **named)
    finally:
        for number in ENDING:
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled before."""
    with contextlib.suppress(RuntimeError):  # no event loop is running
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError


def _holds_locks(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in HOLDING_LOCKS:
            return True
        frame = frame.f_back
    return False


async def cancel_without_main_thread(task: asyncio.Task[object]) -> None:
    """Cancel the task of a run in another thread when the main thread has ended.

    Python then waits for the other threads, which receive no signals.
    """
    while threading.main_thread().is_alive() and not task.done():
        await asyncio.wait([task], timeout=LOOK_EVERY_S)
    task.cancel()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
