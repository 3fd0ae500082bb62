"""Replicas on real Ray nodes of this machine: started, suspended, failing, joining and leaving.

Their engine is a script that the prompt of a request controls.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors.cluster.calls import Worker, end_all
from actors.cluster.gauges import Gauges
from actors.cluster.placement import ClusterTooSmall, Need, Place, reserved
from actors.rollout.ray_replica import RayReplica
from actors.rollout.rollout_actor import PART_COLUMNS, RolloutActor
from actors.run.fleet import RayFleet
from actors.store.store_actor import ShardAddress, StoreClient
from actors.store.store_shards import StoreShards
from rlsys.controller.partials import PartialRollouts
from rlsys.controller.worker_protocols import ReplicaDied
from rlsys.dataflow.graph.stages import EXPERTS_COLUMN
from rlsys.dataflow.store.arena import PAGE_BYTES
from rlsys.dataflow.store.stream_store import StageSpec, StreamStore
from rlsys.engines.generation.generation_protocol import EngineError, EngineStats
from rlsys.runs.observe.trace import Tracer
from rlsys.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    WeightManifest,
)
from tests.clusters import NODE_OPTIONS, cluster_of_one

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 300.0  # limit of any event, on a busy machine
CALL_TIMEOUT_S = 5.0
HEARTBEAT_TIMEOUT_S = 5.0

ECHO, DIE, GROW = 1, 2, 3  # prompts

# Tokens that GROW has sampled, by number of progress queries.
GROWTH = (1, 2, 2, 4)


class ScriptedEngine:
    """Engine whose GROW tokens show which engine sampled them.

    A token is 10 times the length of the prompt that the engine got, plus its position. The version
    changes with every second token.
    """

    context = 1 << 20

    def __init__(self) -> None:
        self._ended: asyncio.Queue[Generation | None] = asyncio.Queue()
        self._growing: dict[str, GenerationRequest] = {}
        self._num_queries = self._num_sampled = 0

    async def start(self) -> None:
        if self._is_to_hang("start"):
            await asyncio.sleep(LIMIT_S)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.prompt_token_ids[0] == GROW:
                self._growing[request.request_id] = request
                continue
            ids = np.asarray(request.prompt_token_ids, np.int32)
            self._ended.put_nowait(
                Generation(
                    request_id=request.request_id,
                    token_ids=ids,
                    sampler_logprobs=ids.astype(np.float32),
                    policy_versions=ids,
                    finish_reason=FinishReason.STOP,
                )
                if request.prompt_token_ids[0] == ECHO
                else None
            )

    async def collect(self) -> list[Generation]:
        if (ended := await self._ended.get()) is None:
            raise EngineError("its loop broke")
        return [ended]

    async def progress(self) -> list[Generation]:
        if not self._growing:
            return []
        self._num_sampled = GROWTH[self._num_queries]
        self._num_queries += 1
        for name, request in list(self._growing.items()):
            if request.sampling.max_tokens <= self._num_sampled:
                self._ended.put_nowait(self._grown(request, FinishReason.LENGTH))
                del self._growing[name]
        return [self._grown(request, FinishReason.ABORTED) for request in self._growing.values()]

    def _grown(self, request: GenerationRequest, reason: FinishReason) -> Generation:
        num_prompt_tokens = len(request.prompt_token_ids)
        places = np.arange(self._num_sampled, dtype=np.int32)
        ids = 10 * num_prompt_tokens + places
        experts = np.arange(num_prompt_tokens + self._num_sampled - 1, dtype=np.uint8)[:, None]
        return Generation(
            request_id=request.request_id,
            token_ids=ids,
            sampler_logprobs=-ids.astype(np.float32),
            policy_versions=num_prompt_tokens + places // 2,
            finish_reason=reason,
            routed_experts=experts + np.uint8(10 * request.num_prior_tokens),
        )

    async def abort(self, request_ids: Collection[str]) -> None: ...

    async def pause(self) -> None:
        await asyncio.sleep(LIMIT_S)  # hangs, and the call with it

    async def prepare(self, manifest: WeightManifest) -> None: ...

    async def load(self) -> None: ...

    async def resume(self) -> None: ...

    async def release(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=0,
            num_running=0,
            num_generated_tokens=self._num_sampled,
            policy_version=0,
        )

    async def close(self) -> None: ...

    def _is_to_hang(self, what: str) -> bool:
        return Path(os.environ["RLSYS_TEST_HANGS"], what).exists()


class TrainerProxy:
    """Trainer whose versions have no weights: the engine hangs before it loads one."""

    reader_nodes: Any = None


@pytest.fixture(scope="module")
def hangs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of files that name the methods of the engine that hang."""
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def cluster(hangs: Path) -> Iterator[Any]:
    """Cluster whose head has room for one replica."""
    environment = {
        "PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}",
        "RLSYS_TEST_HANGS": str(hangs),
    }
    with cluster_of_one(num_cpus=1) as cluster:
        try:
            ray.init(
                address=cluster.address,
                logging_level="ERROR",
                log_to_driver=False,
                runtime_env={"env_vars": environment},
            )
            yield cluster
        finally:
            ray.shutdown()


