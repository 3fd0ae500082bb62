"""The replicas of the policy: hired, admitted with the newest weights, collected from, replaced.

One loop for each place that a replica may have:

    hire ──► load the newest weights ──► admit ──► collect ... ──► its death ──► bury ──► hire again
                        ▲                  │
    published weights ──┴──► sync ─────────┴──► gate

Whatever takes memory there, a start or a load, belongs to generation's turn (device_sharing.py).

Requests of a replica that died are told, to go on elsewhere with what they had.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.device_sharing import DeviceSharing
from rlsys.controller.partials import PartialRollouts
from rlsys.controller.state import RunState
from rlsys.controller.worker_protocols import Collected, Fleet, Replica, ReplicaDied, WeightsGone
from rlsys.dataflow.scheduling.router import Router
from rlsys.types import GenerationRequest, WeightManifest

# A replica that dies this often in a row, without having finished one rollout, has no successor.
MAX_FRUITLESS_STARTS = 5

# Before a replica is hired again that died without having finished anything: 1 s, 2 s, 4 s, ...
BACKOFF_S = 1.0

NOTHING_LOADED = -1  # of the history that the run is in; or released


@dataclass(frozen=True, kw_only=True)
class ReplicaBatch:
    """Requests for one replica that share a prefix: a whole group's, or what is left of one."""

    replica: str
    requests: Sequence[GenerationRequest]


