"""Ranks and replicas on the same GPUs, as Ray places them. The GPUs are numbers that Ray counts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.cluster.placement import Place, reserved
from actors.run import factories
from rlsys.config import RolloutConfig, RunConfig, TrainerConfig
from tests.actors.test_capacity import sampling_flow
from tests.clusters import NODE_OPTIONS, joined_cluster

LIMIT_S = 300.0


@ray.remote
class Holder:
    """An actor that holds its place."""

    def __init__(self, devices: tuple[str, ...] = ()) -> None:
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)

    def where(self) -> tuple[str, str]:
        """Return its node and the GPUs that its processes use."""
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


def hold(place: Place) -> Any:
    actor: Any = Holder
    return actor.options(**place.options).remote(place.devices)


@pytest.fixture(scope="module")
def nodes() -> Iterator[None]:
    """Nodes with three, one and two GPUs, of which two can hold a replica of two devices."""
    with joined_cluster(__file__, num_cpus=1) as cluster:
        for num_gpus in (3, 1, 2):
            cluster.add_node(num_cpus=8, num_gpus=num_gpus, **NODE_OPTIONS)
        yield


@pytest.mark.slow
def test_a_replica_has_the_gpus_of_its_ranks_also_after_they_died(nodes: None) -> None:
    rollout = RolloutConfig(engine="vllm", tensor_parallel=2, num_replicas=2, num_gpus=2)
    trainer = TrainerConfig(layout="dp4", num_gpus=1)
    config = RunConfig(rollout=rollout, trainer=trainer, placement="colocated")
    needs, replicas = factories.needs(config, sampling_flow())

    async def run() -> None:
        async with reserved(needs, replicas, roles={}, min_replicas=2, timeout_s=LIMIT_S) as places:
            ranks = [hold(place) for place in places.ranks]
            of_ranks = [await rank.where.remote() for rank in ranks]
            assert len({*of_ranks}) == 4
            ray.kill(ranks[3])  # its replica starts before its successor
            for number, place in enumerate(places.replicas):
                replica = hold(await place.with_devices(LIMIT_S))
                node, devices = await replica.where.remote()
                own = of_ranks[2 * number : 2 * number + 2]
                assert [*own] == [(node, device) for device in devices.split(",")]
            back = hold(places.ranks[3])
            assert await back.where.remote() == of_ranks[3]

    asyncio.run(run())


@pytest.mark.slow
def test_a_replica_of_one_device_leaves_its_gpu_to_ray(nodes: None) -> None:
    rollout = RolloutConfig(engine="vllm", num_replicas=2, num_gpus=1)
    trainer = TrainerConfig(layout="dp2", num_gpus=1)
    config = RunConfig(rollout=rollout, trainer=trainer, placement="colocated")
    needs, replicas = factories.needs(config, sampling_flow())

    async def run() -> None:
        async with reserved(needs, replicas, roles={}, min_replicas=2, timeout_s=LIMIT_S) as places:
            for rank, replica in zip(places.ranks, places.replicas, strict=True):
                assert await replica.with_devices(LIMIT_S) is replica
                both = [hold(rank), hold(replica)]
                first, second = [await one.where.remote() for one in both]
                assert first == second

    asyncio.run(run())
