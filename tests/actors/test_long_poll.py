"""Long polls: nothing is lost between calls, and results that end together share a call."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from actors.cluster.long_poll import LongPoll
from rlsys.controller.simulation.virtual_time import run_in_virtual_time


def source(queue: asyncio.Queue[int]) -> Callable[[], Coroutine[Any, Any, list[int]]]:
    async def collect() -> list[int]:
        return [await queue.get()]

    return collect


def test_a_result_that_comes_after_a_call_belongs_to_the_next_one() -> None:
    async def run() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        poll = LongPoll(source(queue))
        assert await poll.within(1.0) == []
        await queue.put(1)
        await queue.put(2)
        assert await poll.within(1.0) == [1]
        assert await poll.within(1.0) == [2]

    run_in_virtual_time(run())


@pytest.mark.parametrize(("more", "expected"), [(True, [1, 2]), (False, [1])])
def test_results_that_end_together_share_a_call(more: bool, expected: list[int]) -> None:
    async def run() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        poll = LongPoll(source(queue))
        loop = asyncio.get_running_loop()
        loop.call_later(2.0, queue.put_nowait, 1)
        loop.call_later(2.0, queue.put_nowait, 2)
        assert await poll.gathered(0.5, lambda: more) == expected
        assert await poll.gathered(0.5) == [2][: 2 - len(expected)]

    run_in_virtual_time(run())


def test_an_error_reaches_the_caller_once() -> None:
    async def run() -> None:
        errors = iter([RuntimeError("dead"), None])

        async def collect() -> list[int]:
            if error := next(errors):
                raise error
            return [1]

        poll = LongPoll(collect)
        with pytest.raises(RuntimeError):
            await poll.within(1.0)
        assert await poll.within(1.0) == [1]

    run_in_virtual_time(run())


def test_an_error_after_the_last_call_is_not_logged() -> None:
    """An engine that is closed fails the collect that waits."""
    logged: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        is_closed = asyncio.Event()

        async def collect() -> list[int]:
            await is_closed.wait()
            raise RuntimeError("closed")

        poll = LongPoll(collect)
        assert await poll.within(1.0) == []
        is_closed.set()
        await asyncio.sleep(1.0)
        del poll
        gc.collect()

    run_in_virtual_time(run())
    assert not logged
