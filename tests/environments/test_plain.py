"""Synchronous functions, which may block, in their own process."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import rlsys
from rlsys.environments.environment import Environment
from rlsys.environments.episode_host import EpisodeHost
from rlsys.environments.tokens.codec import Codec
from rlsys.environments.workers import sync_worker
from rlsys.environments.workers.sync_worker import SyncWorkerFunctions
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.rewards import sandbox
from tests.environments.playing import CHARACTERS, LIMITS, Scripted, played, request
from tests.tiers import rest_slow


@rlsys.environment(max_turns=4)
def guess(chat: Any, task: Any) -> dict[str, float]:
    number = chat("?", parse=int)
    while number != task["number"] and not chat.done:
        chat.reward(-0.25)
        number = chat("<" if number > task["number"] else ">", parse=int)
    return {"right": float(number == task["number"]), "pid": float(os.getpid())}


@rlsys.environment(num_retries=0, timeout_s=2.0)
def odd(chat: Any, task: Any) -> float:
    chat("1")
    if task["does"] == "raise":
        raise OSError("no server")
    if task["does"] == "hang in C":
        ctypes.CDLL(None).sleep(3600)
    if task["does"] == "hang":
        while True:
            time.sleep(0.01)
    if task["does"] == "exit":
        os._exit(3)
    if task["does"] == "nonsense":
        return object()  # type: ignore[return-value]
    return 1.0


@rlsys.environment
def forks(chat: Any, task: Any) -> float:
    chat.system("2")
    chat("1")
    other = chat.fork()
    return float(chat("3")) + float(other("4")) + len(other.messages)


@rlsys.environment(max_turns=3, seats=("first", "second"))
def seats(chat: Any, task: Any) -> float:
    one, two = chat.seat("first"), chat.seat("second")
    two("1")
    two("2")
    assert not one.done
    two("3")
    return float(one.done and chat.done and one.fork().done)


@rlsys.environment(num_retries=0)
def numbers(chat: Any, task: Any) -> Any:
    chat("1")
    return {"numpy": np.float32(0.5), "bool": np.bool_(True)} if task["numpy"] else late()


async def late() -> float:
    return 1.0


@asynccontextmanager
async def hosting(environment: Environment, says: Any) -> AsyncIterator[EpisodeHost]:
    codec = Codec(build_tokenizer(CHARACTERS), chat_template="")
    functions = SyncWorkerFunctions(environment, memory_gib=4.0, start_timeout_s=120.0)
    host = EpisodeHost(environment, codec, Scripted(codec, says), limits=LIMITS, executor=functions)
    await host.start()
    try:
        yield host
    finally:
        await host.close()


def test_an_episode_ends_for_all_of_its_chats() -> None:
    async def run() -> None:
        async with hosting(seats, lambda text: "5") as host:
            (ended,) = await played(host, [request()])
        assert ended.played is not None, ended.failure
        assert ended.played.total == 1.0

    asyncio.run(run())


def test_results_are_those_of_an_async_function() -> None:
    async def run() -> None:
        async with hosting(numbers, lambda text: "5") as host:
            well, ill = await played(host, [request(n, task={"numpy": 1 - n}) for n in range(2)])
        assert well.played is not None, well.failure
        assert well.played.components == {"numpy": 0.5, "bool": 1.0}
        assert ill.failure is not None
        assert ill.failure.kind == "type"
        assert "await" in ill.failure.message

    asyncio.run(run())


def test_a_synchronous_environment_plays_like_an_async_one() -> None:
    async def run() -> None:
        replies = iter(["9", "7", "8"])
        async with hosting(guess, lambda text: next(replies)) as host:
            (ended,) = await played(host, [request(task={"number": 8})])
        assert ended.played is not None, ended.failure
        components = dict(ended.played.components)
        assert components.pop("pid") != os.getpid()
        assert components == {"turns": -0.5, "right": 1.0}

    asyncio.run(run())


def test_rejected_replies_and_forks() -> None:
    async def run() -> None:
        async with hosting(guess, lambda text: "<") as host:
            (ended,) = await played(host, [request(task={"number": 8})])
            assert ended.played is not None, ended.failure
            assert ended.played.components == {"final": 0.0}
        async with hosting(forks, lambda text: "5" if text.endswith("3") else "6") as host:
            (ended,) = await played(host, [request()])
            assert ended.played is not None, ended.failure
            assert ended.played.total == 5 + 6 + 5
            assert ended.played.trajectory.num_branches == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    rest_slow(
        [
            ("raise", "exception", "no server"),
            ("hang", "timeout", "timeout_s=2"),
            ("hang in C", "timeout", "timeout_s=2"),
            ("exit", "crash", "process"),
            ("nonsense", "type", "odd returned"),
        ],
        only=[("raise", "exception", "no server")],
    ),
)
def test_a_faulty_function_fails_its_own_episode_only(does: str, kind: str, message: str) -> None:
    async def run() -> None:
        async with hosting(odd, lambda text: "5") as host:
            ill, *_ = await played(host, [request(0, task={"does": does})])
            well = await played(host, [request(n, task={"does": ""}) for n in range(1, 4)])
        assert ill.failure is not None
        assert (ill.failure.kind, message in ill.failure.message) == (kind, True)
        assert [one.played is not None for one in well] == [True] * 3

    asyncio.run(run())


@rlsys.environment(num_retries=0, timeout_s=60.0)
def beside(chat: Any, task: Any) -> float:
    """Some end the process, or hold Python's GIL, while others run."""
    chat("1")
    if task["does"] == "crash":
        ctypes.string_at(0)
    if task["does"] == "hold":
        ctypes.PyDLL(None).sleep(3600)
    time.sleep(0.5)
    return 1.0


