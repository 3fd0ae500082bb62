"""Deaths of environment workers as a replica sees them: over fakes, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

import rlsys
from actors.cluster.calls import KILLED, WorkerDied
from actors.environment.episode_replica import MAX_ISOLATED, EpisodeReplica
from rlsys.common.supervision import ENVIRONMENT_WORKERS
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.worker_protocols import Collected, FinishedRollout
from rlsys.environments.workers.loop_watchdog import Blocked
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import FinishReason, GenerationRequest, SamplingParams, Task

MAX_DEATHS = ENVIRONMENT_WORKERS.poison.max_deaths
START_S = 3.0
BLOCKED_S = 30.0
LIMIT_S = 100_000.0

PLAYED = RewardResult(total=1.0, components={})


@dataclass
class World:
    """Behaviour of episodes ("exit" and "block" end their worker), and all workers so far."""

    does: dict[str, str] = field(default_factory=dict)
    order: random.Random = field(default_factory=lambda: random.Random(0))
    waits: set[str] = field(default_factory=set)  # episodes that never end
    keeps_groups: bool = False  # no group is ever split over workers
    workers: list[FakeWorker] = field(default_factory=list)

    def start_worker(self, name: str) -> Any:
        self.workers.append(FakeWorker(name, self))
        return self.workers[-1]

    @property
    def num_alive(self) -> int:
        return sum(not worker.is_dead for worker in self.workers)


class FakeWorker:
    """Plays an episode a second, in any order."""

    timeout_s = 600.0

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self._world = world
        self._cause = ""
        self._died = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._running: dict[str, GenerationRequest] = {}
        self._ended: list[FinishedRollout] = []
        self._blocked: Blocked | None = None
        self._playing: asyncio.Task[None] | None = None
        self.blocking = ""

    @property
    def groups(self) -> set[int]:
        return {one.task.group_id for one in self._running.values() if one.task is not None}

    @property
    def is_dead(self) -> bool:
        return bool(self._cause)

    def end(self, cause: str) -> None:
        self._cause = self._cause or cause
        self._died.set()
        if self._playing is not None and self._playing is not asyncio.current_task():
            self._playing.cancel()

    def kill(self) -> None:
        self.end(KILLED)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        answer = asyncio.ensure_future(getattr(self, f"do_{method}")(*args))
        died = asyncio.ensure_future(self._died.wait())
        await asyncio.wait([answer, died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if self.is_dead:
            answer.cancel()
            raise WorkerDied(f"{self.name} died during {method}: {self._cause}")
        return answer.result()

    async def do_place(self) -> tuple[str, str, int]:
        return "node", self.name, 1

    async def do_start(self) -> None:
        await asyncio.sleep(START_S)
        self._playing = asyncio.create_task(self._play())

    async def do_watch(self, seconds: float) -> Blocked | None:
        for _ in range(int(seconds)):
            await asyncio.sleep(1)
            if self._blocked is not None:
                return self._blocked
        return None

    async def do_submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._running.update((request.request_id, request) for request in requests)
        if self._world.keeps_groups:
            others = [one for one in self._world.workers if one is not self and not one.is_dead]
            assert not self.groups & {group for one in others for group in one.groups}

    async def do_report_unplayed(self, verdicts: Sequence[tuple[GenerationRequest, Any]]) -> None:
        for request, failure in verdicts:
            self._end(request, failure)

    async def do_abort(self, names: Sequence[str]) -> None:
        if self.blocking:
            await self._died.wait()
        for name in names:
            if name in self._running:
                self._end(self._running.pop(name), None)

    async def do_collect(self) -> Collected:
        try:
            async with asyncio.timeout(5):
                await self._has_ended.wait()
        except TimeoutError:
            pass
        self._has_ended.clear()
        ended, self._ended = self._ended, []
        return Collected(finished=ended, num_sampled=len(ended))

    async def do_close(self) -> None:
        return

    async def _play(self) -> None:
        while True:
            await asyncio.sleep(1)
            turns = [name for name in self._running if name not in self._world.waits]
            if not turns:
                continue
            name = self._world.order.choice(turns)
            does = self._world.does.get(name, "")
            if does == "exit":
                self.end("its process has ended")
                return
            if does == "block":
                self.blocking = name
                await asyncio.sleep(BLOCKED_S)
                self._blocked = Blocked(seconds=BLOCKED_S, task=name, where="line 7")
                return
            self._end(self._running.pop(name), PLAYED)

    def _end(self, request: GenerationRequest, outcome: Any) -> None:
        cell: Any = (None, 0)
        self._ended.append(
            FinishedRollout(
                request_id=request.request_id,
                cell=cell,
                num_prompt_tokens=1,
                num_tokens=1,
                min_version=0,
                max_version=0,
                finish_reason=FinishReason.STOP,
                outcome=outcome,
            )
        )
        self._has_ended.set()


class FakeEngine:
    """The part of RayReplica that is used here."""

    name = "rollout-0"
    node = node_id = "node"

    def __init__(self) -> None:
        self.worker = EngineWorker()

    async def start(self, timeout_s: float) -> None: ...


class EngineWorker:
    timeout_s = 600.0
    is_dead = False

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> None:
        await asyncio.sleep(5)

    def end(self, cause: str) -> None:
        self.is_dead = True


@rlsys.environment(plain_text=True)
async def one_by_one(chat: Any, task: Any) -> float:
    return 1.0


@rlsys.environment(plain_text=True, group_reward=lambda group: [1.0] * len(group))
async def in_groups(chat: Any, task: Any) -> float:
    return 1.0


def replica_of(
    world: World, deaths: list[str], *, environment: Any = one_by_one, num_workers: int = 1
) -> EpisodeReplica:
    return EpisodeReplica(
        cast(Any, FakeEngine()),
        world.start_worker,
        environment,
        cast(Any, None),
        num_workers=num_workers,
        start_timeout_s=60,
        on_death=deaths.append,
    )


def requests(num: int, *, group_size: int = 1) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=(),
            sampling=SamplingParams(max_tokens=8),
            seed=number,
            task=Task(
                row={},
                group_id=number // group_size,
                index=number % group_size,
                group_size=group_size,
            ),
        )
        for number in range(num)
    ]


async def outcomes(
    replica: EpisodeReplica, num: int, each: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    collected: dict[str, Any] = {}
    async with asyncio.timeout(LIMIT_S):
        while len(collected) < num:
            for one in (await replica.collect()).finished:
                assert one.request_id not in collected
                collected[one.request_id] = one.outcome
            each()
    return collected


@settings(max_examples=60)
@given(
    st.integers(1, 50),
    st.dictionaries(st.integers(0, 49), st.sampled_from(["exit", "block"]), max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 1 << 20),
)
def test_only_culprits_fail(
    num: int,
    does: dict[int, str],
    num_workers: int,
    group_size: int,
    is_judged_together: bool,
    seed: int,
) -> None:
    world = World({str(n): what for n, what in does.items() if n < num}, random.Random(seed))
    deaths: list[str] = []
    group_size = group_size if num % group_size == 0 else 1

    async def scenario() -> dict[str, Any]:
        environment = in_groups if is_judged_together else one_by_one
        replica = replica_of(world, deaths, environment=environment, num_workers=num_workers)
        await replica.start(60)
        await replica.submit(requests(num, group_size=group_size), {})
        collected = await outcomes(replica, num)
        await asyncio.sleep(100)
        assert len(replica.workers) == 1 + num_workers + 1  # the engine, and a standby worker
        assert world.num_alive == num_workers + 1
        return collected

    collected = run_in_virtual_time(scenario())
    guilty = set(world.does)
    if is_judged_together:
        groups = {int(name) // group_size for name in world.does}
        guilty = {str(n) for n in range(num) if n // group_size in groups}
    failed = {name for name, one in collected.items() if isinstance(one, RewardFailure)}
    assert set(world.does) <= failed <= guilty  # members that ended before do not fail
    assert all(one is PLAYED for name, one in collected.items() if name not in guilty)
    for name, what in world.does.items():
        if not is_judged_together:
            word = {"exit": "process", "block": "event loop"}
            assert word[what] in collected[name].message
    num_levels = 3  # ⌈log₄ 50⌉
    assert len(deaths) <= len(world.does) * (MAX_DEATHS + num_levels)
    assert MAX_ISOLATED == 4


def test_aborted_episodes_are_not_played_again() -> None:
    world = World({str(n): "exit" for n in range(40)})
    deaths: list[str] = []

    async def scenario() -> dict[str, Any]:
        replica = replica_of(world, deaths)
        await replica.start(60)
        await replica.submit(requests(40), {})
        aborting: list[asyncio.Task[None]] = []

        def abort() -> None:
            if len(deaths) >= 3 and not aborting:
                names = [str(n) for n in range(40)]
                aborting.append(asyncio.create_task(replica.abort(names)))

        return await outcomes(replica, 40, abort)

    collected = run_in_virtual_time(scenario())
    assert Counter(map(type, collected.values())) == {type(None): 40}
    assert len(deaths) <= MAX_DEATHS + 2 * MAX_ISOLATED


def test_no_episode_is_suspected_when_an_aborted_one_blocks() -> None:
    # Three episodes are aborted while they block; the fourth is never isolated.
    world = World({str(n): "block" for n in range(3)}, waits={"3"})
    deaths: list[str] = []

    async def abort(replica: EpisodeReplica) -> None:
        for number in range(3):
            while not any(one.blocking == str(number) for one in world.workers if not one.is_dead):  # noqa: ASYNC110
                await asyncio.sleep(1)
            await replica.abort([str(number)])
            if number < 2:
                await replica.submit([requests(3)[number + 1]], {})
        world.waits.clear()

    async def scenario() -> dict[str, Any]:
        replica = replica_of(world, deaths)
        await replica.start(60)
        await replica.submit([requests(1)[0], requests(4)[3]], {})
        aborting = asyncio.create_task(abort(replica))
        collected = await outcomes(replica, 4)
        await aborting
        return collected

    assert run_in_virtual_time(scenario()) == {"0": None, "1": None, "2": None, "3": PLAYED}
    assert len(deaths) == 3
    assert not any("isolated" in one for one in deaths)


def test_spare_workers_that_die_are_replaced_a_few_times() -> None:
    world = World()

    async def scenario() -> tuple[int, int]:
        replica = replica_of(world, [])
        await replica.start(60)
        for _ in range(10):
            await asyncio.sleep(10)
            if replica.standby is not None:
                cast(FakeWorker, replica.standby.worker).end("killed")
        num_started = len(world.workers)
        await replica.submit(requests(2), {})
        cast(FakeWorker, replica.players[0].worker).end("killed")
        collected = await outcomes(replica, 2)
        assert [*collected.values()] == [PLAYED, PLAYED]
        return num_started, len(world.workers)

    before, after = run_in_virtual_time(scenario())
    assert before == 2 + 3  # a player, a standby worker and its three successors
    assert after == before + 2  # a successor and a new standby worker


def test_no_episode_is_suspected_when_a_successor_dies_during_its_start() -> None:
    world = World()
    deaths: list[str] = []

    async def scenario() -> dict[str, Any]:
        replica = replica_of(world, deaths)
        await replica.start(60)
        await replica.submit(requests(3), {})
        for _ in range(MAX_DEATHS + 1):  # the player, and its successors as they start
            cast(FakeWorker, replica.players[0].worker).end("killed")
            standby = replica.standby
            assert standby is not None
            cast(FakeWorker, standby.worker).end("killed")
            async with asyncio.timeout(LIMIT_S):
                await replica.collect()
        return await outcomes(replica, 3)

    collected = run_in_virtual_time(scenario())
    assert [*collected.values()] == [PLAYED] * 3
    assert len(deaths) == MAX_DEATHS + 1
    assert not any("isolated" in one for one in deaths)