@dataclass(kw_only=True)
class RunningFleet:
    fleet: RayFleet
    shards: StoreShards
    lost: asyncio.Queue[ShardAddress]
    created: asyncio.Queue[Worker]


@asynccontextmanager
async def running_fleet(num_replicas: int) -> AsyncIterator[RunningFleet]:
    """Run a fleet that has room for one replica from the start."""
    needs = [
        Need(name=f"rollout-{number}", num_cpus=1, num_gpus=0, fix="")
        for number in range(num_replicas)
    ]
    lost: asyncio.Queue[ShardAddress] = asyncio.Queue()
    created: asyncio.Queue[Worker] = asyncio.Queue()
    shards = StoreShards(
        capacity_bytes=16 * PAGE_BYTES,
        timeout_s=LIMIT_S,
        heartbeat_timeout_s=LIMIT_S,
        on_lost=lost.put_nowait,
    )
    running = asyncio.create_task(shards.run())

    def start_actor(name: str, number: int, place: Place) -> Worker:
        actor: Any = RolloutActor
        options = actor.options(**place.options)
        handle = options.remote(
            ScriptedEngine, None, Gauges("test", name), shards.address, Tracer(name)
        )
        worker = Worker(
            name,
            handle,
            timeout_s=CALL_TIMEOUT_S,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        )
        created.put_nowait(worker)
        return worker

    trainer_proxy: Any = TrainerProxy()
    async with reserved(
        [needs[0]], needs[1:], roles={}, min_replicas=0, timeout_s=LIMIT_S
    ) as places:
        fleet = RayFleet(
            [*places.ranks, *places.replicas],
            start_actor,
            trainer_proxy,
            shards,
            start_timeout_s=LIMIT_S,
        )
        try:
            yield RunningFleet(fleet=fleet, shards=shards, lost=lost, created=created)
        finally:
            await end_all([replica.worker for replica in fleet.replicas])
            await shards.close()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def start_worker(world: RunningFleet, number: int = 0) -> RayReplica:
    replica = await asyncio.wait_for(world.fleet.start_worker(number), LIMIT_S)
    assert isinstance(replica, RayReplica)
    return replica


def first(world: RunningFleet) -> RayReplica:
    replica = world.fleet.replicas[0]
    assert isinstance(replica, RayReplica)
    return replica


async def echo(replica: RayReplica) -> None:
    """Sample one rollout and check that it reaches the store."""
    await replica.submit([request(ECHO)], {})
    while not (finished := (await replica.collect()).finished):
        pass
    assert [rollout.request_id for rollout in finished] == ["0.0.0"]


def request(*prompt: int, max_tokens: int = 256) -> GenerationRequest:
    return GenerationRequest(
        request_id="0.0.0",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
    )


async def pid_of(worker: Worker) -> int:
    pid: int = await worker.handle.__ray_call__.remote(lambda _: os.getpid())
    return pid


