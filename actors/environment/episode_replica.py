"""A replica's face to the controller where its rollouts are episodes.

    controller ──► PlayingReplica ──► EnvironmentActor ──turns──► RolloutActor (engine)
                        │    └────────────── weights ────────────────┘
                        └── a worker dies: another plays its episodes again, out of the engine's
                            memory; who was there too often, is played apart (suspects.py)

The workers of a replica are on its node and ask it alone, directly: whatever its episodes share,
the engine has. What they have played lies in the store; the controller is told of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rlsys.controller.worker_protocols import Collected, FinishedRollout, ReplicaDied, StepPart
from rlsys.dataflow.store.blocks import ColumnRef
from rlsys.environments.environment import Environment
from rlsys.environments.workers.fault_isolation import FaultIsolation, Unit
from rlsys.rewards import RewardFailure
from rlsys.types import GenerationRequest, WeightManifest

from ..cluster.calls import Worker, WorkerError, as_future, end_all
from ..rollout.rollout_actor import COLLECT_WAIT_S, DEADLY, RayReplica
from ..store.store_shards import StoreShards
from .environment_proxy import EnvironmentProxy
from .standby import Standby

NO_PARTNERS: Mapping[str, RayReplica] = MappingProxyType({})

# Workers that may die over an episode before it is played apart from others.
MAX_DEATHS = 2

# Parts that suspects are split into, and workers that play one at a time.
MAX_APART = 4

# Workers in a row that may die with nothing to play, or before they have begun.
MAX_FRUITLESS = 3


class EpisodeReplica:
    """A `Replica` whose rollouts are episodes: `replica` samples, workers play. `start_worker`
    starts the actor of a worker, by its name; `on_death` is told of one's death. `partners`, by
    name of the model, sample for models that play seats beside the policy: when one of them dies,
    all of it has.
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
        self._hire = start_worker
        self._environment = environment
        self._shards = shards
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._num_lives = 0
        self._workers: dict[str, EnvironmentProxy] = {}  # that play for all
        self._apart: dict[str, EnvironmentProxy] = {}  # that play suspects
        self._spare = Standby(self._create, is_wanted=lambda: not replica.worker.is_dead)
        self._suspects = FaultIsolation(max_deaths=MAX_DEATHS, num_parts=MAX_APART)
        self._waiting: dict[str, GenerationRequest] = {}  # suspects that nobody plays yet
        # Of episodes that are not to be played again: why; None where nobody wants them.
        self._verdicts: dict[str, RewardFailure | None] = {}
        self._num_fruitless = 0  # deaths in a row that say nothing of any episode
        self._serving: dict[Worker, asyncio.Future[Any]] = {}
        self._burials: list[str] = []  # actors whose memory in the store is to be taken back

    @property
    def name(self) -> str:
        return self._replica.name

    @property
    def node(self) -> str:
        return self._replica.node

    @property
    def node_id(self) -> str:
        return self._replica.node_id

    @property
    def worker(self) -> Worker:
        return self._replica.worker

    @property
    def workers(self) -> list[Worker]:
        spare = [] if self.spare is None else [self.spare]
        players = [one.worker for one in [*self._playing, *spare]]
        return [*self._engines, *players]

    @property
    def _engines(self) -> list[Worker]:
        return [self._replica.worker, *(one.worker for one in self._partners.values())]

    @property
    def nodes(self) -> set[str]:
        return self._replica.nodes.union(*(one.nodes for one in self._partners.values()))

    @property
    def players(self) -> list[EnvironmentProxy]:
        """Its workers that play for all."""
        return [*self._workers.values()]

    @property
    def spare(self) -> EnvironmentProxy | None:
        """A worker that plays nothing yet."""
        return self._spare.player

    async def start(self, timeout_s: float) -> None:
        engines = [self._replica, *self._partners.values()]
        await asyncio.gather(*(engine.start(timeout_s) for engine in engines))
        try:
            for player in [self._create() for _ in range(self._num_workers)]:
                self._workers[player.name] = player
            await asyncio.gather(*(player.started() for player in self._workers.values()))
        except DEADLY as error:
            raise ReplicaDied(f"{self.name} has no environment worker: {error}") from None
        self._spare.start_worker()

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Sequence[ColumnRef]]
    ) -> None:
        by_group: dict[int, list[GenerationRequest]] = {}
        for request in requests:
            by_group.setdefault(_group_of(request), []).append(request)
        for group_id, of_group in by_group.items():
            await self._player_of(group_id).play(of_group)

    async def collect(self) -> Collected:
        """Of all workers: what the first that has something tells, and the others have by then."""
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
        has_sampled = False
        for player in self._playing:
            if player.collecting is None or not player.collecting.done():
                continue
            collecting, player.collecting = player.collecting, None
            try:
                told: Collected = collecting.result()
            except DEADLY as death:
                self._bury_worker(player, death)
                continue
            self._told(player, [rollout.request_id for rollout in told.finished])
            finished += told.finished
            has_sampled |= told.has_sampled
        return Collected(finished=finished, has_sampled=has_sampled)

    async def progress(self) -> Sequence[StepPart]:
        """Nothing: what running episodes have sampled is the engine's to remember."""
        return []

    async def abort(self, request_ids: Sequence[str]) -> None:
        waiting = [name for name in request_ids if self._suspects.withdraw(name)]
        unwanted = [self._waiting.pop(name) for name in waiting]
        self._verdicts.update(dict.fromkeys(waiting))
        if unwanted:
            await self._idlest.give_up([(request, None) for request in unwanted])
        here = {
            player: names
            for player in self._playing
            if (names := [name for name in request_ids if name in player.requests])
        }
        for names in here.values():  # if it dies before it is told, nobody else plays them
            for name in names:
                self._verdicts.setdefault(name, None)
        await asyncio.gather(*(player.abort(names) for player, names in here.items()))

    async def release(self) -> None:
        await self._replica.release()

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        """Of all that sample; what has none of its own keeps its weights."""
        own = replace(manifest, others=())
        loads = [self._replica.update_weights(own, delayed=delayed)]
        for model, of_other in manifest.others:
            loads.append(self._partners[model].update_weights(of_other, delayed=delayed))
        # Nobody is told before all have ended, so that nothing loads twice at a time.
        pauses = await asyncio.gather(*loads, return_exceptions=True)
        told: list[float] = []
        for pause in pauses:
            if isinstance(pause, BaseException):
                raise pause
            told.append(pause)
        return max(told)

    async def clean_up(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        for worker in self.workers:
            worker.kill()
        await self._replica.clean_up(live_rows)
        for actor_id in [*self._burials, *(one.actor_id for one in self._playing)]:
            await self._shards.reclaim(actor_id, live_rows)

    @property
    def _playing(self) -> list[EnvironmentProxy]:
        return [*self._workers.values(), *self._apart.values()]

    @property
    def _poll_s(self) -> float:
        return COLLECT_WAIT_S + self._replica.worker.timeout_s

    @property
    def _idlest(self) -> EnvironmentProxy:
        return min(self._workers.values(), key=lambda player: len(player.requests))

    def _player_of(self, group_id: int) -> EnvironmentProxy:
        """The worker that has episodes of the group, else the one with the fewest."""
        for player in self._workers.values():
            if group_id in player.groups:
                return player
        return self._idlest

    def _told(self, player: EnvironmentProxy, names: Sequence[str]) -> None:
        """These have ended there."""
        if names:
            self._num_fruitless = 0
        for name in names:
            player.requests.pop(name, None)
            self._verdicts.pop(name, None)
        self._suspects.ended(names)
        if player.name in self._apart and not player.requests:
            self._play_apart(player)

    # Deaths

    def _bury_worker(self, player: EnvironmentProxy, death: Exception) -> None:
        """What it played is played by others, from what the engine remembers."""
        is_apart = self._apart.pop(player.name, None) is not None
        self._workers.pop(player.name, None)
        player.worker.end(str(death))
        if player.actor_id:
            self._burials.append(player.actor_id)
        wanted = {n: r for n, r in player.requests.items() if n not in self._verdicts}
        units = self._units(wanted.values())
        self._count_fruitless(player, units, death)
        culprit = self._culprit(player, wanted)
        again: list[Unit] = []  # beside others
        if not self._tells_of_wanted(player):
            if is_apart:
                self._suspects.put_back(units)
            else:
                again = units
        elif is_apart:
            self._fail(self._suspects.died_apart(units, culprit), player, death)
        else:
            again = self._suspects.died_together(units, culprit)
        if not is_apart:
            successor = self._spare.take()
            self._workers[successor.name] = successor
            if again:
                successor.play([wanted.pop(name) for unit in again for name in unit])
        self._waiting.update((n, r) for n, r in wanted.items() if n not in self._verdicts)
        self._tell_death(player, death, num_again=sum(map(len, again)), culprit=culprit)
        over = [r for name, r in player.requests.items() if name in self._verdicts]
        if over:
            self._idlest.give_up([(r, self._verdicts[r.request_id]) for r in over])
        self._play_apart()

    def _play_apart(self, free: EnvironmentProxy | None = None) -> None:
        """Gives the parts that wait to workers of their own; `free` has none any more."""
        while (free is not None or len(self._apart) < MAX_APART) and (
            part := self._suspects.next_part()
        ):
            player, free = free or self._spare.take(), None
            self._apart[player.name] = player
            player.play([self._waiting.pop(name) for unit in part for name in unit])
        if free is not None:
            del self._apart[free.name]
            self._burials.append(free.actor_id)
            as_future(end_all([free.worker]))  # with what it has started, such as servers of tools

    def _fail(self, unit: Unit | None, player: EnvironmentProxy, death: Exception) -> None:
        """Its worker has died, where nobody was beside it."""
        if unit is None:
            return
        name = self._environment.name
        if player.blocked:
            did = f"{name} {player.blocked.message}, also when played apart from others; await"
            fix = "what takes time, call asyncio.to_thread(...), or make it a plain function"
        else:
            did = f"{name} ended its worker's process, also when it was played apart from others:"
            fix = f"{death}. What may crash or exit belongs in a plain function"
        message = f"{did} {fix} (`def`), which runs in a process of its own."
        failure = RewardFailure(kind="crash", reward=name, message=message)
        self._verdicts.update(dict.fromkeys(unit, failure))

    def _tell_death(
        self, player: EnvironmentProxy, death: Exception, *, num_again: int, culprit: str
    ) -> None:
        num_apart = sum(name in self._waiting for name in player.requests)
        told = ["another takes its place"]
        if num_again:
            told = [f"another plays its {num_again} episodes again, from what is known"]
        if culprit:
            told.append("that episode is played apart from others")
        elif num_apart:
            told.append(
                f"{num_apart} episodes are played apart from others, fewer and fewer together, to "
                "find out which of them does it"
            )
        self._on_death(f"{death}; {'; '.join(told)}")

    def _count_fruitless(
        self, player: EnvironmentProxy, units: Sequence[Unit], death: Exception
    ) -> None:
        """Raises ReplicaDied where workers die and die, and no episode's turn is what they die of:
        the suspects' deaths are bounded, these are not.
        """
        if player.has_begun and units:
            return
        self._num_fruitless += 1
        if self._num_fruitless > MAX_FRUITLESS * self._num_workers:
            raise self._died("the deaths of its environment workers", death)

    def _tells_of_wanted(self, player: EnvironmentProxy) -> bool:
        """Whether its death may be the fault of an episode that is to be played again: not before
        it had begun, and not where one that nobody wants any more was seen to block it.
        """
        return player.has_begun and not (player.blocked and player.blocked.task in self._verdicts)

    def _culprit(self, player: EnvironmentProxy, wanted: Mapping[str, GenerationRequest]) -> str:
        """The episode that was seen to block the event loop."""
        seen = player.blocked.task if player.blocked else ""
        return seen if seen in wanted else ""

    def _units(self, requests: Iterable[GenerationRequest]) -> list[Unit]:
        """Episodes one by one; a group whose environment judges it as a whole is played by one
        worker.
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
        return EnvironmentProxy(name, self._hire(name), self._start_timeout_s)

    def _died(self, method: str, error: Exception) -> ReplicaDied:
        self._replica.worker.end(str(error))
        is_told = isinstance(error, WorkerError) and self.name in str(error)
        return ReplicaDied(str(error) if is_told else f"{self.name} died during {method}: {error}")


def _group_of(request: GenerationRequest) -> int:
    assert request.task is not None, "an environment plays tasks"
    return request.task.group_id
