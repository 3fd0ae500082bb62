"""Whether the resources of a cluster hold a run, in Ray's own arithmetic."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import TaskPlacementGroupRemoved

from actors.cluster.local_ray import RayFailed
from actors.cluster.placement import (
    ClusterTooSmall,
    Need,
    Place,
    by_node,
    check_capacity,
    ranks_on_one_node,
)
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


def test_replicas_of_two_devices_share_the_places_of_two_ranks_each() -> None:
    rollout = RolloutConfig(
        engine="vllm", tensor_parallel=2, num_replicas=2, num_cpus=3, num_gpus=2
    )
    trainer = TrainerConfig(layout="dp5", num_cpus=1, num_gpus=1)
    config = RunConfig(rollout=rollout, trainer=trainer, placement="colocated", prompts_per_step=5)
    ranks, replicas = factories.needs(config, sampling_flow())
    assert [str(need) for need in [*ranks, *replicas]] == [
        *(f"trainer-{rank} (1.5 CPU, 1 GPU)" for rank in range(4)),
        "trainer-4 (1 CPU, 1 GPU)",
        "rollout-0 (3 CPU, 2 GPU) shares the devices of trainer-0 and trainer-1, in turns",
        "rollout-1 (3 CPU, 2 GPU) shares the devices of trainer-2 and trainer-3, in turns",
    ]
    group: Any = None
    options = [
        {kind: Place(need=need, group=group, index=0).options[kind] for kind in KINDS}
        for need in [*ranks, *replicas]
    ]
    # The replica's actor is in the place of its first rank, beside half a GPU of that rank.
    assert options == [
        *[{"num_cpus": 1.5, "num_gpus": 0.5}] * 4,
        {"num_cpus": 1, "num_gpus": 1},
        *[{"num_cpus": 0, "num_gpus": 0.5}] * 2,
    ]


@given(
    size=st.sampled_from([1, 2, 3, 4]),
    num_replicas=st.integers(1, 5),
    num_other_ranks=st.integers(0, 3),
    is_borrowed=st.booleans(),
)
def test_every_device_has_one_rank_and_at_most_one_replica(
    size: int, num_replicas: int, num_other_ranks: int, is_borrowed: bool
) -> None:
    size = 1 if is_borrowed else size
    num_ranks = size * num_replicas + num_other_ranks
    config = RunConfig(
        placement="separate" if is_borrowed else "colocated",
        prompts_per_step=num_ranks,
        trainer=TrainerConfig(layout=f"dp{num_ranks}"),
        rollout=RolloutConfig(
            engine="vllm",
            tensor_parallel=size,
            num_replicas=1 if is_borrowed else num_replicas,
            borrow=num_replicas if is_borrowed else 0,
        ),
    )
    ranks, replicas = factories.needs(config, sampling_flow())
    assert len({*ranks}) == num_ranks
    sharing = [need for need in replicas if need.colocated_with]
    assert [len(need.colocated_with) for need in sharing] == [size] * num_replicas
    hosts = [host for need in sharing for host in need.colocated_with]
    assert hosts == ranks[: size * num_replicas]
    assert [rank.is_shared for rank in ranks] == [rank in hosts for rank in ranks]


def test_the_ranks_of_a_replica_need_one_node() -> None:
    rollout = RolloutConfig(engine="vllm", tensor_parallel=2, num_replicas=2, num_gpus=2)
    trainer = TrainerConfig(layout="dp4", num_gpus=1)
    config = RunConfig(rollout=rollout, trainer=trainer, placement="colocated")
    ranks, replicas = factories.needs(config, sampling_flow())
    summed = by_node(ranks, ranks_on_one_node(replicas))
    assert [(need.name, need.num_cpus, need.num_gpus) for need in summed] == [
        ("ranks of rollout-0", 2, 2),
        ("ranks of rollout-1", 2, 2),
    ]
    check_capacity(summed, [{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 2}])
    check_capacity(ranks, [{"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 1}])
    with pytest.raises(ClusterTooSmall) as found:
        check_capacity(summed, [{"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 1}])
    assert found.value.rule.endswith("no room for ranks of rollout-1")
    single = replace(config, rollout=RolloutConfig(num_replicas=2, num_gpus=1))
    ranks, replicas = factories.needs(single, sampling_flow())
    assert by_node(ranks, ranks_on_one_node(replicas)) == ranks


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
