"""Calls to an actor that works, hangs, is suspended or dies, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from ray.exceptions import (
    ObjectReconstructionFailedError,
    OutOfMemoryError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
)

from actors.cluster.calls import (
    CLOSE_TIMEOUT_S,
    KILLED,
    InputLost,
    Worker,
    WorkerDied,
    WorkerError,
    _unwrapped,
    end_all,
)
from actors.cluster.method_words import doing
from rlsys.controller.simulation.virtual_time import run_in_virtual_time

NEVER = 1e9

RAY_SAYS = """The actor died unexpectedly before finishing this task.
\tclass_name: RolloutActor
\tpid: 12
Its process has died. Exit detail: End of file. Some common causes include: (1) ..."""


RAY_KNOWS_NOTHING = """The actor died unexpectedly before finishing this task.
\tclass_name: EnvironmentActor
\tpid: 12
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes \
include: (1) ..."""


RAY_SAYS_OF_MEMORY = """5 worker(s) were killed due to the node running low on memory. Memory on the
node (IP: 127.0.0.1, ID: 63d4) was 22.85GB used / 23.54GB limit (0.970688)
Ray killed 5 worker(s) based on the killing policy
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
8326\t0.56\tray::StoreShard.beat
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io"""


class FakeActor:
    """Handle whose methods take the seconds that they are given; `close` takes `close_s`.

    An `ordered` actor runs one call after the other. It answers nothing once it is `stopped`, and
    fails everything once it is `dead`.
    """

    def __init__(
        self, *, ordered: bool = False, starts_at: float = 0.0, close_s: float = 0.0
    ) -> None:
        self.dead = asyncio.Event()
        self.stopped = False
        self.death: RayError = RayActorError(error_msg=RAY_SAYS)
        self.called: list[str] = []
        self._starts_at = starts_at
        self._close_s = close_s
        self._turn = asyncio.Semaphore(1 if ordered else 1000)

    def __getattr__(self, method: str) -> Any:
        return _Remote(lambda seconds=self._close_s: self._answer(method, seconds))

    async def _answer(self, method: str, seconds: float) -> str:
        self.called.append(method)
        await asyncio.sleep(max(0.0, self._starts_at - now()))
        if method in ("beat", "beside"):
            await self._work(seconds)
        else:
            async with self._turn:
                await self._work(seconds)
        return method

    async def _work(self, seconds: float) -> None:
        work = asyncio.ensure_future(asyncio.sleep(seconds))
        death = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
        if self.dead.is_set():
            raise self.death
        if self.stopped:
            await asyncio.sleep(NEVER)


class _Remote:
    def __init__(self, remote: Callable[..., Awaitable[Any]]) -> None:
        self.remote = remote


class FakeWorker(Worker):
    ended_at: float | None = None

    def _end_process(self) -> None:
        self.ended_at = now()


def now() -> float:
    return asyncio.get_running_loop().time()


def fake_worker(actor: Any, **options: Any) -> FakeWorker:
    return FakeWorker("rollout-0", actor, **{"timeout_s": NEVER, **options})


async def death_of(call: Awaitable[Any]) -> WorkerDied:
    with pytest.raises(WorkerDied) as death:
        await call
    return death.value


def run(main: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(main)


def test_a_call_past_its_limit_ends_the_worker_and_all_of_its_calls() -> None:
    async def main() -> None:
        actor = FakeActor()
        worker = fake_worker(actor, timeout_s=600)
        waiting = asyncio.create_task(worker.call("collect", NEVER, timeout_s=NEVER))
        assert await worker.call("place", 599) == "place"
        death = await death_of(worker.call("update_weights", 601))
        assert (death.worker, death.method) == ("rollout-0", "update_weights")
        assert doing("update_weights") in death.cause
        assert " 600 s" in death.cause
        assert worker.ended_at == now() == 599 + 600
        assert (await death_of(waiting)).cause == death.cause
        later = await death_of(worker.call("submit", 0))
        assert (later.method, later.cause) == ("submit", death.cause)
        assert "submit" not in actor.called  # nothing more is sent

    run(main())


def test_a_limit_runs_from_the_answer_to_the_call_before() -> None:
    async def main() -> None:
        worker = fake_worker(FakeActor(ordered=True), timeout_s=10, ordered=True)
        calls = [worker.start_call("accumulate", 9) for _ in range(5)]
        assert await asyncio.gather(*calls) == ["accumulate"] * 5
        assert now() == 45
        # The third hangs, and the fourth fails with it.
        calls = [
            worker.start_call(name, s) for name, s in [("a", 9), ("b", 9), ("c", NEVER), ("d", 1)]
        ]
        *answers, third, fourth = await asyncio.gather(*calls, return_exceptions=True)
        assert answers == ["a", "b"]
        assert isinstance(third, WorkerDied)
        assert isinstance(fourth, WorkerDied)
        assert fourth.method == "d"
        assert fourth.cause == third.cause
        assert doing("c") in fourth.cause
        assert worker.ended_at == 45 + 9 + 9 + 10

    run(main())


def test_an_unordered_call_shortens_no_limit() -> None:
    async def main() -> None:
        worker = fake_worker(FakeActor(ordered=True), timeout_s=10, ordered=True)
        calls = [worker.start_call(name, s) for name, s in [("a", 9), ("beside", 1), ("b", 9)]]
        assert await asyncio.gather(*calls) == ["a", "beside", "b"]
        assert now() == 18

    run(main())


def test_a_stopped_process_is_noticed_while_a_call_waits() -> None:
    async def main() -> None:
        actor = FakeActor()
        worker = fake_worker(actor, heartbeat_timeout_s=30)
        waiting = asyncio.create_task(worker.call("collect", NEVER))
        await asyncio.sleep(1000)
        assert worker.ended_at is None
        actor.stopped = True
        death = await death_of(waiting)
        assert death.method == "collect"
        assert "cluster.heartbeat_timeout_s" in death.cause
        assert worker.ended_at == now() <= 1030

    run(main())


def test_a_start_may_take_longer_than_a_heartbeat() -> None:
    async def main() -> None:
        worker = fake_worker(FakeActor(starts_at=200), heartbeat_timeout_s=30)
        assert await worker.call("start", 1, timeout_s=300) == "start"

    run(main())


def test_no_heartbeats_while_no_call_waits() -> None:
    async def main() -> None:
        actor = FakeActor()
        worker = fake_worker(actor, heartbeat_timeout_s=30)
        await worker.call("start", 1)
        await asyncio.sleep(100)
        num_calls = len(actor.called)
        await asyncio.sleep(1000)
        assert len(actor.called) == num_calls
        actor.stopped = True  # noticed by the next call
        death = await death_of(worker.call("score", 0))
        assert "cluster.heartbeat_timeout_s" in death.cause

    run(main())


def test_the_death_of_a_watched_worker_is_noticed_at_once() -> None:
    async def main() -> None:
        actor = FakeActor()
        worker = fake_worker(actor, heartbeat_timeout_s=30)
        watching = asyncio.create_task(worker.watch())
        await asyncio.sleep(100.5)
        actor.dead.set()
        death = await death_of(watching)
        assert (death.worker, death.method) == ("rollout-0", "")
        assert str(death) == f"rollout-0 died: {death.cause}"  # without a method's name
        assert death.cause == "Its process has died. Exit detail: End of file"
        assert now() == 100.5

    run(main())


def test_no_time_passes_while_this_process_is_suspended() -> None:
    """The clock jumps over an hour, as after a machine's sleep, and then the answer comes."""

    async def main() -> None:
        worker = fake_worker(FakeActor(), timeout_s=600)
        loop = asyncio.get_running_loop()
        clock, slept_s = loop.time, 0.0
        loop.time = lambda: clock() + slept_s  # type: ignore[method-assign]
        waiting = asyncio.create_task(worker.call("score", 3700))
        await asyncio.sleep(50)
        slept_s = 3600
        assert await waiting == "score"

    run(main())


