"""Weights sent to a replica on another node: damaged, lost, and damaged again."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.cluster.calls import Worker, end_all
from actors.cluster.gauges import Gauges
from actors.rollout.ray_replica import RayReplica
from actors.rollout.rollout_actor import RolloutActor
from actors.store.store_shards import StoreShards
from actors.trainer.weight_imports import WeightImports
from rlsys.config import RolloutConfig
from rlsys.config.rollout_config import WeightTransport
from rlsys.controller.worker_protocols import ReplicaDied, WeightsGone
from rlsys.dataflow.store.arena import PAGE_BYTES
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.training.publisher import Publisher
from rlsys.engines.training.ranks import Ranks
from rlsys.reallocation.transport.changed_bytes import Changes
from rlsys.reallocation.transport.group_transport import GroupSender
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.weight_deltas import WeightDelta
from rlsys.runs.observe.trace import Tracer
from rlsys.types import GenerationRequest, SamplingParams, WeightManifest
from tests.actors.test_fleet import pid_of, until_gone
from tests.clusters import joined_cluster
from tests.engines.torch_engine_harness import build_model

LIMIT_S = 600.0  # generous for a busy machine
NUMBERS = itertools.count()


@ray.remote
class DyingRank:
    def send(self) -> WeightDelta:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@dataclass
class Sender:
    """Trainer with one rank on another node, as its readers see it."""

    publisher: Publisher
    tensors: dict[str, torch.Tensor]
    transport: WeightTransport
    damages: list[bool] = field(default_factory=list)  # whether the next deltas are damaged
    is_dying: bool = False
    bases: list[int | None] = field(default_factory=list)
    num_sent_again: int = 0
    corrupt: list[int] = field(default_factory=list)
    links: set[Link | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.imports = WeightImports(self, self.transport)
        self.group_sender = GroupSender("127.0.0.1")

    def publish(self, version: int) -> WeightManifest:
        self.publisher.before_change()
        for tensor in self.tensors.values():
            tensor.mul_(1.001)
        manifest = self.publisher.publish(version)
        assert manifest is not None
        return manifest

    def weight_deltas(
        self, manifest: WeightManifest, node_id: str, base: int | None, link: Link | None
    ) -> list[Any]:
        self.bases.append(base)
        self.links.add(link)
        if self.is_dying:
            rank: Any = DyingRank
            return [rank.remote().send.remote()]
        weight_delta = self.publisher.weight_delta(manifest, node_id, base)
        assert weight_delta is not None
        if self.damages and self.damages.pop(0):
            content: Any = weight_delta.content
            content = content.values if isinstance(content, Changes) else content
            content[len(content) // 2] ^= 1
        if link is None:
            return [ray.put(weight_delta)]
        offer = self.group_sender.offer(weight_delta)
        self.group_sender.send(offer, link)
        return [ray.put(offer)]

    def send_again(self, manifest: WeightManifest) -> None:
        self.num_sent_again += 1

    def mark_corrupt(self, manifest: WeightManifest, reason: str) -> None:
        self.corrupt.append(manifest.version)


@asynccontextmanager
async def serving(path: Path, sender: Sender) -> AsyncIterator[RayReplica]:
    shards = StoreShards(
        capacity_bytes=16 * PAGE_BYTES,
        timeout_s=LIMIT_S,
        heartbeat_timeout_s=LIMIT_S,
        on_lost=lambda shard: None,
    )
    running = asyncio.create_task(shards.run())
    await shards.ensure(ray.nodes()[0]["NodeID"])
    actor: Any = RolloutActor
    engine = partial(TorchEngine, path, RolloutConfig(kv_cache_gib=0.05), dtype="float32")
    handle = actor.options(num_cpus=1).remote(
        engine, None, Gauges("test", "rollout-0"), shards.address, Tracer("rollout-0")
    )
    worker = Worker("rollout-0", handle, timeout_s=LIMIT_S, heartbeat_timeout_s=LIMIT_S)
    trainer_proxy: Any = sender
    replica = RayReplica(worker, trainer_proxy, shards)
    try:
        await replica.start(LIMIT_S)
        yield replica
    finally:
        await end_all([worker])
        await shards.close()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def served(replica: RayReplica) -> set[int]:
    """Return the versions of the tokens of a new request."""
    asked = GenerationRequest(
        request_id=f"{next(NUMBERS)}.0.0",
        prompt_token_ids=(5, 9, 40),
        sampling=SamplingParams(max_tokens=6),
        seed=0,
    )
    await replica.submit([asked], {})
    while not (finished := (await replica.collect()).finished):
        pass
    return {finished[0].min_version, finished[0].max_version}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with joined_cluster(__file__, num_cpus=2) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["objects", "gloo"])
def test_a_replica_keeps_its_weights_until_intact_ones_arrive(
    cluster: Any, tmp_path: Path, transport: WeightTransport
) -> None:
    path = build_model(tmp_path / "model", "qwen3")
    model = load_causal_lm(path, dtype="float32")
    tensors = {name: one.detach().clone() for name, one in model_tensors(model).items()}
    dtypes = dict.fromkeys(tensors, torch.float32)
    publisher = Publisher(tensors, dtypes, Ranks(0, 1), node="another")
    sender = Sender(publisher, tensors, transport)

    async def scenario() -> None:
        async with serving(path, sender) as replica:

            def update(version: int) -> Any:
                return replica.update_weights(sender.publish(version), delayed=False)

            pid = await pid_of(replica.worker)
            assert await served(replica) == {0}
            sender.damages = [True, False]
            await update(1)
            assert sender.num_sent_again == 1
            assert await served(replica) == {1}
            sender.is_dying = True  # the rank dies while it packs
            with pytest.raises(WeightsGone) as gone:
                await update(2)
            assert "rollout-0 " in str(gone.value)
            assert "version 2" in str(gone.value)
            assert await served(replica) == {1}
            sender.is_dying = False
            await update(3)
            assert await served(replica) == {3}
            sender.damages = [True, True]
            with pytest.raises(ReplicaDied) as died:
                await update(4)
            assert "version 4" in str(died.value)
            assert sender.num_sent_again == 3
            assert sender.corrupt == [4]
            await until_gone(pid)
        assert sender.bases == [None, None, 1, None, 3, None]
        # The rank that died interrupted a link.
        numbers = {None if link is None else link.number for link in sender.links}
        assert numbers == ({1, 2} if transport == "gloo" else {None})

    try:
        asyncio.run(scenario())
    finally:
        sender.group_sender.close()
        sender.publisher.close()
