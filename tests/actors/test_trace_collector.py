"""Collection of the trace records of actors, over workers without processes."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.cluster.calls import WorkerDied
from actors.cluster.tracing import TraceCollector
from rlsys.common.async_condition import AsyncCondition
from rlsys.runs.observe.trace import TraceBatch, Tracer


class Actor:
    """Worker whose tracer has waited for `wait_s` since it was last asked."""

    def __init__(self, name: str, wait_s: float) -> None:
        self.name, self.wait_s, self.is_dead = name, wait_s, False

    async def call(self, method: str) -> TraceBatch:
        assert method == "drain_trace"
        if self.is_dead:
            raise WorkerDied(f"{self.name} died")
        return TraceBatch(self.name, [], 0, work_s=0.0, wait_s=self.wait_s)


def test_the_start_of_an_actor_is_no_time_of_waiting() -> None:
    workers: list[Any] = [Actor("rollout-0", 18.5), Actor("rollout-1", 20.0)]
    reported: list[tuple[str, float]] = []
    stepped = AsyncCondition()
    collector = TraceCollector(
        None,
        lambda: workers,
        tracer=Tracer("controller"),
        on_report=lambda report: reported.append((report.process, report.wait_s)),
    )

    async def scenario() -> None:
        running = asyncio.create_task(collector.run(stepped))

        async def step() -> None:
            stepped.notify()
            await _settled()

        await _settled()  # the replicas have started and loaded their weights
        assert reported == []
        workers[0].wait_s, workers[1].wait_s = 0.5, 0.25
        await step()
        assert reported == [("rollout-0", 0.5), ("rollout-1", 0.25)]

        workers[1].is_dead = True
        await step()
        workers[1] = Actor("rollout-1", 12.0)  # its successor
        reported.clear()
        await step()
        assert reported == [("rollout-0", 0.5)]
        workers[1].wait_s = 0.75
        await step()
        assert reported[-1] == ("rollout-1", 0.75)
        running.cancel()

    asyncio.run(scenario())


def test_an_actor_that_starts_delays_no_report() -> None:
    class Starting(Actor):
        async def call(self, method: str) -> TraceBatch:
            await started.wait()
            return await super().call(method)

    started = asyncio.Event()
    workers: list[Any] = [Actor("rollout-0", 0.5), Starting("environment-0.1", 9.0)]
    reported: list[str] = []
    stepped = AsyncCondition()
    collector = TraceCollector(
        None,
        lambda: workers,
        tracer=Tracer("controller"),
        on_report=lambda report: reported.append(report.process),
    )

    async def scenario() -> None:
        running = asyncio.create_task(collector.run(stepped))
        await _settled()
        for _ in range(2):
            stepped.notify()
            await _settled()
        assert reported == ["rollout-0", "rollout-0"]
        started.set()
        await _settled()
        stepped.notify()
        await _settled()
        assert sorted(reported[2:]) == ["environment-0.1", "rollout-0"]
        running.cancel()

    asyncio.run(scenario())


async def _settled() -> None:
    """Let the collector run until it waits for the next step."""
    for _ in range(20):
        await asyncio.sleep(0)
