"""Time limits count while a call works, not while it waits for a resource."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rlsys.common.call_clock import Stopwatch, clocked, waiting


class Time:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def test_a_stopwatch_counts_the_seconds_outside_of_its_pauses() -> None:
    now = Time()
    watch = Stopwatch(now)
    now.s = 1.0
    watch.pause()
    now.s = 5.0
    watch.pause()
    watch.resume()
    assert watch.elapsed_s == 1.0
    now.s = 7.0
    watch.resume()
    now.s = 7.5
    assert watch.elapsed_s == 1.5


def test_waiting_stops_every_clock_of_the_call_until_the_work_begins() -> None:
    now = Time()
    outer, inner = Stopwatch(now), Stopwatch(now)
    with clocked(outer), clocked(inner), waiting() as begin:
        now.s = 10.0
        begin()
        begin()
        now.s = 11.0
    now.s = 12.0
    assert outer.elapsed_s == inner.elapsed_s == 2.0
    with waiting():  # no clock is known here
        now.s = 13.0
    assert outer.elapsed_s == 3.0


@pytest.mark.parametrize("where", ["task", "thread"])
def test_clocks_follow_the_call_into_tasks_and_threads(where: str) -> None:
    now = Time()
    watch = Stopwatch(now)

    def wait() -> None:
        with waiting():
            now.s += 4.0

    async def wait_in_task() -> None:
        wait()

    async def scenario() -> None:
        with clocked(watch):
            task = asyncio.create_task(
                wait_in_task() if where == "task" else asyncio.to_thread(wait)
            )
        await task

    asyncio.run(scenario())
    assert now.s == 4.0
    assert watch.elapsed_s == 0.0


def test_the_work_may_begin_in_another_thread() -> None:
    now = Time()
    watch = Stopwatch(now)
    with clocked(watch), waiting() as begin:
        now.s = 3.0
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        now.s = 4.0
    assert watch.elapsed_s == 1.0