def test_ending_all_waits_for_each_worker_up_to_a_limit() -> None:
    async def main() -> None:
        dead, quick, hanging = FakeActor(), FakeActor(close_s=2), FakeActor(close_s=NEVER)
        busy = FakeActor(ordered=True)  # with a call that never ends
        workers = [fake_worker(actor) for actor in (dead, quick)]
        workers[0].end("killed")
        await end_all(workers)
        assert [worker.ended_at for worker in workers] == pytest.approx([0, 2])

        hung = [fake_worker(hanging), fake_worker(busy, ordered=True)]
        calling = asyncio.create_task(hung[1].call("accumulate", NEVER))
        await asyncio.sleep(1)
        await end_all(hung)
        assert [worker.ended_at for worker in hung] == pytest.approx([3 + CLOSE_TIMEOUT_S] * 2)
        assert (await death_of(calling)).cause == KILLED

    run(main())


def test_the_cause_of_a_killed_worker_is_its_end() -> None:
    async def main() -> None:
        worker = fake_worker(FakeActor())
        waiting = asyncio.create_task(worker.call("collect", NEVER))
        await asyncio.sleep(1)
        worker.kill()
        death = await death_of(waiting)
        assert (death.worker, death.method) == ("rollout-0", "collect")
        assert death.cause == KILLED

    run(main())


def test_the_cause_of_an_out_of_memory_death_has_the_memory() -> None:
    async def main() -> None:
        actor = FakeActor()
        actor.death = OutOfMemoryError(RAY_SAYS_OF_MEMORY)
        worker = fake_worker(actor)
        call = asyncio.create_task(worker.call("submit", NEVER))
        await asyncio.sleep(1)
        actor.dead.set()
        death = await death_of(call)
        assert (death.worker, death.method) == ("rollout-0", "submit")
        assert "22.85GB of 23.54GB" in death.cause

    run(main())


def test_an_unexplained_death_has_a_readable_cause() -> None:
    async def main() -> None:
        actor = FakeActor()
        actor.death = RayActorError(error_msg=RAY_KNOWS_NOTHING)
        call = asyncio.create_task(fake_worker(actor).call("collect", NEVER))
        await asyncio.sleep(1)
        actor.dead.set()
        death = await death_of(call)
        assert (death.worker, death.method) == ("rollout-0", "collect")
        assert "os._exit" in death.cause
        assert "The actor is dead" not in death.cause

    run(main())


@pytest.mark.parametrize(
    "cause",
    [
        RayActorError(error_msg=RAY_SAYS),
        ObjectReconstructionFailedError("ab"),
        OwnerDiedError("ab", None, ""),
    ],
)
def test_a_lost_argument_is_distinguished_from_an_error(cause: RayError) -> None:
    error = _unwrapped("trainer-0", "take", RayTaskError("take", "trace", cause))
    assert isinstance(error, InputLost)
    assert str(error).startswith("trainer-0 ")
    other = _unwrapped("trainer-0", "take", RayTaskError("take", "trace", KeyError("a")))
    assert type(other) is WorkerError
