from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from rlsys.environments.workers.loop_watchdog import TICK_S, Blocked, LoopWatchdog, watched

PATIENCE_S = 60.0


def test_the_report_names_the_task_and_the_line() -> None:
    is_seen, is_blocked = threading.Event(), threading.Event()
    ticks: list[float] = []

    def sleep(seconds: float) -> None:
        ticks.append(seconds)
        if len(ticks) == 20:
            is_seen.set()

    begin: Callable[[], object] = is_blocked.set  # a call without a frame of its own

    def blocks() -> None:
        _ = begin(), is_seen.wait(PATIENCE_S)  # the line in the report

    async def seen() -> Blocked | None:
        watchdog = LoopWatchdog(limit_s=3 * TICK_S, sleep=sleep)
        found: list[Blocked | None] = []

        def watch() -> None:
            is_blocked.wait(PATIENCE_S)
            found.append(watchdog.watch(1000 * TICK_S))
            is_seen.set()

        thread = threading.Thread(target=watch)

        async def one() -> None:
            thread.start()
            blocks()

        await asyncio.create_task(one(), name="7.0.0")
        await asyncio.to_thread(thread.join, PATIENCE_S)
        return found[0]

    blocked = asyncio.run(seen())
    assert blocked is not None
    assert blocked.task == "7.0.0"
    assert blocked.seconds == 3 * TICK_S
    assert (
        "in blocks (_ = begin(), is_seen.wait(PATIENCE_S)  # the line in the report)"
        in blocked.where
    )
    assert __file__ in blocked.where
    assert blocked.where in blocked.message
    assert "3 s" in blocked.message


def test_a_running_loop_is_not_blocked() -> None:

    async def seen() -> Blocked | None:
        loop = asyncio.get_running_loop()

        def sleep(seconds: float) -> None:  # the loop has its turn meanwhile
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)

        watchdog = LoopWatchdog(limit_s=TICK_S, sleep=sleep)
        return await asyncio.to_thread(watchdog.watch, 200 * TICK_S)

    assert asyncio.run(seen()) is None


def test_watched_reports_a_blocked_loop() -> None:
    is_reported = threading.Event()
    reports: list[Blocked] = []

    def report(blocked: Blocked) -> None:
        reports.append(blocked)
        is_reported.set()

    async def blocks() -> None:
        with watched(report, limit_s=TICK_S):
            is_reported.wait(PATIENCE_S)  # the line in the report

    async def work() -> None:
        await asyncio.create_task(blocks(), name="7.0.0")

    asyncio.run(work())
    (blocked,) = reports
    assert blocked.task == "7.0.0"
    assert blocked.where.endswith(
        "in blocks (is_reported.wait(PATIENCE_S)  # the line in the report)"
    )
