"""Environment workers that their episodes end: real processes, an engine that answers at once."""

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
async def some_end_it(chat: Any, task: Any) -> float:
    await chat("5")
    await asyncio.sleep(0.05)
    await chat("7")
    if task["does"] == "exit":
        os._exit(3)
    if task["does"] == "block":
        time.sleep(3600)  # noqa: ASYNC251 - that is what it is
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
    """By the number of the episode."""
    told: dict[int, FinishedRollout] = {}
    async with asyncio.timeout(PATIENCE_S):
        while len(told) < num:
            for rollout in (await replica.collect()).finished:
                number = int(rollout.request_id.split(".")[0])
                assert number not in told
                told[number] = rollout
            during()
    return told


def failures(told: dict[int, FinishedRollout]) -> dict[int, str]:
    failed: dict[int, str] = {}
    for number, rollout in told.items():
        if isinstance(rollout.outcome, RewardFailure):
            failed[number] = rollout.outcome.message
        else:
            assert isinstance(rollout.outcome, RewardResult)
            assert rollout.num_tokens
    return failed


def does(what: dict[int, str]) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"does": what.get(number, "")}


@pytest.mark.slow
def test_episodes_that_end_their_process_fail_alone_and_the_others_are_played() -> None:
    async def scenario() -> tuple[dict[int, str], list[str], int]:
        deaths: list[str] = []
        async with playing(some_end_it, on_death=deaths.append) as replica:
            await replica.submit(requests(60, does({7: "exit", 41: "exit"})), {})
            failed = failures(await played(replica, 60))
            return failed, deaths, len(replica.workers)

    failed, deaths, num_workers = asyncio.run(scenario())
    assert set(failed) == {7, 41}
    for message in failed.values():
        assert message.startswith("some_end_it ended its worker's process, also when")
        assert "its process has ended, and nobody had asked it to" in message
        assert "plain function" in message
    together = [one for one in deaths if "another plays its 60 episodes again" in one]
    assert len(together) == 1
    assert len(deaths) <= 2 * 2 + 2 * 3  # ⌈log₄ 60⌉ = 3
    assert num_workers == 3  # the engine's, one that plays, a spare: suspects' have ended


def test_one_that_blocks_the_event_loop_is_seen_and_told_with_its_line() -> None:
    async def scenario() -> tuple[dict[int, str], list[str]]:
        deaths: list[str] = []
        async with playing(some_end_it, on_death=deaths.append, blocked_s=3.0) as replica:
            await replica.submit(requests(60, does({11: "block"})), {})
            return failures(await played(replica, 60)), deaths

    failed, deaths = asyncio.run(scenario())
    assert set(failed) == {11}
    assert "some_end_it blocked the event loop for 3 s at " in failed[11]
    assert "in some_end_it (time.sleep(3600)" in failed[11]
    assert __file__ in failed[11]
    assert len(deaths) == 2
    assert "another plays its 59 episodes again, from what is known" in deaths[0]
    assert "that episode is played apart from others" in deaths[0]


@pytest.mark.slow
def test_a_group_that_is_judged_together_is_played_together() -> None:
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
def test_who_is_aborted_while_suspects_are_sought_comes_out_with_nothing() -> None:
    async def scenario() -> tuple[dict[int, FinishedRollout], list[str]]:
        deaths: list[str] = []
        async with playing(some_end_it, on_death=deaths.append) as replica:
            await replica.submit(requests(8, does(dict.fromkeys(range(8), "exit"))), {})
            aborting: list[asyncio.Task[None]] = []

            def abort() -> None:
                if len(deaths) == 2 and not aborting:
                    names = [f"{number}.0.0" for number in range(8)]
                    aborting.append(asyncio.create_task(replica.abort(names)))

            return await played(replica, 8, abort), deaths

    told, deaths = asyncio.run(scenario())
    assert [one.outcome for one in told.values()] == [None] * 8
    assert len(deaths) <= 2 + 4  # four parts had been given out


@pytest.mark.slow
def test_a_spare_worker_that_is_killed_is_replaced_and_its_death_blames_nobody() -> None:
    """Twice the spare one dies, and once both at the same time: three deaths by MAX_DEATHS, had
    each been one of the episodes'."""

    async def scenario() -> tuple[dict[int, str], list[str]]:
        deaths: list[str] = []
        async with playing(some_end_it, delay_s=8.0, on_death=deaths.append) as replica:
            for _ in range(2):
                spare = replica.spare
                assert spare is not None
                await spare.started()
                psutil.Process(spare.pid).kill()
                async with asyncio.timeout(PATIENCE_S):
                    await spare.gone()
                    await asyncio.sleep(0)  # whoever else waits for that has its turn
                assert replica.spare not in (None, spare)
            await replica.submit(requests(4, does({})), {})
            spare = replica.spare
            assert spare is not None
            await spare.started()
            (player,) = replica.players
            for pid in (spare.pid, player.pid):
                os.kill(pid, signal.SIGKILL)
            return failures(await played(replica, 4)), deaths

    failed, deaths = asyncio.run(scenario())
    assert failed == {}
    assert all("4 episodes again" in one for one in deaths)
    assert len(deaths) <= 2  # the second one where nobody had noticed yet
