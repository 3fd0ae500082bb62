"""Futures in memory: waiters get their answers, and nothing is kept for ever."""

from __future__ import annotations

import asyncio

from rlsys.tinker_server.futures import Answer, Failure, Futures
from tests.tinker_server.clocks import Clock
from tests.tinker_server.refusals import refused


def test_all_waiters_get_the_answer_at_once() -> None:
    async def scenario() -> None:
        futures = Futures(Clock())
        futures.open("a", owner="s")
        waiting = [asyncio.create_task(futures.wait("a", 10.0)) for _ in range(3)]
        await asyncio.sleep(0)
        futures.finish("a", Answer(body=b"x"))
        assert await asyncio.gather(*waiting) == [Answer(body=b"x")] * 3
        futures.finish("a", Failure(message="too late", category="user"))
        assert await futures.wait("a", 0.0) == Answer(body=b"x")

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_a_pending_future_is_none_after_the_time_limit() -> None:
    async def scenario() -> None:
        futures = Futures(Clock())
        futures.open("a", owner="s")
        assert await futures.wait("a", 0.01) is None
        assert futures.num_pending == 1

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_fetched_results_expire_after_a_minute_and_others_after_an_hour() -> None:
    clock = Clock()
    futures = Futures(clock, keep_s=3600, fetched_keep_s=60)
    for name in "abc":
        futures.open(name, owner="s")
    for name in "ab":
        futures.finish(name, Answer(body=b"x"))
    futures.fetched(["a", "c", "unknown"])
    clock.now += 61
    futures.expire()
    assert ["a" in futures, "b" in futures, "c" in futures] == [False, True, True]
    clock.now += 3600
    futures.expire()
    assert ["b" in futures, "c" in futures] == [False, True]  # a pending one is never dropped
    with refused("request_id", "a", status=410):
        asyncio.run(futures.wait("a", 0.0))


def test_beyond_the_memory_the_oldest_answers_go() -> None:
    futures = Futures(Clock(), max_bytes=250)
    for name in "abc":
        futures.open(name, owner="s")
        futures.finish(name, Answer(body=bytes(100)))
    assert ["a" in futures, "b" in futures, "c" in futures] == [False, True, True]


def test_too_many_pending_ones_are_refused() -> None:
    futures = Futures(Clock(), max_pending=2)
    futures.open("a", owner="s")
    futures.open("b", owner="s")
    with refused("max_pending", 2, status=429):
        futures.open("c", owner="s")
    futures.finish("a", Answer(body=b""))
    futures.open("c", owner="s")


def test_with_a_session_its_futures_end_and_pending_ones_fail() -> None:
    async def scenario() -> None:
        futures = Futures(Clock())
        futures.open("a", owner="s")
        futures.open("b", owner="other")
        waiting = asyncio.create_task(futures.wait("a", 10.0))
        await asyncio.sleep(0)
        futures.drop_all_of("s")
        assert await waiting == Failure(message="session s has ended.", category="user")
        assert "a" not in futures
        assert "b" in futures

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_a_session_with_many_pending_requests_leaves_room_for_others() -> None:
    futures = Futures(Clock(), max_pending=5, max_pending_of_owner=3)
    for name in "abc":
        futures.open(name, owner="flood")
    with refused("max_pending_of_session", 3, status=429):
        futures.open("d", owner="flood")
    futures.open("e", owner="other")
    futures.finish("a", Answer(body=b"x"))
    futures.finish("a", Answer(body=b"again"))
    futures.open("d", owner="flood")
    futures.open("f", owner="other")
    with refused("max_pending", 5, status=429):
        futures.open("g", owner="other")
    futures.drop_all_of("flood")
    for name in "hij":
        futures.open(name, owner="flood")