@pytest.mark.parametrize("does", ["crash", pytest.param("hold", marks=pytest.mark.slow)])
def test_only_the_episode_that_ends_the_process_fails(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_worker, "SILENT_S", 5.0)

    async def run() -> None:
        async with hosting(beside, lambda text: "5") as host:
            tasks = [{"does": does}, *[{"does": ""}] * 3]
            ill, *well = await played(host, [request(n, task=t) for n, t in enumerate(tasks)])
        assert ill.failure is not None
        assert ill.failure.kind == "crash"
        assert [one.failure for one in well] == [None] * 3

    asyncio.run(run())


@rlsys.environment(num_retries=0)
def long(chat: Any, task: Any) -> float:
    chat("1" * task["length"])
    return float(threading.active_count())


def test_a_function_whose_chat_failed_leaves_no_thread() -> None:
    async def run() -> None:
        async with hosting(long, lambda text: "5") as host:
            ill = [request(n, task={"length": 1000}) for n in range(8)]
            for one in await played(host, ill):
                assert one.failure is not None
                assert "1000 tokens" in one.failure.message
            num_threads = 9.0
            async with asyncio.timeout(30):
                while num_threads > 2:  # the main one, and its own
                    (one,) = await played(host, [request(9, task={"length": 1})])
                    assert one.played is not None
                    num_threads = one.played.total

    asyncio.run(run())


def test_blocking_functions_run_concurrently() -> None:
    @rlsys.environment
    def slow(chat: Any, task: Any) -> float:
        for _ in range(2):
            time.sleep(0.5)
            chat("1")
        return 1.0

    async def run() -> float:
        async with hosting(slow, lambda text: "5") as host:
            start = time.monotonic()
            ended = await played(host, [request(n) for n in range(64)])
            assert all(one.played is not None for one in ended)
            return time.monotonic() - start

    assert asyncio.run(run()) < 32  # one after another they take 64 s


def test_close_ends_the_process() -> None:
    async def run() -> int:
        async with hosting(guess, lambda text: "8") as host:
            (ended,) = await played(host, [request(task={"number": 8})])
            assert ended.played is not None
            return int(ended.played.components["pid"])

    pid = asyncio.run(run())
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}"):  # nothing announces the end of another's child
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


@rlsys.environment(num_retries=0)
def replaces_json(chat: Any, task: Any) -> float:
    def dumps(value: Any) -> bytes:
        return b"replaced"

    json.dumps = dumps  # type: ignore[assignment]
    return float(len(chat("1")))


def test_a_function_that_replaces_json_is_played() -> None:
    async def run() -> None:
        async with hosting(replaces_json, lambda text: "55") as host:
            (ended,) = await played(host, [request()])
        assert ended.played is not None, ended.failure
        assert ended.played.total == 2.0

    asyncio.run(asyncio.wait_for(run(), 300))


@rlsys.environment(timeout_s=3.0, num_retries=0)
def runs_programs(chat: Any, task: Any) -> float:
    result = sandbox.run_sync("while True: pass", timeout_s=1.0)
    chat("1")
    return float(result.reason == "time")


@pytest.mark.slow
def test_waiting_for_the_sandbox_does_not_count_for_timeout_s() -> None:
    """Four programs of a second for each processor, and three seconds for an episode."""
    num = 4 * len(os.sched_getaffinity(0))

    async def run() -> None:
        async with hosting(runs_programs, lambda text: "5") as host:
            ended = await played(host, [request(n) for n in range(num)])
        assert [one.failure for one in ended] == [None] * num
        assert all(one.played is not None and one.played.total == 1.0 for one in ended)

    asyncio.run(asyncio.wait_for(run(), 300))
