"""Signals, and the end of the program, end the run in good order: they cancel its task."""

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

LOOK_EVERY_S = 0.5  # whether the main thread still runs

AGAIN_S = 0.05  # until a signal is tried again that must not raise yet
HOLDING_LOCKS = {subprocess.__file__, logging.__file__}

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def cancel_on_signals() -> None:
    """Ctrl-C and SIGTERM end the run in good order; so do a terminal that closes (SIGHUP, unless
    nohup has switched that off) and SIGQUIT. A second one shortens the end: what waits there waits
    no longer. asyncio.run would raise KeyboardInterrupt at a second Ctrl-C, out of whatever runs,
    and leave the loop with the run's end undone. Signals come to the main thread only.
    """
    if _is_main() and (task := asyncio.current_task()) is not None:
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                # The loop wakes up, and takes the handler away at its end. It would call one of its
                # own only when it comes to it: nobody could see by then that the run is to end.
                asyncio.get_running_loop().add_signal_handler(number, lambda: None)
                signal.signal(number, lambda *_: task.cancel())
                signal.siginterrupt(number, False)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """A signal that comes in the block, which the event loop waits for, raises CancelledError
    there; so does, at once, an end of this task that was asked for before.

    But not within a fork or a line of the log: these hold locks of Python's own, which would stay
    locked for ever. There it waits for a moment. Ray's own handler would raise everywhere.
    """
    if not _is_main():  # no handler runs in another thread
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
    set_rays_own = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    for number in before.keys() - {signal.SIGALRM}:
        signal.signal(number, end)
    try:
        _check_wanted()
        yield
    finally:
        is_over = True
        if received:
            signal.setitimer(signal.ITIMER_REAL, 0)
        ray_utils.set_sigterm_handler = set_rays_own
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            raise asyncio.CancelledError(signal.Signals(received[0]).name)


def with_own_handlers(call: Callable[..., T], *args: Any, **named: Any) -> T:
    """Call a function of Ray's that installs handlers in C++, and put Python's back.

    Those handlers print a stack trace and end the process. Signals that come meanwhile wait until
    Python's are there again.
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


def _check_wanted() -> None:
    """Raise CancelledError where the end of this task has been asked for."""
    with contextlib.suppress(RuntimeError):  # no loop runs
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError


def _holds_locks(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in HOLDING_LOCKS:
            return True
        frame = frame.f_back
    return False


async def cancel_without_main_thread(task: asyncio.Task[object]) -> None:
    """Cancel the task of a run in another thread when the main thread has ended: Python waits for
    the other threads then, and no signal reaches them.
    """
    while threading.main_thread().is_alive() and not task.done():
        await asyncio.wait([task], timeout=LOOK_EVERY_S)
    task.cancel()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
