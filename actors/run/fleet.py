"""Replicas of one run, started one by one, each in its own place.

A replica needs a shard of the store on its node. A new node gets one with its first replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import ray
from ray.exceptions import RayError

from rlsys.controller.worker_protocols import ReplicaDied

from ..cluster.calls import Worker, WorkerError
from ..cluster.placement import Place
from ..environment.episode_replica import EpisodeReplica
from ..rollout.ray_replica import RayReplica
from ..store.store_shards import StoreShards
from ..trainer.trainer_proxy import RayTrainerProxy


class RayFleet:
    """The controller's `Fleet`.

    `start_actor` starts the actor of a replica, given the name of this life, the replica's number
    and its place. `name` returns the name of the first life. If an environment makes the rollouts,
    `playing` wraps the sampling replica of a place. `until_ready` waits until the server behind a
    replica can take requests.
    """

    def __init__(
        self,
        places: Sequence[Place],
        start_actor: Callable[[str, int, Place], Worker],
        trainer_proxy: RayTrainerProxy,
        shards: StoreShards,
        *,
        start_timeout_s: float,
        name: Callable[[int], str] = "rollout-{}".format,
        until_ready: Callable[[int], Awaitable[None]] | None = None,
        playing: Callable[[RayReplica, Place], EpisodeReplica] | None = None,
    ) -> None:
        self._playing = playing
        self._until_ready = until_ready
        self._places = places
        self._start_actor = start_actor
        self._trainer_proxy = trainer_proxy
        self._shards = shards
        self._start_timeout_s = start_timeout_s
        self._name = name
        self._num_lives: Counter[int] = Counter()
        self._replicas: list[RayReplica | EpisodeReplica] = []
        trainer_proxy.reader_nodes = self.nodes

    @property
    def replicas(self) -> list[RayReplica | EpisodeReplica]:
        """Return the replicas that are alive or starting."""
        self._replicas = [replica for replica in self._replicas if not replica.worker.is_dead]
        return self._replicas

    def nodes(self) -> set[str]:
        """Return the ids of the nodes with replicas or engines of partners."""
        return {node for one in self.replicas for node in one.nodes}

    async def start_worker(self, number: int) -> RayReplica | EpisodeReplica:
        """Start a replica by its number, once its place has a node and its server is ready."""
        while True:
            if self._until_ready is not None:
                await self._until_ready(number)
            node_id = await self._places[number].node_id()
            try:
                return await self._start(number, node_id)
            except ReplicaDied:
                if _is_alive(node_id):
                    raise
                # Its node was lost before Ray noticed; Ray reserves the place on another node.

    async def _start(self, number: int, node_id: str) -> RayReplica | EpisodeReplica:
        life, place = self._num_lives[number], self._places[number]
        self._num_lives[number] += 1
        name = f"{self._name(number)}.{life}" if life else self._name(number)
        try:
            await self._shards.ensure(node_id)
        except (WorkerError, OSError) as error:
            raise ReplicaDied(f"{name} has no shard of the store on its node: {error}") from None
        try:
            place = await place.with_devices(self._start_timeout_s)
        except (RayError, TimeoutError) as error:
            raise ReplicaDied(f"the places of {name} did not name their GPUs: {error!r}") from None
        sampling = RayReplica(
            self._start_actor(name, number, place), self._trainer_proxy, self._shards
        )
        replica = sampling if self._playing is None else self._playing(sampling, place)
        self._replicas.append(replica)
        try:
            await replica.start(self._start_timeout_s)
            if replica.node_id != node_id:
                raise ReplicaDied(f"{name} lost its node while it started")
        except BaseException:
            for worker in replica.workers:
                worker.kill()
            raise
        return replica


def _is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
