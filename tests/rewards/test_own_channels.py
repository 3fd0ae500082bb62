"""Reward functions that break descriptors, functions or memory that their process needs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsys.rewards.process import time_limits
from rlsys.types import Rollout
from tests.rewards.reward_harness import Result, failure, rollout, run, running, score, total
from tests.tiers import rest_slow

NUM_ROWS = 64
PLACES = (0, 31, 63)

# Far more than a batch takes, and far less than the limit of a call.
BATCH_TIMEOUT_S = 120.0


def own_files() -> list[int]:
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]


def close_range() -> None:
    os.closerange(3, 256)


def write_to_all() -> None:
    for fd in own_files():
        with contextlib.suppress(OSError):
            os.write(fd, b"\xff" * 64)


def file_over_all() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in own_files():
        with contextlib.suppress(OSError):
            os.dup2(null, fd)


def socket_over_all() -> None:
    """Replace each descriptor by a socket that accepts all data.

    A copy of this process keeps the channel itself open.
    """
    if os.fork() == 0:
        while True:
            time.sleep(3600)
    ours, theirs = socket.socketpair()
    held = {ours.detach(), theirs.fileno()}
    for fd in set(own_files()) - held:
        with contextlib.suppress(OSError):
            os.dup2(theirs.fileno(), fd)
    theirs.detach()


def shut_down_all() -> None:
    for fd in own_files():
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(fd))
            one.shutdown(socket.SHUT_RDWR)


def exit_at_once() -> None:
    os._exit(5)


def end_main_thread() -> None:
    thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))


def replace_sendall() -> None:
    setattr(socket.socket, "sendall", lambda *_: time.sleep(3600))  # noqa: B010


def replace_start() -> None:
    setattr(threading.Thread, "start", lambda *_: None)  # noqa: B010


def replace_clock() -> None:
    time.monotonic = lambda: 1.0


def replace_os() -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("replaced")

    for name in ("close", "write", "read", "_exit", "getpid", "fstat"):
        setattr(os, name, fails)


FAILING: list[Callable[[], None]] = [
    close_range,
    write_to_all,
    file_over_all,
    socket_over_all,
    shut_down_all,
    exit_at_once,
]
HARMLESS: list[Callable[[], None]] = [replace_sendall, replace_start, replace_clock, replace_os]


def rewarding(act: Callable[[], None], *, is_async: bool) -> Any:
    """Return a reward that calls `act` for one row. Some of the others take a little longer."""

    def plain(rollout: Rollout) -> float:
        if rollout.completion_text == "guilty":
            act()
        elif rollout.index % 8 == 0:
            time.sleep(0.005)
        return float(rollout.index)

    async def awaited(rollout: Rollout) -> float:
        if rollout.index % 8 == 0:
            await asyncio.sleep(0.005)
        return plain(rollout)

    return awaited if is_async else plain


def batch_with(guilty: int) -> list[Rollout]:
    return [rollout(i, "guilty" if i == guilty else "2") for i in range(NUM_ROWS)]


def score_with_guilty_rows(act: Callable[[], None], *, is_async: bool = False) -> list[Result]:
    """Score a batch for each place of the guilty row, check the others and return its results."""

    async def scenario() -> list[Result]:
        found: list[Result] = []
        async with running(rewarding(act, is_async=is_async), concurrency=8) as runner:
            for place in PLACES:
                async with asyncio.timeout(BATCH_TIMEOUT_S):
                    results = await runner.score(batch_with(place))
                found.append(results.pop(place))
                expected = [float(i) for i in range(NUM_ROWS) if i != place]
                assert [total(result) for result in results] == expected
        return found

    return run(scenario)


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("act", rest_slow(FAILING, only=(exit_at_once,)))
def test_a_call_that_breaks_the_process_fails_alone(
    act: Callable[[], None], is_async: bool
) -> None:
    for result in score_with_guilty_rows(act, is_async=is_async):
        assert failure(result).kind == "crash"


def test_the_reason_names_what_was_broken() -> None:
    (result,) = score(rewarding(close_range, is_async=False), batch=[rollout(0, "guilty")])
    assert "file descriptors" in failure(result).message


@pytest.mark.parametrize("is_async", rest_slow([False, True]))
@pytest.mark.parametrize("act", HARMLESS)
def test_replaced_functions_change_nothing(act: Callable[[], None], is_async: bool) -> None:
    found = score_with_guilty_rows(act, is_async=is_async)
    assert [total(result) for result in found] == [float(place) for place in PLACES]


@pytest.mark.slow
def test_the_end_of_the_main_thread_costs_no_other_call_its_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exception may also end a thread that the main thread starts, before its call."""
    monkeypatch.setattr(time_limits, "IDLE_TIMEOUT_S", 3.0)
    score_with_guilty_rows(end_main_thread)