async def until_gone(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(process, gone.set)
    await asyncio.wait_for(gone.wait(), LIMIT_S)
    asyncio.get_running_loop().remove_reader(process)
    os.close(process)


async def collect_until_death(replica: RayReplica) -> str:
    try:
        while True:
            await replica.collect()
    except ReplicaDied as death:
        return str(death)


@pytest.mark.slow
def test_a_suspended_failing_or_hanging_replica_is_replaced(cluster: Any) -> None:
    async def run() -> None:
        async with running_fleet(1) as world:
            stopped = await start_worker(world)
            await echo(stopped)
            pid = await pid_of(stopped.worker)
            os.kill(pid, signal.SIGSTOP)
            death = await collect_until_death(stopped)
            assert death.startswith("rollout-0 died while working on rollouts: ")
            assert "cluster.heartbeat_timeout_s" in death
            await until_gone(pid)

            failing = await start_worker(world)
            await echo(failing)
            pid = await pid_of(failing.worker)
            await failing.submit([request(DIE)], {})
            assert await collect_until_death(failing) == (
                "rollout-0.1 died while working on rollouts: its loop broke"
            )
            await until_gone(pid)

            hanging = await start_worker(world)
            collecting = asyncio.create_task(collect_until_death(hanging))
            manifest = WeightManifest(version=1)
            with pytest.raises(ReplicaDied) as died:
                await hanging.update_weights(manifest, delayed=False)
            for death in (str(died.value), await collecting):
                assert death.startswith("rollout-0.2 ")
                assert "cluster.call_timeout_s" in death
                assert "5 s" in death
            assert world.fleet.replicas == []
            await echo(await start_worker(world))

    asyncio.run(run())


def test_a_running_rollout_is_stored_in_parts_and_continues_after_a_death(cluster: Any) -> None:
    # The first replica samples 4 of 6 tokens. Each is written to the store once, from which the
    # successor continues.
    store = StreamStore(
        tensors=["token_ids"],
        scalars=[],
        stages=[
            StageSpec(name="generate", writes=("token_ids",)),
            StageSpec(name="train", reads=("token_ids",)),
        ],
        group_size=1,
        max_bytes=1 << 20,
        max_row_bytes=1 << 10,
        on_free=lambda rows: None,
    )
    partials = PartialRollouts(store)
    growing = request(GROW, 9, max_tokens=6)

    async def run() -> None:
        async with running_fleet(1) as world:
            first = await start_worker(world)
            await first.submit([growing], {})
            # has one token, and at least two are requested
            assert await first.worker.call("progress", 2) == []
            parts = [*await first.progress()]
            assert await first.progress() == []  # there are no new tokens
            parts += await first.progress()
            assert [(p.start, p.num_tokens, p.min_version) for p in parts] == [(0, 2, 2), (2, 2, 3)]
            for part in parts:
                partials.add(part)
            assert partials.of("0.0.0") == parts
            os.kill(await pid_of(first.worker), signal.SIGKILL)
            await collect_until_death(first)
            await first.clean_up(store.live_rows)

            second = await start_worker(world)
            await second.submit([growing], {"0.0.0": [part.cell for part in parts]})
            (more,) = await second.progress()
            assert (more.start, more.num_tokens, more.min_version) == (4, 1, 6)
            assert await second.progress() == []  # it has ended
            collected = await second.collect()
            assert collected.num_sampled
            (finished,) = collected.finished
            assert (finished.num_prompt_tokens, finished.num_tokens) == (2, 6)
            assert (finished.min_version, finished.max_version) == (2, 6)
            assert finished.finish_reason is FinishReason.LENGTH

            cells = [part.cell for part in [*parts, more]] + [finished.cell]
            stored = StoreClient(world.shards.address).get(cells, [*PART_COLUMNS, EXPERTS_COLUMN])
            assert [x.tolist() for x in stored["token_ids"]] == [
                *([20, 21], [22, 23], [60]),
                [20, 21, 22, 23, 60, 61],
            ]
            assert [x.tolist() for x in stored["sampler_logprobs"]] == [
                *([-20.0, -21.0], [-22.0, -23.0], [-60.0]),
                [-20.0, -21.0, -22.0, -23.0, -60.0, -61.0],
            ]
            assert [x.tolist() for x in stored["policy_versions"]] == [
                *([2, 2], [3, 3], [6]),
                [2, 2, 3, 3, 6, 6],
            ]
            # of the prompt and all tokens but the last
            assert [x.tolist() for x in stored["routed_experts"]] == [
                *([0, 1, 2], [3, 4], [45]),
                [0, 1, 2, 3, 4, 45, 46],
            ]

            await second.submit([request(ECHO)], {})  # nothing is sampled for it
            while not (collected := await second.collect()).finished:
                assert not collected.num_sampled
            assert not collected.num_sampled

    asyncio.run(run())


@pytest.mark.slow
def test_a_cancelled_start_leaves_no_process(cluster: Any, hangs: Path) -> None:
    async def run() -> None:
        async with running_fleet(2) as world:
            (hangs / "start").touch()
            starting = asyncio.create_task(start_worker(world, 0))
            waiting = asyncio.create_task(start_worker(world, 1))
            pid = await pid_of(await asyncio.wait_for(world.created.get(), LIMIT_S))
            for task in (starting, waiting):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until_gone(pid)
            (hangs / "start").unlink()
            await echo(await start_worker(world, 0))

    asyncio.run(run())


def test_the_error_of_a_run_without_room_names_what_it_lacks(cluster: Any) -> None:
    async def run(num_cpus: float, min_replicas: int) -> None:
        ranks = [Need(name="trainer-0", num_cpus=num_cpus, num_gpus=0, fix="trainer.num_cpus")]
        replicas = [Need(name="rollout-0", num_cpus=1, num_gpus=0, fix="rollout.num_replicas")]
        async with reserved(ranks, replicas, roles={}, min_replicas=min_replicas, timeout_s=1):
            await run(1, 0)  # a second run, while the first uses the cluster

    with pytest.raises(ClusterTooSmall) as error:
        asyncio.run(run(2, 0))
    assert error.value.rule.endswith("trainer-0")
    assert "trainer.num_cpus" in error.value.fix
    with pytest.raises(ClusterTooSmall) as error:
        asyncio.run(run(1, 1))
    assert error.value.rule.endswith("rollout-0")
    assert "rollout.num_replicas" in error.value.fix
    with pytest.raises(ClusterTooSmall) as error:
        asyncio.run(run(1, 0))
    assert "cluster.start_timeout_s" in error.value.rule


DRIVER = """
import asyncio, os, sys, ray
from actors.cluster.calls import HEARTBEAT_GROUP, Heartbeat, Worker

@ray.remote(concurrency_groups=HEARTBEAT_GROUP)
class Busy(Heartbeat):
    def pid(self):
        return os.getpid()

    def work(self):
        while True:
            pass

async def main():
    worker = Worker("busy", Busy.remote(), timeout_s=3600, heartbeat_timeout_s=3600)
    print(await worker.call("pid"), flush=True)
    await worker.call("work")

ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
asyncio.run(main())
"""


@pytest.mark.slow
def test_the_actors_of_a_dead_driver_end(cluster: Any) -> None:
    # Even if a call and a heartbeat of ten minutes are pending.
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    asyncio.run(until_gone(pid))


@pytest.mark.slow
def test_a_replica_joins_with_its_node_and_leaves_with_it(cluster: Any) -> None:
    """This must be the last test of the module, because it leaves a second node."""

    async def run() -> None:
        async with running_fleet(2) as world:
            await echo(await start_worker(world, 0))
            joining = asyncio.create_task(start_worker(world, 1))
            await echo(first(world))  # a replica without a place does not block others
            assert not joining.done()

            node = cluster.add_node(num_cpus=1, **NODE_OPTIONS)
            joined = await joining
            assert joined.node_id == node.node_id
            await echo(joined)
            assert node.node_id in {shard.node_id for shard in world.shards.address.shards}

            cluster.remove_node(node, allow_graceful=False)
            assert "rollout-1 died while working on rollouts" in await collect_until_death(joined)
            await asyncio.wait_for(joined.clean_up(lambda shard: {}), LIMIT_S)
            lost = await asyncio.wait_for(world.lost.get(), LIMIT_S)
            assert lost.node_id == node.node_id
            assert node.node_id not in {shard.node_id for shard in world.shards.address.shards}

            rejoining = asyncio.create_task(start_worker(world, 1))
            await echo(first(world))
            other = cluster.add_node(num_cpus=1, **NODE_OPTIONS)
            rejoined = await rejoining
            assert rejoined.name.startswith("rollout-1.")
            assert rejoined.node_id == other.node_id
            await echo(rejoined)

    asyncio.run(run())
