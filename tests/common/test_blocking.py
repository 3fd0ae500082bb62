"""Running a coroutine from synchronous code."""

from __future__ import annotations

import asyncio
import signal

import pytest

from rlsys.common.run_sync import run_to_end
from tests.errors import error_about


async def fails() -> None:
    raise ValueError("the work's own")


def test_an_error_of_the_work_has_no_context() -> None:
    with error_about(ValueError, "own") as raised:
        run_to_end(fails)
    assert raised.value.__context__ is None


def test_an_error_is_raised_inside_a_running_loop() -> None:
    async def within() -> None:
        run_to_end(fails)

    with error_about(ValueError, "own"):
        asyncio.run(within())


def test_an_interrupt_cancels_the_work() -> None:
    ended = False

    async def waits() -> None:
        nonlocal ended
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(3600)
        finally:
            ended = True

    with pytest.raises(KeyboardInterrupt):
        run_to_end(waits)
    assert ended