@pytest.mark.slow
@pytest.mark.parametrize("act", rest_slow([close_range, exit_at_once]))
def test_calls_that_have_not_begun_go_to_the_next_process(act: Callable[[], None]) -> None:
    """They are not retried alone: all of them run in one process."""

    def process_of(rollout: Rollout) -> dict[str, float]:
        if rollout.completion_text == "guilty":
            act()
        return {"pid": float(os.getpid())}

    first, *others = score(process_of, batch=batch_with(0), concurrency=1)
    assert failure(first).kind == "crash"
    assert len({total(result) for result in others}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("act", rest_slow([close_range, exit_at_once]))
def test_a_function_that_always_breaks_its_process_fails_each_call(act: Callable[[], None]) -> None:
    batch = [rollout(i, "guilty") for i in range(3)]
    results = score(rewarding(act, is_async=False), batch=batch, concurrency=2)
    assert [failure(result).kind for result in results] == ["crash"] * 3


@pytest.mark.slow
def test_a_process_that_answers_nothing_while_nothing_runs_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the head of a long message, the runner reads all outcomes as its body."""
    monkeypatch.setattr(time_limits, "IDLE_TIMEOUT_S", 3.0)

    def write_head() -> None:
        for fd in own_files():
            with contextlib.suppress(OSError):
                os.write(fd, struct.pack("<Q", 2**24))

    for result in score_with_guilty_rows(write_head):
        assert failure(result).kind == "crash"
        assert "3 s" in failure(result).message


@pytest.mark.slow
def test_a_table_that_was_overwritten_costs_no_other_call_its_reward() -> None:
    def overwrite_table() -> None:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "memfd:rewards" in line:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                ctypes.memset(start, 0xFF, end - start)

    score_with_guilty_rows(overwrite_table)


def test_code_in_the_process_finds_no_descriptor_of_the_table() -> None:
    def num_found(rollout: Rollout) -> float:
        links = Path("/proc/self/fd").iterdir()
        return float(sum("memfd:rewards" in os.path.realpath(link) for link in links))

    (result,) = score(num_found, batch=[rollout()])
    assert total(result) == 0.0


def test_calls_that_come_while_a_process_ends_are_scored_by_the_next() -> None:
    """The event loop of Ray's actors raises at a write to a closed connection."""
    uvloop = pytest.importorskip("uvloop")

    def ends(rollout: Rollout) -> float:
        if rollout.completion_text == "end":
            os._exit(9)
        return 1.0

    async def scenario() -> None:
        async with running(ends, concurrency=4) as runner:
            ending = asyncio.create_task(runner.score([rollout(0, "end")]))
            others = []
            while not ending.done():
                others.append(asyncio.create_task(runner.score([rollout(1, "go on")])))
                await asyncio.sleep(0.005)
            assert [failure(one).kind for one in await ending] == ["crash"]
            for scored in await asyncio.gather(*others):
                assert [total(one) for one in scored] == [1.0]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(asyncio.wait_for(scenario(), 300.0))
