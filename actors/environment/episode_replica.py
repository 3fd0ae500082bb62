"""The controller's `Replica` for rollouts that are episodes.

    controller ──► EpisodeReplica ──► EnvironmentActor ──turns──► RolloutActor (engine)
                        │    └────────────── weights ────────────────┘
                        └── when a worker dies, another replays its episodes from the engine's
                            memory; episodes that were running in several deaths are isolated
                            (fault_isolation.py)

The workers of a replica run on its node and ask only its engine, so that the engine's prefix cache
serves all turns of an episode. Episodes are written to the store; the controller gets metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rlsys.common.number_text import counted
from rlsys.common.supervision import ENVIRONMENT_WORKERS, Policy, RestartPolicy, Supervisor
from rlsys.controller.worker_protocols import (
    Collected,
    FinishedRollout,
    ReplicaDied,
    StepPart,
    Withdrawn,
)
from rlsys.dataflow.store.blocks import ColumnRef
from rlsys.environments.environment import Environment
from rlsys.environments.workers.fault_isolation import FaultIsolation, Unit
from rlsys.rewards import RewardFailure
from rlsys.types import GenerationRequest, WeightManifest

from ..cluster.calls import Worker, WorkerError, as_future, end_all
from ..cluster.long_poll import COLLECT_WAIT_S
from ..cluster.method_words import doing
from ..rollout.ray_replica import DEADLY, RayReplica
from ..store.store_shards import StoreShards
from .environment_proxy import EnvironmentProxy
from .standby import Standby

NO_PARTNERS: Mapping[str, RayReplica] = MappingProxyType({})

# Parts into which suspected episodes are split, and workers that play one part at a time.
MAX_ISOLATED = 4


class EpisodeReplica:
    """`Replica` whose rollouts are episodes: `replica` samples, workers play.

    `start_worker` starts the actor of a worker, by its name. `on_death` gets a message about a
    worker's death. `partners` sample for models that play seats besides the policy, by name; when
    one of them dies, the whole replica has died.
    """

    def __init__(
        self,
        replica: RayReplica,
        start_worker: Callable[[str], Worker],
        environment: Environment,
        shards: StoreShards,
        *,
        num_workers: int,
        start_timeout_s: float,
        on_death: Callable[[str], None],
        partners: Mapping[str, RayReplica] = NO_PARTNERS,
    ) -> None:
        self._partners = partners
        self._on_death = on_death
        self._replica = replica
        self._start_worker = start_worker
        self._environment = environment
        self._shards = shards
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._num_lives = 0
        self._workers: dict[str, EnvironmentProxy] = {}  # by name
        self._isolated: dict[str, EnvironmentProxy] = {}  # play suspected episodes
        self._standby = Standby(self._create, is_wanted=lambda: not replica.worker.is_dead)
        # All workers are one place.
        max_restarts = ENVIRONMENT_WORKERS.restart.max_restarts * num_workers
        self._supervisor = Supervisor[str](Policy(RestartPolicy(max_restarts)))
        max_deaths = ENVIRONMENT_WORKERS.poison.max_deaths
        self._isolation = FaultIsolation(max_deaths=max_deaths, num_parts=MAX_ISOLATED)
        # suspected episodes that wait for a worker
        self._waiting: dict[str, GenerationRequest] = {}
        # Episodes that are not played again: their failure, or None if they were cancelled.
        self._verdicts: dict[str, RewardFailure | None] = {}
        self._serving: dict[Worker, asyncio.Future[Any]] = {}
        # actors whose memory in the store is reclaimed at the end
        self._dead_actors: list[str] = []

    @property
    def name(self) -> str:
        """Return the name of the sampling replica."""
        return self._replica.name

    @property
    def node(self) -> str:
        """Return the id of its node."""
        return self._replica.node

    @property
    def node_id(self) -> str:
        """Return the id of its node."""
        return self._replica.node_id

    @property
    def worker(self) -> Worker:
        """Return the actor of the engine."""
        return self._replica.worker

    @property
    def workers(self) -> list[Worker]:
        """Return the actors of all engines and environment workers."""
        standby = [] if self.standby is None else [self.standby]
        players = [one.worker for one in [*self._playing, *standby]]
        return [*self._engines, *players]

    @property
    def _engines(self) -> list[Worker]:
        return [self._replica.worker, *(one.worker for one in self._partners.values())]

    @property
    def nodes(self) -> set[str]:
        """Return the ids of the nodes on which its engines load weights."""
        return self._replica.nodes.union(*(one.nodes for one in self._partners.values()))

    @property
    def players(self) -> list[EnvironmentProxy]:
        """Return the workers that play episodes that are not suspected."""
        return [*self._workers.values()]

    @property
    def standby(self) -> EnvironmentProxy | None:
        """Return the standby worker."""
        return self._standby.worker

    async def start(self, timeout_s: float) -> None:
        """Start the engines, then the environment workers."""
        engines = [self._replica, *self._partners.values()]
        await asyncio.gather(*(engine.start(timeout_s) for engine in engines))
        try:
            for player in [self._create() for _ in range(self._num_workers)]:
                self._workers[player.name] = player
            await asyncio.gather(*(player.started() for player in self._workers.values()))
        except DEADLY as error:
            raise ReplicaDied(f"{self.name} could not start environment workers: {error}") from None
        self._standby.start_worker()

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Sequence[ColumnRef]]
    ) -> None:
        """Send the episodes of each group to one worker."""
        by_group: dict[int, list[GenerationRequest]] = {}
        for request in requests:
            by_group.setdefault(_group_of(request), []).append(request)
        for group_id, of_group in by_group.items():
            await self._player_of(group_id).play(of_group)

    async def collect(self) -> Collected:
        """Wait until any worker has ended episodes, then return those of all workers."""
        for engine in self._engines:
            if engine not in self._serving:
                serving = as_future(engine.call("serve_turns", timeout_s=self._poll_s))
                self._serving[engine] = serving
        waits = [player.collect() for player in self._playing]
        await asyncio.wait([*self._serving.values(), *waits], return_when=asyncio.FIRST_COMPLETED)
        for engine, serving in [*self._serving.items()]:
            if serving.done():
                del self._serving[engine]
                try:
                    serving.result()
                except DEADLY as error:
                    raise self._died("serve_turns", error) from None
        finished: list[FinishedRollout] = []
        num_sampled = 0
        for player in self._playing:
            if player.collecting is None or not player.collecting.done():
                continue
            collecting, player.collecting = player.collecting, None
            try:
                collected: Collected = collecting.result()
            except DEADLY as death:
                self._handle_death(player, death)
                continue
            self._mark_ended(player, [rollout.request_id for rollout in collected.finished])
            finished += collected.finished
            num_sampled += collected.num_sampled
        return Collected(finished=finished, num_sampled=num_sampled)

    async def progress(self) -> Sequence[StepPart]:
        """Return nothing: the engine remembers the turns of running episodes."""
        return []

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort episodes."""
        waiting = [name for name in request_ids if self._isolation.withdraw(name)]
        unwanted = [self._waiting.pop(name) for name in waiting]
        self._verdicts.update(dict.fromkeys(waiting))
        if unwanted:
            await self._least_loaded.report_unplayed([(request, None) for request in unwanted])
        here = {
            player: names
            for player in self._playing
            if (names := [name for name in request_ids if name in player.requests])
        }
        for names in here.values():  # if the worker dies meanwhile, no other one plays them
            for name in names:
                self._verdicts.setdefault(name, None)
        await asyncio.gather(*(player.abort(names) for player, names in here.items()))

    async def withdraw(self, request_ids: Sequence[str]) -> Withdrawn:
        """Withdraw nothing: episodes stay with their environment workers."""
        return Withdrawn()

    async def release(self) -> None:
        """Free the memory of the engine until new weights arrive."""
        await self._replica.release()

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        """Load a version into all engines; engines without new weights keep theirs."""
        own = replace(manifest, others=())
        loads = [self._replica.update_weights(own, delayed=delayed)]
        for model, of_other in manifest.others:
            loads.append(self._partners[model].update_weights(of_other, delayed=delayed))
        # Wait for all before raising, so that no engine loads twice at a time.
        pauses = await asyncio.gather(*loads, return_exceptions=True)
        seconds: list[float] = []
        for pause in pauses:
            if isinstance(pause, BaseException):
                raise pause
            seconds.append(pause)
        return max(seconds)

    async def clean_up(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """Kill all processes and reclaim their memory in the store."""
        for worker in self.workers:
            worker.kill()
        await self._replica.clean_up(live_rows)
        for actor_id in [*self._dead_actors, *(one.actor_id for one in self._playing)]:
            await self._shards.reclaim(actor_id, live_rows)

    @property
    def _playing(self) -> list[EnvironmentProxy]:
        return [*self._workers.values(), *self._isolated.values()]

    @property
    def _poll_s(self) -> float:
        return COLLECT_WAIT_S + self._replica.worker.timeout_s

    @property
    def _least_loaded(self) -> EnvironmentProxy:
        return min(self._workers.values(), key=lambda player: len(player.requests))

    def _player_of(self, group_id: int) -> EnvironmentProxy:
        """Return the worker with episodes of the group, else the one with the fewest episodes."""
        for player in self._workers.values():
            if group_id in player.groups:
                return player
        return self._least_loaded

    def _mark_ended(self, player: EnvironmentProxy, names: Sequence[str]) -> None:
        """Record that these episodes have ended."""
        if names:
            self._supervisor.progressed()
        for name in names:
            player.requests.pop(name, None)
            self._verdicts.pop(name, None)
        self._isolation.ended(names)
        if player.name in self._isolated and not player.requests:
            self._play_isolated(player)

    # Deaths

    def _handle_death(self, player: EnvironmentProxy, death: Exception) -> None:
        """Distribute the episodes of a dead worker; others replay them from the engine's memory."""
        is_isolated = self._isolated.pop(player.name, None) is not None
        self._workers.pop(player.name, None)
        player.worker.end(str(death))
        if player.actor_id:
            self._dead_actors.append(player.actor_id)
        wanted = {n: r for n, r in player.requests.items() if n not in self._verdicts}
        units = self._units(wanted.values())
        self._count_idle_death(player, units, death)
        culprit = self._culprit(player, wanted)
        again: list[Unit] = []  # replayed together with other episodes
        if not self._may_be_an_episodes_fault(player):
            if is_isolated:
                self._isolation.put_back(units)
            else:
                again = units
        elif is_isolated:
            self._fail(self._isolation.died_apart(units, culprit), player, death)
        else:
            again = self._isolation.died_together(units, culprit)
        if not is_isolated:
            successor = self._standby.take()
            self._workers[successor.name] = successor
            if again:
                successor.play([wanted.pop(name) for unit in again for name in unit])
        self._waiting.update((n, r) for n, r in wanted.items() if n not in self._verdicts)
        self._report_death(player, death, num_again=sum(map(len, again)), culprit=culprit)
        over = [r for name, r in player.requests.items() if name in self._verdicts]
        if over:
            self._least_loaded.report_unplayed([(r, self._verdicts[r.request_id]) for r in over])
        self._play_isolated()

    def _play_isolated(self, free: EnvironmentProxy | None = None) -> None:
        """Give waiting parts to workers of their own; `free` is a worker without a part."""
        while (free is not None or len(self._isolated) < MAX_ISOLATED) and (
            part := self._isolation.next_part()
        ):
            player, free = free or self._standby.take(), None
            self._isolated[player.name] = player
            player.play([self._waiting.pop(name) for unit in part for name in unit])
        if free is not None:
            del self._isolated[free.name]
            self._dead_actors.append(free.actor_id)
            as_future(end_all([free.worker]))  # with its child processes, such as tool servers

    def _fail(self, unit: Unit | None, player: EnvironmentProxy, death: Exception) -> None:
        """Fail an episode whose worker died while it played no other one."""
        if unit is None:
            return
        name = self._environment.name
        if player.blocked:
            cause = f"{name} {player.blocked.message}, also when it was isolated"
            fix = "Await slow calls, use asyncio.to_thread(...), or make it a plain function"
        else:
            cause = f"{name} ended its worker's process, also when it was isolated: {death}"
            fix = "Put code that may crash or exit into a plain function"
        message = f"{cause}. {fix} (`def`), which runs in its own process."
        failure = RewardFailure(kind="crash", reward=name, message=message)
        self._verdicts.update(dict.fromkeys(unit, failure))

    def _report_death(
        self, player: EnvironmentProxy, death: Exception, *, num_again: int, culprit: str
    ) -> None:
        num_isolated = sum(name in self._waiting for name in player.requests)
        actions = ["another worker replaces it"]
        if num_again:
            actions = [f"another worker replays {counted(num_again, 'episode')}"]
        if culprit:
            actions.append("that episode is isolated")
        elif num_isolated:
            are = "is" if num_isolated == 1 else "are"
            episodes = counted(num_isolated, "episode")
            actions.append(f"{episodes} {are} isolated to find the one that causes it")
        self._on_death(f"{death}; {'; '.join(actions)}")

    def _count_idle_death(
        self, player: EnvironmentProxy, units: Sequence[Unit], death: Exception
    ) -> None:
        """Raise ReplicaDied when workers keep dying and no episode can be the cause.

        Deaths of suspected episodes are bounded by their isolation, these are not.
        """
        if player.has_started_playing and units:
            return
        if self._supervisor.died(str(death)).gives_up:
            raise self._died("repeated deaths of its environment workers", death)

    def _may_be_an_episodes_fault(self, player: EnvironmentProxy) -> bool:
        """Return whether an episode that must be replayed may have caused the death.

        It may not if the worker had not started to play, or if a cancelled episode blocked it.
        """
        return player.has_started_playing and not (
            player.blocked and player.blocked.task in self._verdicts
        )

    def _culprit(self, player: EnvironmentProxy, wanted: Mapping[str, GenerationRequest]) -> str:
        """Return the episode that blocked the event loop, or ""."""
        seen = player.blocked.task if player.blocked else ""
        return seen if seen in wanted else ""

    def _units(self, requests: Iterable[GenerationRequest]) -> list[Unit]:
        """Return the episodes as units that one worker plays.

        A unit is an episode, or a group if the environment rewards groups as a whole.
        """
        if self._environment.group_reward is None:
            return [(request.request_id,) for request in requests]
        by_group: dict[int, list[str]] = {}
        for request in requests:
            by_group.setdefault(_group_of(request), []).append(request.request_id)
        return [tuple(names) for names in by_group.values()]

    def _create(self) -> EnvironmentProxy:
        name = f"environment-{self.name.removeprefix('rollout-')}.{self._num_lives}"
        self._num_lives += 1
        return EnvironmentProxy(name, self._start_worker(name), self._start_timeout_s)

    def _died(self, method: str, error: Exception) -> ReplicaDied:
        self._replica.worker.end(str(error))
        is_complete = isinstance(error, WorkerError) and self.name in str(error)
        return ReplicaDied(
            str(error) if is_complete else f"{self.name} died while {doing(method)}: {error}"
        )


def _group_of(request: GenerationRequest) -> int:
    assert request.task is not None, "an environment plays tasks"
    return request.task.group_id
