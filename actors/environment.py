"""Environments as Ray actors: workers that play episodes, each an event loop with thousands of
them, and a replica's face to the controller where its rollouts are episodes.

    controller ──► PlayingReplica ──► EnvironmentActor ──turns──► RolloutActor (engine)
                        │    └────────────── weights ────────────────┘
                        └── a worker dies: another plays its episodes again, out of the engine's
                            memory

The workers of a replica are on its node and ask it alone, directly: whatever its episodes share,
the engine has. What they have played lies in the store; the controller is told of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import ray

from rlsys.dataflow.blocks import Cell
from rlsys.dataflow.stages import (
    BRANCHES_COLUMN,
    SEATS_COLUMN,
    TURN_REWARDS_COLUMN,
    TURNS_COLUMN,
)
from rlsys.environments.environment import Environment
from rlsys.environments.host import Ended, EpisodeHost, EpisodeRequest
from rlsys.environments.turn_desk import Ask
from rlsys.environments.turns import num_by_seat, seats_of, turns_of
from rlsys.observe.trace import TraceBatch, Tracer
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    Sampled,
    WeightManifest,
)
from rlsys.workers import Collected, FinishedRollout, Part, ReplicaDied, RolloutText

from .calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerError, begun
from .rollout import COLLECT_WAIT_S, DEADLY, RayReplica
from .store import StoreAddress
from .store_shards import StoreShards
from .store_writer import StoreWriter

# Turns that episodes ask for one after the other travel together: a call costs about a millisecond.
GATHER_TURNS_S = 0.001

# Episodes that end one after the other are told together.
GATHER_S = 0.02

# An environment that computes on the event loop holds up all episodes of its worker; longer than
# this, and the worker is replaced. What takes time is a plain function, or awaits.
BLOCKED_S = 30.0

# Workers that may die over an episode before it counts as failed.
MAX_DEATHS = 3

NO_PARTNERS: Mapping[str, RayReplica] = MappingProxyType({})

MakeHost = Callable[[Any, Mapping[str, Any]], EpisodeHost]  # of what samples, and partners


class Turns:
    """Asks the replica's engine for the turns of this worker's episodes."""

    def __init__(self, worker: str, replica: Any) -> None:
        self._worker = worker
        self._replica = replica
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._asks: list[Ask] = []
        self._ended: list[str] = []
        self._sending: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.num_sampled = 0

    async def sample(self, request: GenerationRequest) -> Generation:
        if self._failure is not None:
            raise self._failure
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        episode, _, turn = request.request_id.rpartition(".")
        self._asks.append(Ask(episode=episode, turn=int(turn), request=request))
        self._send_soon()
        try:
            generation: Generation = await answer
            return generation
        finally:
            self._waiting.pop(request.request_id, None)

    def ended(self, episodes: Sequence[str]) -> None:
        """The engine need not remember them any more."""
        self._ended += episodes
        self._send_soon()

    def _send_soon(self) -> None:
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
            self._sending.add_done_callback(self._sent)

    async def _send(self) -> None:
        while self._asks or self._ended:
            await asyncio.sleep(GATHER_TURNS_S)
            asks, self._asks = self._asks, []
            ended, self._ended = self._ended, []
            await self._replica.ask.remote(self._worker, asks, ended)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        elif self._asks or self._ended:
            self._send_soon()

    async def _listen(self) -> None:
        try:
            while True:
                for generation in await self._replica.answers.remote(self._worker):
                    self.num_sampled += len(generation.token_ids)
                    answer = self._waiting.get(generation.request_id)
                    if answer is not None and not answer.done():
                        answer.set_result(generation)
        # Whatever it is, nobody answers any more: all who wait are told.
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)


@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class EnvironmentActor(Heartbeat):
    """Plays episodes; writes them to the store, tells their metadata and what they are worth.
    `replica` samples for the policy, `partners` for other models, by their names."""

    def __init__(
        self,
        name: str,
        make_host: MakeHost,
        replica: Any,
        partners: Mapping[str, Any],
        store: StoreAddress,
        tracer: Tracer,
    ) -> None:
        self._tracer = tracer
        self._turns = Turns(name, replica)
        self._partners = {model: Turns(name, actor) for model, actor in partners.items()}
        self._make_host = make_host
        self._host: EpisodeHost | None = None
        self._store = StoreWriter(store)
        self._collecting: asyncio.Task[list[Ended]] | None = None
        self._records: set[str] = set()
        self._num_sampled = 0

    async def start(self) -> None:
        """Load tokenizer and environment. Raises ValueError if one cannot be loaded."""
        host = self._make_host(self._turns, self._partners)
        await host.start()
        self._host = host

    async def place(self) -> tuple[str, str, int]:
        """Ids of the node, of the actor, and of its process there."""
        context = ray.get_runtime_context()
        return str(context.get_node_id()), str(context.get_actor_id()), os.getpid()

    async def drain_trace(self) -> TraceBatch:
        return self._tracer.drain()

    async def use_store(self, address: StoreAddress) -> None:
        self._store.use(address)

    async def submit(self, requests: list[GenerationRequest]) -> None:
        host = self._require_host()
        for request in requests:
            assert request.task is not None, "an environment plays tasks"
            if request.task.record:
                self._records.add(request.request_id)
            self._tracer.job_begins()
        host.submit([as_episode(request) for request in requests])
        self._tracer.counter("episodes", host.num_running)

    async def give_up(self, requests: list[GenerationRequest], failure: RewardFailure) -> None:
        """These have failed: tell it as of those that were played."""
        for request in requests:
            self._tracer.job_begins()
            self._require_host().give_up(as_episode(request), failure)

    async def abort(self, request_ids: list[str]) -> None:
        self._require_host().abort(request_ids)

    async def collect(self) -> Collected:
        """What has ended since the last call; waits a bounded time for the first."""
        ended = await self._ended_within(COLLECT_WAIT_S)
        if ended:
            await asyncio.sleep(GATHER_S)
            ended += await self._ended_within(0.0)
        num_sampled = sum(turns.num_sampled for turns in self._all_turns)
        has_sampled = num_sampled > self._num_sampled
        self._num_sampled = num_sampled
        if not ended:
            return Collected(finished=[], has_sampled=has_sampled)
        for turns in self._all_turns:
            turns.ended([one.request.request_id for one in ended])
        for _ in ended:
            self._tracer.job_ends()
        self._tracer.counter("episodes", self._require_host().num_running)
        finished = await self._written(ended)
        return Collected(finished=finished, has_sampled=True)

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()

    @property
    def _all_turns(self) -> list[Turns]:
        return [self._turns, *self._partners.values()]

    def _require_host(self) -> EpisodeHost:
        assert self._host is not None, "used while it starts"
        return self._host

    async def _ended_within(self, timeout_s: float) -> list[Ended]:
        # Left waiting over several calls: cancelling it could lose what it is about to return.
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._require_host().collect())
        done, _ = await asyncio.wait([self._collecting], timeout=timeout_s)
        if not done:
            return []
        task, self._collecting = self._collecting, None
        return task.result()

    async def _written(self, ended: Sequence[Ended]) -> list[FinishedRollout]:
        none_i, none_f = np.empty(0, np.int32), np.empty(0, np.float32)
        made = [None if one.played is None else one.played.trajectory for one in ended]
        block = await self._store.put(
            {
                "prompt_token_ids": [t.prompt_token_ids if t else none_i for t in made],
                "token_ids": [t.token_ids if t else none_i for t in made],
                "sampler_logprobs": [t.sampler_logprobs if t else none_f for t in made],
                "policy_versions": [t.policy_versions if t else none_i for t in made],
                TURN_REWARDS_COLUMN: [t.turn_rewards if t else none_f for t in made],
                TURNS_COLUMN: [turns_of(t) if t else none_i for t in made],
                SEATS_COLUMN: [seats_of(t) if t else none_i for t in made],
                BRANCHES_COLUMN: [t.branches if t else none_i for t in made],
            }
        )
        return [self._finished(one, (block, place)) for place, one in enumerate(ended)]

    def _finished(self, ended: Ended, cell: Cell) -> FinishedRollout:
        request, played = ended.request, ended.played
        is_recorded = request.request_id in self._records
        self._records.discard(request.request_id)
        if played is None:
            return FinishedRollout(
                request_id=request.request_id,
                cell=cell,
                num_prompt_tokens=0,
                num_tokens=0,
                min_version=0,
                max_version=0,
                finish_reason=FinishReason.ABORTED,
                outcome=ended.failure,
            )
        trajectory = played.trajectory
        sampled = Sampled.of(trajectory.policy_versions)
        return FinishedRollout(
            request_id=request.request_id,
            cell=cell,
            num_prompt_tokens=len(trajectory.prompt_token_ids),
            num_tokens=len(trajectory.token_ids),
            min_version=sampled.oldest,
            max_version=sampled.newest,
            finish_reason=played.finish_reason,
            num_injected=sampled.num_injected,
            num_by_seat=num_by_seat(trajectory.policy_versions, seats_of(trajectory)),
            outcome=RewardResult(total=played.total, components=played.components),
            text=_text(self._require_host(), played) if is_recorded else None,
        )


def _text(host: EpisodeHost, played: Any) -> RolloutText:
    trajectory = played.trajectory
    return RolloutText(
        prompt=host.decode(trajectory.prompt_token_ids),
        completion=host.decode(trajectory.token_ids),
        token_ids=trajectory.token_ids.tolist(),
        policy_versions=trajectory.policy_versions.tolist(),
        turns=played.transcript,
    )


def as_episode(request: GenerationRequest) -> EpisodeRequest:
    task = request.task
    assert task is not None
    return EpisodeRequest(
        request_id=request.request_id,
        task=task.row,
        sampling=request.sampling,
        seed=request.seed,
        group_id=task.group_id,
        index=task.index,
        group_size=task.group_size,
    )


class PlayingReplica:
    """A `Replica` whose rollouts are episodes: `replica` samples, workers play. `hire` starts the
    actor of a worker, by its name; `on_death` is told of one's death. `partners`, by name of the
    model, sample for models that play seats beside the policy: when one of them dies, all of it
    has."""

    def __init__(
        self,
        replica: RayReplica,
        hire: Callable[[str], Worker],
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
        self._hire = hire
        self._environment = environment
        self._shards = shards
        self._num_workers = num_workers
        self._start_timeout_s = start_timeout_s
        self._num_lives = 0
        self._workers: dict[str, Player] = {}
        self.spare: Player | None = None  # that plays nothing yet
        self._deaths: Counter[str] = Counter()  # of workers, by episode
        self._num_fruitless = 0  # deaths in a row, with nothing told between them
        self._serving: dict[Worker, asyncio.Future[Any]] = {}
        self._burials: list[str] = []  # actors whose memory in the store is to be taken back

    @property
    def name(self) -> str:
        return self._replica.name

    @property
    def home(self) -> str:
        return self._replica.home

    @property
    def node_id(self) -> str:
        return self._replica.node_id

    @property
    def worker(self) -> Worker:
        return self._replica.worker

    @property
    def workers(self) -> list[Worker]:
        spare = [] if self.spare is None else [self.spare]
        players = [one.worker for one in [*self._workers.values(), *spare]]
        return [*self._engines, *players]

    @property
    def _engines(self) -> list[Worker]:
        return [self._replica.worker, *(one.worker for one in self._partners.values())]

    @property
    def nodes(self) -> set[str]:
        return self._replica.nodes.union(*(one.nodes for one in self._partners.values()))

    @property
    def players(self) -> list[Player]:
        """Its workers, less the spare one."""
        return [*self._workers.values()]

    async def start(self, timeout_s: float) -> None:
        engines = [self._replica, *self._partners.values()]
        await asyncio.gather(*(engine.start(timeout_s) for engine in engines))
        try:
            for player in [self._create() for _ in range(self._num_workers)]:
                self._workers[player.name] = player
            await asyncio.gather(*(player.started() for player in self._workers.values()))
        except DEADLY as error:
            raise ReplicaDied(f"{self.name} has no environment worker: {error}") from None
        self.spare = self._create()

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Sequence[Cell]]
    ) -> None:
        by_group: dict[int, list[GenerationRequest]] = {}
        for request in requests:
            assert request.task is not None, "an environment plays tasks"
            by_group.setdefault(request.task.group_id, []).append(request)
        for group_id, of_group in by_group.items():
            player = self._player_of(group_id)
            await self._give(player, of_group)

    async def collect(self) -> Collected:
        """Of all workers: what the first that has something tells, and the others have by then."""
        for engine in self._engines:
            if engine not in self._serving:
                serving = begun(engine.call("serve_turns", timeout_s=self._poll_s))
                self._serving[engine] = serving
        for player in self._workers.values():
            if player.collecting is None:
                player.collecting = begun(player.call("collect", COLLECT_WAIT_S + BLOCKED_S))
        waits = [player.collecting for player in self._workers.values() if player.collecting]
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
        for player in list(self._workers.values()):
            if player.collecting is None or not player.collecting.done():
                continue
            collecting, player.collecting = player.collecting, None
            try:
                told: Collected = collecting.result()
            except DEADLY as death:
                self._replace(player, death)
                continue
            self._num_fruitless = 0
            for rollout in told.finished:
                player.requests.pop(rollout.request_id, None)
                self._deaths.pop(rollout.request_id, None)
            finished += told.finished
            has_sampled |= told.has_sampled
        return Collected(finished=finished, has_sampled=has_sampled)

    async def progress(self) -> Sequence[Part]:
        """Nothing: what running episodes have sampled is the engine's to remember."""
        return []

    async def abort(self, request_ids: Sequence[str]) -> None:
        for player in list(self._workers.values()):
            here = [name for name in request_ids if name in player.requests]
            if here:
                with contextlib.suppress(*DEADLY):  # whoever collects from it notices
                    await player.call("abort", None, here)

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

    async def bury(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        for worker in self.workers:
            worker.kill()
        await self._replica.bury(live_rows)
        for actor_id in [*self._burials, *(one.actor_id for one in self._workers.values())]:
            await self._shards.reclaim(actor_id, live_rows)

    @property
    def _poll_s(self) -> float:
        return COLLECT_WAIT_S + self._replica.worker.timeout_s

    def _player_of(self, group_id: int) -> Player:
        """The worker that has episodes of the group, else the one with the fewest."""
        for player in self._workers.values():
            if group_id in player.groups:
                return player
        return min(self._workers.values(), key=lambda player: len(player.requests))

    async def _give(self, player: Player, requests: Sequence[GenerationRequest]) -> None:
        player.requests.update((request.request_id, request) for request in requests)
        with contextlib.suppress(*DEADLY):  # whoever collects from it gives them to another
            await player.call("submit", None, list(requests))

    def _replace(self, player: Player, death: Exception) -> None:
        """Its episodes go to its successor, the spare worker, which begins them anew; the engine
        remembers what they had been told. One that several workers have died over has failed."""
        del self._workers[player.name]
        player.worker.end(str(death))
        if player.actor_id:
            self._burials.append(player.actor_id)
        self._num_fruitless += 1
        if self._num_fruitless > MAX_DEATHS * self._num_workers:
            raise self._died("the deaths of its environment workers", death)
        num = len(player.requests)
        self._on_death(f"{death}; another plays its {num} episodes again, from what is known")
        self._deaths.update(player.requests.keys())
        left: list[GenerationRequest] = []
        lost: list[GenerationRequest] = []
        for name, request in player.requests.items():
            (lost if self._deaths[name] >= MAX_DEATHS else left).append(request)
        is_alive = self.spare is not None and not self.spare.worker.is_dead
        successor = self.spare if self.spare is not None and is_alive else self._create()
        self._workers[successor.name] = successor
        self.spare = self._create()  # it has loaded everything by the next death
        begun(self._give(successor, left))
        if lost:
            begun(self._give_up(successor, lost, str(death)))

    async def _give_up(
        self, player: Player, requests: Sequence[GenerationRequest], reason: str
    ) -> None:
        player.requests.update((request.request_id, request) for request in requests)
        failure = RewardFailure(
            kind="crash",
            reward=self._environment.name,
            message=f"{MAX_DEATHS} workers died while they played it: {reason}",
        )
        with contextlib.suppress(*DEADLY):  # whoever collects from it gives them to another
            await player.call("give_up", None, list(requests), failure)

    def _create(self) -> Player:
        name = f"environment-{self.name.removeprefix('rollout-')}.{self._num_lives}"
        self._num_lives += 1
        return Player(name, self._hire(name), self._start_timeout_s)

    def _died(self, method: str, error: Exception) -> ReplicaDied:
        self._replica.worker.end(str(error))
        is_told = isinstance(error, WorkerError) and self.name in str(error)
        return ReplicaDied(str(error) if is_told else f"{self.name} died during {method}: {error}")


class Player:
    """A worker, which starts at once, and what it plays."""

    def __init__(self, name: str, worker: Worker, start_timeout_s: float) -> None:
        self.name = name
        self.worker = worker
        self.actor_id = ""
        self.pid = 0
        self.requests: dict[str, GenerationRequest] = {}
        self.collecting: asyncio.Future[Any] | None = None
        self._starting = begun(self._start(start_timeout_s))

    async def started(self) -> None:
        """Raises what the start raised."""
        await asyncio.shield(self._starting)

    async def call(self, method: str, timeout_s: float | None, *args: Any) -> Any:
        """As soon as it has started. Raises what the start raised, or the call."""
        await self.started()
        return await self.worker.call(method, *args, timeout_s=timeout_s)

    @property
    def groups(self) -> set[int]:
        return {r.task.group_id for r in self.requests.values() if r.task is not None}

    async def _start(self, timeout_s: float) -> None:
        _, self.actor_id, self.pid = await self.worker.call("place", timeout_s=timeout_s)
        try:
            await self.worker.call("start", timeout_s=timeout_s)
        except BaseException:
            self.worker.kill()
            raise
