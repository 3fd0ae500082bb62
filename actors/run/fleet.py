"""The replicas of one run: hired one by one, each in a place of its own.

A replica needs a shard of the store on its node. A new node gets one with the first replica there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import ray

from rlsys.controller.worker_protocols import ReplicaDied

from ..cluster.calls import Worker, WorkerError
from ..cluster.placement import Place
from ..environment.episode_replica import EpisodeReplica
from ..rollout.rollout_actor import RayReplica
from ..store.store_shards import StoreShards
from ..trainer.trainer_proxy import RayTrainerProxy


class RayFleet:
    """The controller's `Fleet`. `start_actor` starts the actor of a replica: the name of this life,
    its place. `playing`: what a replica in this place becomes whose rollouts an environment
    makes.
    """

    def __init__(
        self,
        places: Sequence[Place],
        start_actor: Callable[[str, Place], Worker],
        trainer_proxy: RayTrainerProxy,
        shards: StoreShards,
        *,
        start_timeout_s: float,
        playing: Callable[[RayReplica, Place], EpisodeReplica] | None = None,
    ) -> None:
        self._playing = playing
        self._places = places
        self._start_actor = start_actor
        self._learner = trainer_proxy
        self._shards = shards
        self._start_timeout_s = start_timeout_s
        self._num_lives: Counter[int] = Counter()
        self._replicas: list[RayReplica | EpisodeReplica] = []
        trainer_proxy.reader_nodes = self.nodes

    @property
    def replicas(self) -> list[RayReplica | EpisodeReplica]:
        """Those that live, or are being started."""
        self._replicas = [replica for replica in self._replicas if not replica.worker.is_dead]
        return self._replicas

    def nodes(self) -> set[str]:
        """Ids of those that have replicas, or what samples beside them."""
        return {node for one in self.replicas for node in one.nodes}

    async def start_worker(self, number: int) -> RayReplica | EpisodeReplica:
        while True:
            node_id = await self._places[number].node_id()
            try:
                return await self._start(number, node_id)
            except ReplicaDied:
                if _lives(node_id):
                    raise
                # With its node, of which Ray knew nothing yet: the place will be another.

    async def _start(self, number: int, node_id: str) -> RayReplica | EpisodeReplica:
        life, place = self._num_lives[number], self._places[number]
        self._num_lives[number] += 1
        name = f"rollout-{number}.{life}" if life else f"rollout-{number}"
        try:
            await self._shards.ensure(node_id)
        except (WorkerError, OSError) as error:
            raise ReplicaDied(f"{name} has no store to write to on its node: {error}") from None
        sampling = RayReplica(self._start_actor(name, place), self._learner, self._shards)
        replica = sampling if self._playing is None else self._playing(sampling, place)
        self._replicas.append(replica)
        try:
            await replica.start(self._start_timeout_s)
            if replica.node_id != node_id:
                raise ReplicaDied(f"{name} lost its node while it started.")
        except BaseException:
            for worker in replica.workers:
                worker.kill()
            raise
        return replica


def _lives(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
