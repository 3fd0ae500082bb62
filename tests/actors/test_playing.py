"""Environment workers that their episodes kill: real processes, an engine that answers at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest

import rlsys
from actors.environment.episode_replica import EpisodeReplica
from rlsys.controller.worker_protocols import FinishedRollout
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import GenerationRequest, Task
from scripts.bench.environment_actors import playing, requests
from tests.clusters import joined_cluster

PATIENCE_S = 900.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with joined_cluster(__file__, num_cpus=2):
        yield


@rlsys.environment(plain_text=True, max_turns=8)
async def some_kill_it(chat: Any, task: Any) -> float:
    await chat("5")
    await asyncio.sleep(0.05)
    await chat("7")
    if task["does"] == "exit":
        os._exit(3)
    if task["does"] == "block":
        time.sleep(3600)  # noqa: ASYNC251 - blocks on purpose
    return 1.0


@rlsys.environment(plain_text=True, max_turns=8, group_reward=lambda group: [1.0] * len(group))
async def judged_together(chat: Any, task: Any) -> float:
    await chat("5")
    if task["does"] == "exit":
        os._exit(3)
    return 1.0


async def played(
    replica: EpisodeReplica, num: int, during: Callable[[], None] = lambda: None
) -> dict[int, FinishedRollout]:
    """Return the ended episodes by number."""
    collected: dict[int, FinishedRollout] = {}
    async with asyncio.timeout(PATIENCE_S):
        while len(collected) < num:
            for rollout in (await replica.collect()).finished:
                number = int(rollout.request_id.split(".")[0])
                assert number not in collected
                collected[number] = rollout
            during()
    return collected


def failures(collected: dict[int, FinishedRollout]) -> dict[int, str]:
    failed: dict[int, str] = {}
    for number, rollout in collected.items():
        if isinstance(rollout.outcome, RewardFailure):
            failed[number] = rollout.outcome.message
        else:
            assert isinstance(rollout.outcome, RewardResult)
            assert rollout.num_tokens
    return failed


def does(what: dict[int, str]) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"does": what.get(number, "")}


@pytest.mark.slow
def test_only_episodes_that_kill_their_process_fail() -> None:
    async def scenario() -> tuple[dict[int, str], list[str], int]:
        deaths: list[str] = []
        async with playing(some_kill_it, on_death=deaths.append) as replica:
            await replica.submit(requests(60, does({7: "exit", 41: "exit"})), {})
            failed = failures(await played(replica, 60))
            return failed, deaths, len(replica.workers)

    failed, deaths, num_workers = asyncio.run(scenario())
    assert set(failed) == {7, 41}
    for message in failed.values():
        assert message.startswith("some_kill_it ")
        assert "os._exit" in message
    together = [one for one in deaths if "replays 60 episodes" in one]
    assert len(together) == 1
    assert len(deaths) <= 2 * 2 + 2 * 3  # ⌈log₄ 60⌉ = 3
    assert num_workers == 3  # engine, player and standby; workers of isolated episodes have ended


@pytest.mark.slow
def test_the_failure_of_an_episode_that_blocks_the_event_loop_has_its_line() -> None:
    async def scenario() -> tuple[dict[int, str], list[str]]:
        deaths: list[str] = []
        async with playing(some_kill_it, on_death=deaths.append, blocked_s=3.0) as replica:
            await replica.submit(requests(60, does({11: "block"})), {})
            return failures(await played(replica, 60)), deaths

    failed, deaths = asyncio.run(scenario())
    assert set(failed) == {11}
    assert failed[11].startswith("some_kill_it ")
    assert " 3 s " in failed[11]
    assert "time.sleep(3600)" in failed[11]
    assert __file__ in failed[11]
    assert len(deaths) == 2
    assert " 59 episodes" in deaths[0]
    assert "isolated" in deaths[0]


@pytest.mark.slow
def test_a_group_that_is_rewarded_as_a_whole_is_played_together() -> None:
    def grouped(num_groups: int) -> Sequence[GenerationRequest]:
        return [
            replace(
                one,
                request_id=f"{number}.{number % 2}.0",
                task=Task(
                    row=does({5: "exit"})(number),
                    group_id=number // 2,
                    index=number % 2,
                    group_size=2,
                ),
            )
            for number, one in enumerate(requests(2 * num_groups, does({})))
        ]

    async def scenario() -> dict[int, str]:
        async with playing(judged_together) as replica:
            await replica.submit(grouped(10), {})
            return failures(await played(replica, 20))

    assert set(asyncio.run(scenario())) == {4, 5}


@pytest.mark.slow
def test_suspected_episodes_that_are_aborted_have_no_outcome() -> None:
    async def scenario() -> tuple[dict[int, FinishedRollout], list[str]]:
        deaths: list[str] = []
        async with playing(some_kill_it, on_death=deaths.append) as replica:
            await replica.submit(requests(8, does(dict.fromkeys(range(8), "exit"))), {})
            aborting: list[asyncio.Task[None]] = []

            def abort() -> None:
                if len(deaths) == 2 and not aborting:
                    names = [f"{number}.0.0" for number in range(8)]
                    aborting.append(asyncio.create_task(replica.abort(names)))

            return await played(replica, 8, abort), deaths

    collected, deaths = asyncio.run(scenario())
    assert [one.outcome for one in collected.values()] == [None] * 8
    assert len(deaths) <= 2 + 4  # four parts were being played


@pytest.mark.slow
def test_a_killed_standby_worker_is_replaced_and_no_episode_is_suspected() -> None:
    # The standby worker dies twice, and both workers once at the same time. If all three deaths
    # counted for the episodes, MAX_DEATHS would be exceeded.

    async def scenario() -> tuple[dict[int, str], list[str]]:
        deaths: list[str] = []
        async with playing(some_kill_it, delay_s=8.0, on_death=deaths.append) as replica:
            for _ in range(2):
                standby = replica.standby
                assert standby is not None
                await standby.started()
                psutil.Process(standby.pid).kill()
                async with asyncio.timeout(PATIENCE_S):
                    await standby.wait_for_death()
                    await asyncio.sleep(0)  # lets the keeper of the standby worker run
                assert replica.standby not in (None, standby)
            await replica.submit(requests(4, does({})), {})
            standby = replica.standby
            assert standby is not None
            await standby.started()
            (player,) = replica.players
            for pid in (standby.pid, player.pid):
                os.kill(pid, signal.SIGKILL)
            return failures(await played(replica, 4)), deaths

    failed, deaths = asyncio.run(scenario())
    assert failed == {}
    assert all(" 4 episodes" in one for one in deaths)
    assert len(deaths) <= 2  # the second one if the first death was not noticed yet
