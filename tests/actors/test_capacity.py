"""Whether the resources of a cluster hold a run, in Ray's own arithmetic."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import TaskPlacementGroupRemoved

from actors.cluster.local_ray import RayFailed
from actors.cluster.placement import ClusterTooSmall, Need, Place, check_capacity
from actors.run import factories
from rlsys.config import DataConfig, RolloutConfig, RunConfig, TrainerConfig
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import Prompts

KINDS = ("num_cpus", "num_gpus")


def needs(*cpus: float) -> list[Need]:
    return [Need(name=f"a-{i}", num_cpus=n, num_gpus=0, fix="x") for i, n in enumerate(cpus)]


def test_shares_that_add_up_to_a_whole_fit() -> None:
    # 2 - 0.8 - 0.8 is less than 0.4 in floating point.
    check_capacity(needs(0.8, 0.4, 0.8), [{"CPU": 2.0}])
    check_capacity(needs(*[0.1] * 10), [{"CPU": 1.0}])


def test_a_share_too_many_does_not_fit() -> None:
    with pytest.raises(ClusterTooSmall) as found:
        check_capacity(needs(0.8, 0.4001, 0.8), [{"CPU": 2.0}])
    assert found.value.rule.endswith(" a-1")
    assert "(2 x a (0.8 CPU), a-1 (0.4001 CPU))" in found.value.rule


def test_a_rank_and_its_colocated_replica_reserve_one_place() -> None:
    rollout = RolloutConfig(num_replicas=1, num_cpus=3, num_gpus=1)
    trainer = TrainerConfig(layout="dp2", num_cpus=2, num_gpus=1)
    config = RunConfig(rollout=rollout, trainer=trainer, placement="colocated")
    ranks, replicas = factories.needs(config, sampling_flow())
    assert [str(need) for need in [*ranks, *replicas]] == [
        "trainer-0 (3 CPU, 1 GPU)",
        "trainer-1 (2 CPU, 1 GPU)",
        "rollout-0 (3 CPU, 1 GPU) shares the devices of trainer-0, in turns",
    ]
    group: Any = None
    options = [
        {kind: Place(need=need, group=group, index=0).options[kind] for kind in KINDS}
        for need in [*ranks, *replicas]
    ]
    assert options == [
        {"num_cpus": 3, "num_gpus": 0.5},
        {"num_cpus": 2, "num_gpus": 1},
        {"num_cpus": 0, "num_gpus": 0.5},
    ]


def test_a_borrowed_replica_shares_the_place_of_a_rank() -> None:
    rollout = RolloutConfig(num_replicas=1, borrow=1, num_cpus=3, num_gpus=1)
    trainer = TrainerConfig(layout="dp2", num_cpus=2, num_gpus=1)
    ranks, replicas = factories.needs(RunConfig(rollout=rollout, trainer=trainer), sampling_flow())
    assert [str(need) for need in [*ranks, *replicas]] == [
        "trainer-0 (3 CPU, 1 GPU)",
        "trainer-1 (2 CPU, 1 GPU)",
        "rollout-0 (3 CPU, 1 GPU)",
        "borrowed-0 (3 CPU, 1 GPU) shares the devices of trainer-0, in turns",
    ]


def sampling_flow() -> Dataflow:
    flow = Dataflow()
    flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)
    return flow


def test_a_place_that_ray_removes_is_a_failure_with_the_way_to_resume() -> None:
    class Group:
        async def ready(self) -> None:
            raise TaskPlacementGroupRemoved

    place = Place(need=needs(1.0)[0], group=Group(), index=0)
    with pytest.raises(RayFailed) as found:
        asyncio.run(place.node_id())
    assert " a-0 " in str(found.value)
    assert "resume=True" in str(found.value)