class ReplicaPool:
    """`replicas`, by the number of their place, are there already; all others come from `fleet`.
    `newest`: the weights to load before a replica is admitted; None: those of model.path.

    What the replicas tell goes to `on_collected`, the requests that a replica leaves behind to
    `on_death`.
    """

    def __init__(
        self,
        state: RunState,
        turns: DeviceSharing,
        *,
        router: Router,
        fleet: Fleet,
        replicas: Mapping[int, Replica],
        newest: WeightManifest | None,
        partials: PartialRollouts,
        on_collected: Callable[[Collected], None],
        on_death: Callable[[Sequence[str]], None],
    ) -> None:
        self._state = state
        self._turns = turns
        self._fleet = fleet
        self._initial = replicas
        self._awaited = set(replicas)  # places of those that are yet to be admitted
        self._settled = AsyncCondition()
        self._newest = newest
        self._partials = partials
        self._on_collected = on_collected
        self._on_death = on_death
        self._router = router
        self._present = {one.name: one for one in replicas.values()}  # that have an engine
        self._serving: dict[str, Replica] = {}  # and have been admitted
        self._versions: dict[str, int] = {}  # of those that serve
        self._history = 0  # counts roll-backs: versions of different histories are no equals
        self._fruitful: set[str] = set()  # names of those that have finished a rollout
        self._published: WeightManifest | None = None
        self._weights_published = AsyncCondition()
        self._num_places = state.config.rollout.num_replicas

    async def wait_until_admitted(self) -> None:
        """Waits until each of the replicas that were there is admitted or dead, so that the first
        requests spread over them.
        """
        await self._settled.until(lambda: not self._awaited)

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        places = range(self._num_places)
        return {
            "sync": self._sync(),
            **{f"replica {n}": self._keep(n, self._initial.get(n)) for n in places},
        }

    def publish(self, manifest: WeightManifest) -> None:
        """New weights are there."""
        before = self._newest  # in this history
        assert before is None or manifest.version >= before.version, (
            f"version {manifest.version} of the weights was published after version "
            f"{before.version}, which replicas may have; nothing goes back but by a roll-back"
        )
        self._newest = self._published = manifest
        self._weights_published.notify()

    def rolled_back(self) -> None:
        """The weights that the replicas have belong to steps that are lost; others will come."""
        self._history += 1
        self._newest = self._published = None
        self._versions = dict.fromkeys(self._versions, NOTHING_LOADED)

    async def release(self) -> None:
        """Training has taken its turn: all replicas let their memory go, until new weights are
        published. One that dies of it has none; whoever collects from it notices.
        """

        async def release(name: str, replica: Replica) -> None:
            if name in self._versions:
                self._versions[name] = NOTHING_LOADED
            with contextlib.suppress(ReplicaDied):
                await replica.release()

        await asyncio.gather(*(release(*item) for item in self._present.items()))

    async def submit(self, batches: Sequence[ReplicaBatch]) -> None:
        """Batches that the router has assigned."""
        by_replica: dict[str, list[GenerationRequest]] = {}
        for batch in batches:
            by_replica.setdefault(batch.replica, []).extend(batch.requests)
        await asyncio.gather(
            *(self._send(self._serving[name], requests) for name, requests in by_replica.items())
        )

    async def collect_progress(self) -> None:
        """All that running requests have sampled is told before this returns."""
        for replica in list(self._serving.values()):
            with contextlib.suppress(ReplicaDied):
                self._on_collected(Collected(finished=[], parts=await replica.progress()))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Whoever samples these requests stops."""
        for name, replica in list(self._serving.items()):
            if name in self._serving and (here := self._router.outstanding(name, request_ids)):
                with contextlib.suppress(ReplicaDied):  # whoever collects from it notices
                    await replica.abort(here)

    def describe(self) -> str:
        if not self._serving:
            return "no replica is there"
        loads = {name: self._router.load(name) for name in self._serving}
        return f"outstanding tokens by replica: {loads}"

    async def _keep(self, number: int, replica: Replica | None) -> None:
        """Keeps one place filled: waits for a replica's death, then hires its successor. Gives the
        place up after MAX_FRUITLESS_STARTS, and raises the last death if it was the last place.
        """
        num_fruitless = 0
        while True:
            try:
                if replica is None:
                    async with self._turns.for_generation():
                        replica = await self._fleet.start_worker(number)
                        self._present[replica.name] = replica
                    self._state.progress.notify()
                await self._admit(replica)
                self._settle(number)
                await self._collect(replica)
            except ReplicaDied as death:
                self._settle(number)
                name = f"rollout-{number}" if replica is None else replica.name
                num_fruitless = 0 if name in self._fruitful else num_fruitless + 1
                await self._clean_up(name, replica, death)
                if num_fruitless == MAX_FRUITLESS_STARTS:
                    self._num_places -= 1
                    if self._num_places == 0:
                        raise
                    return
            replica = None
            if num_fruitless:
                await asyncio.sleep(BACKOFF_S * 2 ** (num_fruitless - 1))

    def _settle(self, number: int) -> None:
        self._awaited.discard(number)
        self._settled.notify()

    async def _admit(self, replica: Replica) -> None:
        """Load the newest weights, and take part from then on."""
        while True:
            async with self._turns.for_generation():
                gone = await self._load_newest(replica)
                if gone is None:
                    # No wait since: whatever is published next finds it among those that serve.
                    self._serve(replica)
                    return
            while self._newest is gone:
                await self._weights_published.next()

    async def _load_newest(self, replica: Replica) -> WeightManifest | None:
        """Returns the newest weights where they are gone."""
        loaded: WeightManifest | None = None
        while (newest := self._newest) is not None and newest is not loaded:
            try:
                await replica.update_weights(newest, delayed=False)
            except WeightsGone:
                return newest
            loaded = newest
        return None

    def _serve(self, replica: Replica) -> None:
        """It has the newest weights: give it requests."""
        version = self._state.gate.version  # of model.path
        if self._newest is not None:
            version = self._newest.version
        elif self._history > 0:
            version = NOTHING_LOADED  # those of the step that the run has gone back to will come
        self._router.add(replica.name, node=replica.node)
        self._state.store.add_node(replica.node)
        self._serving[replica.name] = replica
        self._versions[replica.name] = version
        self._state.observer.replica_joined(replica.name, version=version)
        self._open_gate()
        self._state.may_issue.notify()

    async def _collect(self, replica: Replica) -> NoReturn:
        """Consumes rollouts of one replica as they end; a long poll, answered when one has."""
        while True:
            collected = await replica.collect()
            for rollout in collected.finished:
                self._router.finished(replica.name, rollout.request_id)
            if collected.finished:
                self._fruitful.add(replica.name)
            self._on_collected(collected)
            if collected.finished or collected.has_sampled:
                self._state.progress.notify()

    async def _clean_up(self, name: str, replica: Replica | None, death: ReplicaDied) -> None:
        """Its requests are to go on elsewhere, with what had been sampled of them."""
        request_ids: list[str] = []
        self._present.pop(name, None)
        if self._serving.pop(name, None) is not None:
            del self._versions[name]
            request_ids = self._router.remove(name)
        if replica is not None and replica.node not in self._router.nodes:
            self._state.store.remove_node(replica.node)
        self._state.observer.replica_died(name, str(death), num_requests=len(request_ids))
        self._open_gate()
        self._on_death(request_ids)
        if replica is not None:
            await replica.clean_up(self._state.store.live_rows)

    async def _send(self, replica: Replica, requests: Sequence[GenerationRequest]) -> None:
        priors = {
            request.request_id: [part.cell for part in parts]
            for request in requests
            if (parts := self._partials.of(request.request_id))
        }
        # Whoever collects from a dead replica sends on what it had.
        with contextlib.suppress(ReplicaDied):
            await replica.submit(requests, priors)

    async def _sync(self) -> None:
        """Consumes published weights. Waits for a new version; loads the newest into all replicas,
        and opens the gate when the last has it.
        """
        state = self._state
        while True:
            with state.waiting("sync", "weights"):
                await self._weights_published.until(lambda: self._published is not None)
            async with self._turns.for_generation():
                manifest, self._published = self._published, None
                if manifest is None:  # a roll-back took them away meanwhile
                    continue
                start = state.clock()
                if pauses := await self._load(manifest):
                    state.observer.weights_loaded(
                        manifest, sync_s=state.clock() - start, pauses_s=pauses
                    )
                self._open_gate()
            state.progress.notify()

    async def _load(self, manifest: WeightManifest) -> list[float]:
        """Into every replica that lacks it, all at once or one after the other; the pause of each,
        in seconds.
        """
        delayed = self._state.config.asynchrony.weight_update == "delayed"
        pauses: list[float] = []
        history = self._history

        async def load(name: str, replica: Replica) -> None:
            wanted = manifest
            # Else published again by a trainer that was restarted.
            while self._versions.get(name) != wanted.version:
                try:
                    pauses.append(await replica.update_weights(wanted, delayed=delayed))
                except ReplicaDied:  # noticed by whoever collects from it
                    return
                except WeightsGone:  # a replica that has drained for them waits for newer ones
                    if self._turns.are_shared:  # which come in another turn
                        return
                    while self._newest is None or self._newest is wanted:
                        await self._weights_published.next()
                    wanted = self._newest
                    continue
                if name in self._versions and history == self._history:
                    self._versions[name] = wanted.version
                return

        alive = list(self._serving.items())
        if delayed:
            for item in alive:
                await load(*item)
        else:
            await asyncio.gather(*(load(*item) for item in alive))
        return pauses

    def _open_gate(self) -> None:
        """The gate follows the replica with the oldest weights."""
        gate = self._state.gate
        oldest = min(self._versions.values(), default=NOTHING_LOADED)
        if oldest >= gate.version:
            gate.samplers_at(oldest)
            self._state.may_issue.notify()
