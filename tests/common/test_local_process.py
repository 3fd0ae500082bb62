"""Local processes: loaded or not, they end with all that they have started, and with a reason."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil
import pytest

from rlsys.common.local_process import LoadFailed, LocalProcess, ProcessEnded
from tests.rewards.reward_harness import PATIENCE_S, wait_until

T = TypeVar("T")
MARK = "LOCAL_PROCESS_TEST"


def new_process(**options: Any) -> LocalProcess:
    options = {"memory_gib": 1.0, "max_processes": 8, **options}
    environment = {**os.environ, MARK: str(os.getpid())}
    return LocalProcess("tests.common.local_services", environment=environment, **options)


def num_left() -> int:
    """Return the number of processes of this test that have not ended."""
    num = 0
    for process in psutil.process_iter():
        try:
            is_own = process.environ().get(MARK) == str(os.getpid())
            num += is_own and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
    return num


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    result = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    wait_until(lambda: num_left() == 0)
    return result


async def reason_after(act: str, value: object = None, **options: Any) -> str:
    """Return the reason of the end of a process that does this."""
    process = new_process(**options)
    await process.start({"does": ""}, timeout_s=PATIENCE_S)
    process.send((act, value))
    await process.serve(lambda message: None)
    ending = await process.end()
    assert ending.is_out_of_memory == (act == "take memory")
    return ending.reason


def test_messages_arrive_in_order_until_the_process_is_killed_with_its_children() -> None:
    async def scenario() -> list[Any]:
        process = new_process()
        await process.start({"does": ""}, timeout_s=PATIENCE_S)
        received: list[Any] = []

        def take(message: Any) -> None:
            received.append(message)
            if len(received) == 4:
                assert num_left() == 3  # its supervisor, the process and the child in a session
                process.kill("is no longer needed")

        for act, value in [("echo", "a" * 100_000), ("echo", [1, {"b": None}]), ("fork", None)]:
            process.send((act, value))
        process.send(("echo", "last"))
        await process.serve(take)
        assert (await process.end()).reason == "is no longer needed"
        process.send(("echo", "is ignored"))
        return received

    assert run(scenario) == [
        {"echo": "a" * 100_000},
        {"echo": [1, {"b": None}]},
        {"forked": True},
        {"echo": "last"},
    ]


def test_descriptors_are_shared() -> None:
    async def scenario() -> bytes:
        ours, theirs = socket.socketpair()
        process = new_process()
        await process.start({"does": ""}, timeout_s=PATIENCE_S, shared_fds=[theirs.fileno()])
        theirs.close()
        process.send(("share", b"through another socket"))
        with ours:
            received = await asyncio.to_thread(ours.recv, 100)
        await process.end()
        return received

    assert run(scenario) == b"through another socket"


@pytest.mark.parametrize(
    ("does", "error", "part"),
    [("raise", LoadFailed, "the cause"), ("exit", ProcessEnded, "exit code 3")],
)
def test_code_that_cannot_be_loaded_is_an_error_with_its_reason(
    does: str, error: type[Exception], part: str
) -> None:
    async def scenario() -> str:
        with pytest.raises(error) as raised:
            await new_process().start({"does": does}, timeout_s=PATIENCE_S)
        return str(raised.value)

    assert part in run(scenario)


def test_a_start_has_a_limit() -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await new_process().start({"does": "hang"}, timeout_s=0.5)

    run(scenario)


def test_a_cancelled_start_leaves_no_process() -> None:
    async def scenario() -> None:
        start = asyncio.create_task(new_process().start({"does": "hang"}, timeout_s=PATIENCE_S))
        await asyncio.to_thread(wait_until, lambda: num_left() > 0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run(scenario)


@pytest.mark.parametrize(
    ("act", "value", "part"),
    [
        ("exit", 5, "exit code 5"),
        ("raise", None, "ended itself"),
        ("forge", None, "file descriptors"),
        ("take memory", 150 * 2**20, "reward.memory_gib=0.25"),
    ],
)
def test_the_reason_of_an_end(act: str, value: object, part: str) -> None:
    assert part in run(lambda: reason_after(act, value, memory_gib=0.25))


def test_the_number_of_processes_is_limited() -> None:
    async def scenario() -> str:
        process = new_process(max_processes=3)
        await process.start({"does": ""}, timeout_s=PATIENCE_S)
        for _ in range(4):
            process.send(("fork", None))
        await process.serve(lambda message: None)
        return (await process.end()).reason

    assert "3 processes" in run(scenario)
