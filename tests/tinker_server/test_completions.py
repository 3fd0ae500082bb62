"""One poll for all samples of a client misses none, even if answers are lost."""

from __future__ import annotations

import asyncio

from rlsys.tinker_server.ended_samples import Completions, EndedSample


def names(found: tuple[int, list[EndedSample]]) -> list[str]:
    return [one.request for one in found[1]]


def test_events_that_were_not_seen_are_returned_again() -> None:
    async def scenario() -> None:
        completions = Completions()
        for name in "abc":
            completions.add(EndedSample(request=name, size=1))
        first = await completions.wait(behind=0, timeout_s=0)
        assert (first[0], names(first)) == (3, ["a", "b", "c"])
        again = await completions.wait(behind=0, timeout_s=0)  # the answer was lost
        assert again == first
        completions.add(EndedSample(request="d", size=None))
        assert names(await completions.wait(behind=3, timeout_s=0)) == ["d"]
        assert names(await completions.wait(behind=4, timeout_s=0)) == []

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_a_poll_ends_with_its_session() -> None:
    async def scenario() -> None:
        completions = Completions()
        poll = asyncio.create_task(completions.wait(behind=0, timeout_s=1000))
        await asyncio.sleep(0)
        completions.wake()
        assert await poll == (0, [])

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_a_poll_ends_with_the_first_that_ends() -> None:
    async def scenario() -> None:
        completions = Completions()
        polls = [asyncio.create_task(completions.wait(behind=0, timeout_s=10)) for _ in range(2)]
        await asyncio.sleep(0)
        completions.add(EndedSample(request="a", size=1))
        assert [names(one) for one in await asyncio.gather(*polls)] == [["a"], ["a"]]
        assert await completions.wait(behind=1, timeout_s=0.01) == (1, [])

    asyncio.run(asyncio.wait_for(scenario(), 5))
