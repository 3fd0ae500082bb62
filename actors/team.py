"""All actors of one run: placed, started, served and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from actors.calls import Worker, WorkerDied, WorkerError
from actors.factories import RewardFactory, RolloutFactory, TrainerFactory
from actors.reward import RayScorer, RewardActor
from actors.rollout import RayReplica, RolloutActor
from actors.store import ShardAddress, ShardLost
from actors.store_shards import StoreShards
from actors.tracing import TraceCollector
from actors.trainer import RayLearner, TrainerActor
from rlsys.config import RunConfig
from rlsys.dataflow.graph import Dataflow, ScoreStage, TrainStage
from rlsys.dataflow.signal import Signal
from rlsys.errors import first_error
from rlsys.layout.transport.owned_file import WEIGHTS_PREFIX, shared_memory_dir
from rlsys.observe.trace import TraceBatch, Tracer
from rlsys.observe.trace_file import TraceFile
from rlsys.rewards import pack_rewards

# For actors to end their processes and files in good order; then they are killed.
CLOSE_TIMEOUT_S = 15.0


class Team:
    def __init__(self, config: RunConfig, flow: Dataflow, tokenizer: Any, trace: Path) -> None:
        self._config = _for_other_directories(config)
        self._flow = flow
        self._tokenizer = tokenizer
        self._weights_prefix = f"{WEIGHTS_PREFIX}{uuid.uuid4().hex[:12]}"
        self._max_pending = 100_000 if config.observe.trace else 0
        self._trace = TraceFile(trace) if config.observe.trace else None
        self.tracer = Tracer("controller", max_pending=self._max_pending)
        self.learner = RayLearner([])
        self.replicas: list[RayReplica] = []
        self.scorer = RayScorer(self._hire_reward, num_workers=0)
        self.shards = StoreShards(
            capacity_bytes=int(config.cluster.store_gib * 2**30),
            timeout_s=config.cluster.call_timeout_s,
            on_lost=self._shard_lost,
        )
        self._lost_shards: asyncio.Queue[ShardAddress] = asyncio.Queue()
        self.on_shard_lost: Callable[[str], None] = _raise_shard_lost
        """Told the name of a shard that has died; raises if the run cannot go on."""

    async def hire(self, places: list[dict[str, Any]]) -> None:
        """Create every actor; they build their engines when they are started. `places` holds the
        options of the trainer's ranks, then of the replicas."""
        config = self._config
        for node in ray.nodes():
            if node["Alive"]:
                await self.shards.add(node["NodeID"])
        num_ranks = config.trainer.num_ranks
        train = self._flow.stage(TrainStage)
        make_trainer = TrainerFactory(
            config=config,
            loss=train.loss,
            aggregation=train.aggregation,
            weights_prefix=self._weights_prefix,
        )
        ranks = [
            self._hire(f"trainer-{rank}", TrainerActor, options, rank, make_trainer)
            for rank, options in enumerate(places[:num_ranks])
        ]
        self.learner = RayLearner(ranks)
        self.replicas = [
            RayReplica(
                self._hire(
                    f"rollout-{number}",
                    RolloutActor,
                    options,
                    RolloutFactory(config=config, replica=number),
                ),
                self.learner,
                self.shards,
            )
            for number, options in enumerate(places[num_ranks:])
        ]
        self.scorer = RayScorer(self._hire_reward, num_workers=config.reward.num_workers)

    def _hire_reward(self, number: int) -> Worker:
        rewards = pack_rewards(self._flow.stage(ScoreStage).rewards)
        runner = RewardFactory(config=self._config, rewards=rewards)
        return self._hire(f"reward-{number}", RewardActor, {"num_cpus": 0}, runner, self._tokenizer)

    def _hire(self, name: str, actor: Any, options: dict[str, Any], *args: Any) -> Worker:
        tracer = Tracer(name, max_pending=self._max_pending)
        handle = actor.options(**options).remote(*args, self.shards.address, tracer)
        return Worker(name, handle, timeout_s=self._config.cluster.call_timeout_s)

    async def serve_while(
        self, work: Awaitable[None], stepped: Signal, on_report: Callable[[TraceBatch], None]
    ) -> None:
        """Run `work`, and beside it what it needs: freed rows go back, reports come in."""
        traces = TraceCollector(
            self._trace, lambda: self.workers, tracer=self.tracer, on_report=on_report
        )
        services = [
            asyncio.create_task(service)
            for service in (self.shards.run(), self._repair(), traces.run(stepped))
        ]
        main = asyncio.ensure_future(work)
        try:
            await asyncio.wait([main, *services], return_when=asyncio.FIRST_COMPLETED)
            for task in (main, *services):
                if task.done():
                    task.result()
            await main
            await traces.collect()
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            for task in (main, *services):
                task.cancel()
            await asyncio.gather(main, *services, return_exceptions=True)

    def _shard_lost(self, shard: ShardAddress) -> None:
        self.on_shard_lost(shard.name)
        self._lost_shards.put_nowait(shard)

    async def _repair(self) -> None:
        """Start a shard in place of each that died, where its node still lives."""
        while True:
            lost = await self._lost_shards.get()
            if lost.node_id not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
                continue
            try:
                await self.shards.add(lost.node_id)
            except WorkerDied:  # the node died with it, which Ray notices late
                continue
            for replica in self.replicas:
                if replica.node_id == lost.node_id:
                    with contextlib.suppress(WorkerDied):  # whoever collects from it notices
                        await replica.worker.call("use_store", self.shards.address)

    async def close(self) -> None:
        """End every actor; those with processes and files of their own are asked first."""
        engines = [*self.learner.ranks, *(replica.worker for replica in self.replicas)]
        await asyncio.gather(*(_close(worker) for worker in engines))
        with contextlib.suppress(WorkerError):
            await self.shards.close()
        for worker in self.workers:
            worker.kill()
        # Those of a trainer that was killed; shared memory outlives it.
        for leftover in shared_memory_dir().glob(f"{self._weights_prefix}-*"):
            leftover.unlink(missing_ok=True)
        if self._trace is not None:
            self._trace.close()

    @property
    def workers(self) -> list[Worker]:
        return [
            *self.learner.ranks,
            *(replica.worker for replica in self.replicas),
            *self.scorer.workers,
        ]


def _raise_shard_lost(shard: str) -> None:
    raise ShardLost(f"shard {shard} of the store died before the run began.")


def _for_other_directories(config: RunConfig) -> RunConfig:
    """With the model's path as it holds in actors, whose working directory is another."""
    path = Path(config.model.path)
    if not path.is_dir():  # a hub name
        return config
    return replace(config, model=replace(config.model, path=str(path.absolute())))


async def _close(worker: Worker) -> None:
    with contextlib.suppress(WorkerError):  # it has died, or hangs: it will be killed
        await worker.call("close", timeout_s=CLOSE_TIMEOUT_S)
