"""The replicas of the policy: started, admitted with the newest weights, collected from, replaced.

One loop per replica number:

    start ──► load the newest weights ──► admit ──► collect ... ──► death ──► clean up ──► start
                        ▲                  │
    published weights ──┴──► sync ─────────┴──► gate

Starts and loads wait until the devices are free for generation (device_sharing.py). Requests of a
replica that died are reported and continue on another replica with their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rlsys.common.async_condition import AsyncCondition
from rlsys.common.supervision import Supervisor
from rlsys.controller.device_sharing import DeviceSharing
from rlsys.controller.partials import PartialRollouts
from rlsys.controller.state import RunState
from rlsys.controller.worker_protocols import Collected, Fleet, Replica, ReplicaDied, WeightsGone
from rlsys.dataflow.scheduling.router import Router
from rlsys.types import GenerationRequest, WeightManifest

NOTHING_LOADED = -1  # version of a replica without weights, or with those of undone steps


@dataclass(frozen=True, kw_only=True)
class ReplicaBatch:
    """Requests for one replica that share a prefix: those of a group, or the rest of one."""

    replica: str
    requests: Sequence[GenerationRequest]


@dataclass(frozen=True, kw_only=True)
class DeathOutcome:
    """Decision about a replica that died and its unfinished rollouts.

    Attributes:
        gives_up: Whether no replica of this number is started again.
        num_continued: Rollouts that continue on other replicas.
        num_dropped: Rollouts whose groups are dropped.
    """

    gives_up: bool
    num_continued: int
    num_dropped: int


class ReplicaPool:
    """All replicas of a run and the loops that keep them running.

    Args:
        replicas: Replicas that run already, by number. Others come from `fleet`.
        newest: Weights to load before a replica is admitted; None for those of model.path.
        supervisor: Counts the progress of replicas, by number.
        on_collected: Called with the results of replicas.
        on_death: Called with the number of a replica that died, the reason and its unfinished
            requests.
    """

    def __init__(
        self,
        state: RunState,
        devices: DeviceSharing,
        *,
        router: Router,
        fleet: Fleet,
        replicas: Mapping[int, Replica],
        newest: WeightManifest | None,
        supervisor: Supervisor[int],
        partials: PartialRollouts,
        on_collected: Callable[[Collected], None],
        on_death: Callable[[int, str, Sequence[str]], DeathOutcome],
    ) -> None:
        self._state = state
        self._devices = devices
        self._fleet = fleet
        self._initial = replicas
        self._awaited = set(replicas)  # numbers of those that are not admitted yet
        self._settled = AsyncCondition()
        self._newest = newest
        self._supervisor = supervisor
        self._partials = partials
        self._on_collected = on_collected
        self._on_death = on_death
        self._router = router
        self._present = {one.name: one for one in replicas.values()}  # with an engine
        self._serving: dict[str, Replica] = {}  # admitted
        self._versions: dict[str, int] = {}  # weights of serving replicas
        self._num_sending: Counter[str] = Counter()  # calls that submit requests, by replica
        self._sent = AsyncCondition()
        self._history = 0  # number of roll-backs; equal versions before and after one differ
        self._published: WeightManifest | None = None
        self._weights_published = AsyncCondition()
        self._num_places = state.config.rollout.num_replicas
        self.on_loaded: Callable[[float], None] = lambda seconds: None  # after each load
        self.on_sampled: Callable[[int], None] = lambda num_tokens: None  # with each report

    async def wait_until_admitted(self) -> None:
        """Wait until each initial replica is admitted or dead.

        So the first requests spread over all of them.
        """
        await self._settled.until(lambda: not self._awaited)

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the coroutines of all loops, by name."""
        places = range(self._num_places)
        return {
            "sync": self._sync(),
            **{f"replica {n}": self._keep(n, self._initial.get(n)) for n in places},
        }

    def publish(self, manifest: WeightManifest) -> None:
        """Announce new weights, which the sync loop loads into all replicas."""
        before = self._newest  # since the last roll-back
        assert before is None or manifest.version >= before.version, (
            f"version {manifest.version} of the weights was published after version "
            f"{before.version}, without a roll-back"
        )
        self._newest = self._published = manifest
        self._weights_published.notify()

    def rolled_back(self) -> None:
        """Mark all loaded weights as outdated, because their optimizer steps are lost."""
        self._history += 1
        self._newest = self._published = None
        self._versions = dict.fromkeys(self._versions, NOTHING_LOADED)

    async def release(self) -> None:
        """Release the device memory of all replicas until new weights are published.

        The collect loop notices a replica that dies meanwhile.
        """

        async def release(name: str, replica: Replica) -> None:
            if name in self._versions:
                self._versions[name] = NOTHING_LOADED
            with contextlib.suppress(ReplicaDied):
                await replica.release()

        await asyncio.gather(*(release(*item) for item in self._present.items()))

    def serving(self, name: str) -> Replica | None:
        """Return a replica that takes requests."""
        return self._serving.get(name)

    async def submit(self, batches: Sequence[ReplicaBatch]) -> None:
        """Send batches that the router has assigned to their replicas."""
        by_replica: dict[str, list[GenerationRequest]] = {}
        for batch in batches:
            by_replica.setdefault(batch.replica, []).extend(batch.requests)
        # Counted before any call begins, for `sent`.
        self._num_sending.update(by_replica.keys())
        await asyncio.gather(
            *(self._send(self._serving[name], requests) for name, requests in by_replica.items())
        )

    async def sent(self, name: str) -> None:
        """Wait until no requests are on their way to a replica."""
        await self._sent.until(lambda: not self._num_sending[name])

    async def collect_progress(self) -> None:
        """Collect all tokens that running requests have sampled."""
        for replica in list(self._serving.values()):
            with contextlib.suppress(ReplicaDied):
                self._on_collected(Collected(finished=[], parts=await replica.progress()))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests on the replicas that sample them."""
        for name, replica in list(self._serving.items()):
            if name in self._serving and (here := self._router.outstanding(name, request_ids)):
                with contextlib.suppress(ReplicaDied):  # the collect loop notices it
                    await replica.abort(here)

    def describe(self) -> str:
        """Return the load of each replica, for a stall's message."""
        if not self._serving:
            return "no replica is running"
        loads = {name: self._router.load(name) for name in self._serving}
        return f"outstanding tokens by replica: {loads}"

    async def _keep(self, number: int, replica: Replica | None) -> None:
        """Run the replica of one number; start a new one whenever it dies.

        Stop when the number is given up. Raise the last death if no other number is left.
        """
        while True:
            try:
                if replica is None:
                    async with self._devices.for_generation():
                        replica = await self._fleet.start_worker(number)
                        self._present[replica.name] = replica
                    self._state.progress.notify()
                await self._admit(replica)
                self._settle(number)
                await self._collect(number, replica)
            except ReplicaDied as death:
                self._settle(number)
                name = f"rollout-{number}" if replica is None else replica.name
                if await self.clean_up(number, name, replica, death):
                    self._num_places -= 1
                    if self._num_places == 0:
                        raise
                    return
            replica = None
            if pause_s := self._supervisor.pause_s(place=number):
                await asyncio.sleep(pause_s)

    def _settle(self, number: int) -> None:
        self._awaited.discard(number)
        self._settled.notify()

    async def _admit(self, replica: Replica) -> None:
        """Load the newest weights and admit the replica."""
        while True:
            async with self._devices.for_generation():
                gone = await self.load_newest(replica)
                if gone is None:
                    # No await since the load: the next version finds it among the serving ones.
                    self.serve(replica)
                    return
            while self._newest is gone:
                await self._weights_published.next()

    async def load_newest(self, replica: Replica) -> WeightManifest | None:
        """Load the newest weights; return them if they are gone, else None."""
        loaded: WeightManifest | None = None
        while (newest := self._newest) is not None and newest is not loaded:
            try:
                await replica.update_weights(newest, delayed=False)
            except WeightsGone:
                return newest
            loaded = newest
        return None

    @property
    def has_weights(self) -> bool:
        """Return whether weights to load were published since the start or the last roll-back."""
        return self._newest is not None

    def serve(self, replica: Replica) -> None:
        """Give requests to a replica, which has the newest weights."""
        version = self._state.gate.version  # of model.path
        if self._newest is not None:
            version = self._newest.version
        elif self._history > 0:
            version = NOTHING_LOADED  # the weights after the roll-back are not published yet
        if is_back := self._router.has(replica.name):
            self._router.resume(replica.name)
        else:
            self._router.add(replica.name, node=replica.node)
        self._state.store.add_node(replica.node)
        self._serving[replica.name] = replica
        self._versions[replica.name] = version
        if not is_back:
            self._state.observer.replica_joined(replica.name, version=version)
        self._open_gate()
        self._state.may_issue.notify()

    def retire(self, name: str) -> None:
        """Give a serving replica no more requests, until it is served again."""
        if (replica := self._serving.pop(name, None)) is None:
            return
        del self._versions[name]
        self._router.pause(name)
        self._close_node(replica)
        self._open_gate()

    async def _collect(self, number: int, replica: Replica) -> NoReturn:
        """Consume the results of one replica, by long polls, until it dies."""
        while True:
            self.collected(number, replica, await replica.collect())

    def collected(self, number: int, replica: Replica, collected: Collected) -> None:
        """Consume results of a replica."""
        for rollout in collected.finished:
            self._router.finished(replica.name, rollout.request_id)
        if collected.finished:
            self._supervisor.progressed(place=number)
        self.on_sampled(collected.num_sampled)
        self._on_collected(collected)
        if collected.finished or collected.num_sampled:
            self._state.progress.notify()

    async def clean_up(
        self, number: int, name: str, replica: Replica | None, death: ReplicaDied
    ) -> bool:
        """Remove a dead replica, report its unfinished requests and end its process.

        Return whether its number is given up.
        """
        request_ids: list[str] = []
        self._present.pop(name, None)
        if self._serving.pop(name, None) is not None:
            del self._versions[name]
        if self._router.has(name):
            request_ids = self._router.remove(name)
        if replica is not None:
            self._close_node(replica)
        self._open_gate()
        outcome = self._on_death(number, str(death), request_ids)
        self._state.observer.replica_died(
            name,
            str(death),
            num_continued=outcome.num_continued,
            num_dropped=outcome.num_dropped,
        )
        if replica is not None:
            await replica.clean_up(self._state.store.live_rows)
        return outcome.gives_up

    def _close_node(self, replica: Replica) -> None:
        """Place no more rows on the node of a replica that takes no requests if it was the last."""
        if replica.node not in self._router.nodes:
            self._state.store.remove_node(replica.node)

    async def _send(self, replica: Replica, requests: Sequence[GenerationRequest]) -> None:
        priors = {
            request.request_id: [part.cell for part in parts]
            for request in requests
            if (parts := self._partials.of(request.request_id))
        }
        try:
            with contextlib.suppress(ReplicaDied):  # the collect loop reports its requests
                await replica.submit(requests, priors)
        finally:
            self._num_sending[replica.name] -= 1
            self._sent.notify()

    async def _sync(self) -> None:
        """Consume published weights: load the newest into all replicas, then open the gate."""
        state = self._state
        while True:
            with state.waiting("sync", "weights"):
                await self._weights_published.until(lambda: self._published is not None)
            async with self._devices.for_generation():
                manifest, self._published = self._published, None
                if manifest is None:  # withdrawn by a roll-back
                    continue
                start = state.clock()
                if pauses := await self._load(manifest):
                    sync_s = state.clock() - start
                    state.observer.weights_loaded(manifest, sync_s=sync_s, pauses_s=pauses)
                    self.on_loaded(sync_s)
                self._open_gate()
            state.progress.notify()

    async def _load(self, manifest: WeightManifest) -> list[float]:
        """Load weights into every replica that lacks them; return their pauses in seconds.

        Delayed updates take one replica after the other, others all at once.
        """
        delayed = self._state.config.asynchrony.weight_update == "delayed"
        pauses: list[float] = []
        history = self._history

        async def load(name: str, replica: Replica) -> None:
            wanted = manifest
            # Equal versions are published again by a trainer that was restarted.
            while self._versions.get(name) != wanted.version:
                try:
                    pauses.append(await replica.update_weights(wanted, delayed=delayed))
                except ReplicaDied:  # the collect loop notices it
                    return
                except WeightsGone:  # the drained replica waits for newer weights
                    if self._devices.are_shared:  # they come after the next training
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
        """Move the gate to the oldest version that a serving replica has."""
        gate = self._state.gate
        oldest = min(self._versions.values(), default=NOTHING_LOADED)
        if oldest >= gate.version:
            gate.samplers_at(oldest)
            self._state.may_issue.notify()
