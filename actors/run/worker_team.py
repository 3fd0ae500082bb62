"""All actors of one run: placed, started, served and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.common import pickling
from rlsys.common.async_condition import AsyncCondition
from rlsys.config import RoleConfig, RunConfig, TrainedRoleConfig, TrainerConfig
from rlsys.config.lora import Lora
from rlsys.config.model_paths import weights_of, with_absolute_paths
from rlsys.config.training_config import AnyModelConfig
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import (
    PER,
    GenerateStage,
    InferStage,
    JudgeStage,
    PerBatchStage,
    PlayStage,
    RowStage,
    ScoreStage,
    TrainStage,
)
from rlsys.engines.generation.vllm.vllm_server_client import until_healthy
from rlsys.errors import first_error, require
from rlsys.launcher.memory_estimate import num_snapshots, store_bytes
from rlsys.rewards import pack_rewards
from rlsys.runs.checkpoint import Checkpoints
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.runs.observe.trace_file import TraceFile
from rlsys.runs.run_files import RunFiles

from ..cluster.calls import Worker, WorkerError, end_all
from ..cluster.gauges import Gauges
from ..cluster.placement import Place, Places, places_on_live_nodes
from ..cluster.tracing import TraceCollector
from ..environment.environment_actor import EnvironmentActor
from ..environment.episode_replica import EpisodeReplica
from ..rollout.policy_worker import PolicyWorker
from ..rollout.ray_replica import RayReplica
from ..rollout.rollout_actor import RolloutActor
from ..store.store_actor import ShardAddress, StoreAddress
from ..store.store_shards import StoreShards
from ..trainer.elastic import Layouts
from ..trainer.memory_checkpoints import SnapshotHolders
from ..trainer.trainer_actor import TrainerActor
from ..trainer.trainer_proxy import RayTrainerProxy
from ..workers.evaluation_actor import EvaluationActor, EvaluationFactory
from ..workers.inference_actor import InferenceActor, RayPool
from ..workers.reward_actor import RayScorer, RewardActor
from .factories import (
    EVALUATION,
    EnvironmentFactory,
    InferenceFactory,
    JudgeFactory,
    PartnerFactory,
    PartnerSeat,
    RewardFactory,
    RolloutFactory,
    TrainerFactory,
    rank_name,
    replica_name,
)
from .fleet import RayFleet

T = TypeVar("T")


@contextlib.asynccontextmanager
async def started_workers(
    config: RunConfig,
    flow: RunGraph,
    tokenizer: Any,
    trace: Path,
    places: Places,
    checkpoints: Checkpoints,
    *,
    on_death: Callable[[str], None],
) -> AsyncIterator[WorkerTeam]:
    """Create the actors of a run, and end all of them when the block ends.

    Actors with engines are created when they are started, replicas when the run needs them. At the
    end of the block hung actors are killed too, and shared memory is removed. `on_death` gets a
    message when a reward worker, a frozen model or a shard has died or a trainer has changed its
    layout.
    """
    config = with_absolute_paths(config)
    lost_shards: asyncio.Queue[ShardAddress] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as cleanup:
        trace_file = TraceFile(trace) if config.observe.trace else None
        if trace_file is not None:
            cleanup.callback(trace_file.close)
        shards = StoreShards(
            capacity_bytes=store_bytes(config, flow),
            timeout_s=config.cluster.call_timeout_s,
            heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
            on_lost=lost_shards.put_nowait,
            run=config.name,
        )
        cleanup.push_async_callback(shards.close)
        for node in ray.nodes():
            if node["Alive"]:
                await shards.ensure(node["NodeID"])
        actors = _Actors(config, flow, tokenizer, places, shards, checkpoints, on_death)
        trainer_proxies = {
            stage.model.name: actors.trainer_proxy(stage, on_death)
            for stage in flow.all(TrainStage)
        }
        for trainer_proxy in trainer_proxies.values():
            cleanup.callback(trainer_proxy.close)
        pools = {stage.model.name: actors.pool(stage, on_death) for stage in flow.row_stages}
        fleet = RayFleet(
            places.replicas,
            actors.replica,
            trainer_proxies[flow.main.name],
            shards,
            start_timeout_s=config.cluster.start_timeout_s,
            name=functools.partial(replica_name, config),
            until_ready=until_healthy(config.rollout.urls) if config.rollout.urls else None,
            playing=functools.partial(actors.playing, trainer_proxies)
            if flow.all(PlayStage)
            else None,
        )
        for model in flow.other_policies:
            trainer_proxies[model].reader_nodes = fleet.nodes
        evaluators: list[Worker] = []

        def start_evaluator(evaluate: EvaluationFactory) -> Worker:
            node_id = trainer_proxies[flow.main.name].node_id  # where the model is exported to
            evaluators.append(actors.evaluator(evaluate, node_id))
            return evaluators[-1]

        num_scorers = config.reward.num_workers if flow.all(ScoreStage) else 0
        scorer = RayScorer(actors.reward, num_workers=num_scorers, on_death=on_death)

        def engines() -> list[Worker]:
            ranks = [
                rank for trainer_proxy in trainer_proxies.values() for rank in trainer_proxy.ranks
            ]
            workers = [worker for pool in pools.values() for worker in pool.workers]
            replicas = [worker for replica in fleet.replicas for worker in replica.workers]
            return [*ranks, *workers, *replicas, *evaluators]

        cleanup.push_async_callback(lambda: end_all(engines()))
        cleanup.callback(lambda: _kill(scorer.workers))
        yield WorkerTeam(
            trainer_proxies=trainer_proxies,
            trainer_proxy=trainer_proxies[flow.main.name],
            pools=pools,
            fleet=fleet,
            scorer=scorer,
            evaluators=evaluators,
            start_evaluator=start_evaluator,
            shards=shards,
            tracer=Tracer("controller", max_pending=actors.max_pending),
            trace_file=trace_file,
            lost_shards=lost_shards,
            on_death=on_death,
        )


@dataclass(frozen=True, kw_only=True)
class WorkerTeam:
    """Actors of a run and the services that keep them working."""

    trainer_proxies: Mapping[str, RayTrainerProxy]  # by the name of the model
    trainer_proxy: RayTrainerProxy  # the main model's
    pools: Mapping[str, RayPool]
    fleet: RayFleet
    scorer: RayScorer
    evaluators: Sequence[Worker]  # only the last one is in use
    start_evaluator: Callable[[EvaluationFactory], Worker]
    shards: StoreShards
    tracer: Tracer  # the controller's
    trace_file: TraceFile | None
    lost_shards: asyncio.Queue[ShardAddress]
    on_death: Callable[[str], None]

    async def serve_while(
        self,
        work: Awaitable[None],
        stepped: AsyncCondition,
        *services: Coroutine[Any, Any, None],
        on_report: Callable[[TraceBatch], None],
        on_shard_lost: Callable[[str], None],
    ) -> None:
        """Run `work` and `services` while maintaining the store and collecting reports.

        Freed rows return to their shards, dead shards are replaced, and reports of actors go to
        `on_report`. `on_shard_lost` gets the name of a shard that died; it raises if the run cannot
        continue.
        """
        traces = TraceCollector(
            self.trace_file, lambda: self.workers, tracer=self.tracer, on_report=on_report
        )

        async def work_and_collect() -> None:
            await work
            await traces.collect()

        await self.keep_store_while(
            work_and_collect(), traces.run(stepped), *services, on_shard_lost=on_shard_lost
        )

    async def keep_store_while(
        self,
        work: Coroutine[Any, Any, T],
        *services: Coroutine[Any, Any, None],
        on_shard_lost: Callable[[str], None] = lambda shard: None,
    ) -> T:
        """Return the result of `work`, while `services` and those of the store run."""
        main = asyncio.create_task(work)
        others = [
            asyncio.create_task(service)
            for service in (self.shards.run(), self._repair(on_shard_lost), *services)
        ]
        try:
            await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in (main, *others):
                if task.done():
                    task.result()
            return await main
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        finally:
            for task in (main, *others):
                task.cancel()
            await asyncio.gather(main, *others, return_exceptions=True)

    @property
    def workers(self) -> list[Worker]:
        """Return all actors that record traces."""
        return [
            *(
                rank
                for trainer_proxy in self.trainer_proxies.values()
                for rank in trainer_proxy.ranks
            ),
            *(worker for pool in self.pools.values() for worker in pool.workers),
            *(worker for replica in self.fleet.replicas for worker in replica.workers),
            *self.scorer.workers,
            *self.evaluators[-1:],
        ]

    async def _repair(self, on_shard_lost: Callable[[str], None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                shard = await self.lost_shards.get()
                self.on_death(f"store shard {shard.name} died; its rollouts are sampled again")
                on_shard_lost(shard.name)
                tasks.create_task(self._replace(shard))

    async def _replace(self, lost: ShardAddress) -> None:
        """Start a shard in place of one that died, if its node is alive."""
        if lost.node_id not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            return
        try:
            await self.shards.ensure(lost.node_id)
        except (WorkerError, OSError):  # if the node is alive, its replicas will fail on their own
            return
        for replica in self.fleet.replicas:
            if replica.node_id in ("", lost.node_id):  # or the node is not known yet
                for worker in replica.workers:
                    with contextlib.suppress(WorkerError):  # the rollout loop handles its death
                        await worker.call("use_store", self.shards.address)
        writers = [
            trainer_proxy for trainer_proxy in self.trainer_proxies.values() if trainer_proxy.writes
        ]
        for worker in [rank for trainer_proxy in writers for rank in trainer_proxy.ranks] + [
            worker for pool in self.pools.values() for worker in pool.workers
        ]:
            with contextlib.suppress(WorkerError):  # its next call raises the error
                await worker.call("use_store", self.shards.address)


class _Actors:
    """Factory methods for each kind of actor."""

    def __init__(
        self,
        config: RunConfig,
        flow: RunGraph,
        tokenizer: Any,
        places: Places,
        shards: StoreShards,
        checkpoints: Checkpoints,
        on_death: Callable[[str], None],
    ) -> None:
        self._on_death = on_death
        self._config = config
        self._flow = flow
        self._tokenizer = tokenizer
        self._places = places
        self._shards = shards
        self._checkpoints = checkpoints
        self.max_pending = 100_000 if config.observe.trace else 0

    def trainer_proxy(self, stage: TrainStage, report: Callable[[str], None]) -> RayTrainerProxy:
        config, model = self._config, stage.model
        role = model.config
        trainer = role.trainer if isinstance(role, TrainedRoleConfig) else config.trainer
        own = [one for one in self._flow.step_stages if isinstance(one, InferStage)]
        computed = [
            one
            for one in self._flow.step_stages
            if isinstance(one, PerBatchStage) and one.has_tokens and model.is_main
        ]
        places = self._places.ranks if model.is_main else self._places.roles[model.name]
        layouts = Layouts(trainer.layouts, functools.partial(places_on_live_nodes, places))

        def start_worker(rank: int) -> Worker:
            place = places[layouts.places[rank]]
            return self._rank(stage, trainer.with_layout(layouts.current), rank, place)

        return RayTrainerProxy(
            start_worker,
            SnapshotHolders(
                timeout_s=config.cluster.start_timeout_s,
                heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
            ),
            model=model.name,
            layouts=layouts,
            num_snapshots=num_snapshots(config, trainer),
            start_timeout_s=config.cluster.start_timeout_s,
            newest_checkpoint=self._checkpoints.newest,
            warm_start_dir=self._checkpoints.warm_start,
            stages=computed,
            per_token=PER[model.head] == "token",
            open_store=self._store_of,
            writes=bool(computed) or any(one.model == model for one in own),
            weight_transport=config.rollout.weight_transport,
            report=report,
        )

    def pool(self, stage: RowStage, on_death: Callable[[str], None]) -> RayPool:
        role = stage.model.config
        assert isinstance(role, RoleConfig)

        def start(worker: int) -> Worker:
            options = self._places.roles[stage.model.name][worker].options
            name, column = f"{stage.model.name}-{worker}", stage.writes[0].name
            return self._start(
                name, InferenceActor, options, self._inference_factory(stage), column
            )

        return RayPool(
            start,
            self._store_of,
            num_workers=role.num_workers,
            on_death=on_death,
            model=stage.model.name,
            runs="ask and parse" if isinstance(stage, JudgeStage) else "",
        )

    def _inference_factory(self, stage: RowStage) -> InferenceFactory | JudgeFactory:
        role = stage.model.config
        assert isinstance(role, RoleConfig)
        config, path = self._config, self._weights_of(role.model)
        if isinstance(stage, JudgeStage):
            return JudgeFactory(config=config, stage=stage, path=path, tokenizer=self._tokenizer)
        return InferenceFactory(
            config=config, stage=stage, path=path, temperature=self._temperature
        )

    def _weights_of(self, model: AnyModelConfig) -> str:
        return weights_of(model, self._checkpoints.initial_model(self._config.model.path))

    @property
    def _temperature(self) -> float:
        """Return the temperature of log-probabilities.

        It is the sampler's temperature, or 1 if a dataset contains the completions.
        """
        samples = bool(self._flow.all(GenerateStage))
        return self._config.sampling.temperature if samples else 1.0

    async def _store_of(self, node_id: str) -> StoreAddress:
        """Return the store's address after ensuring that this node has a shard."""
        await self._shards.ensure(node_id)
        return self._shards.address

    def _rank(self, stage: TrainStage, trainer: TrainerConfig, rank: int, place: Place) -> Worker:
        model = stage.model
        role = model.config
        settings = role.model if isinstance(role, TrainedRoleConfig) else self._config.model
        make_engine = TrainerFactory(
            config=self._config,
            stage=stage,
            trainer=trainer,
            model=replace(settings, path=self._weights_of(settings)),
            temperature=self._temperature,
            profile_dir=RunFiles(Path(self._config.runs_dir, self._config.name).absolute()).profile,
        )
        name = rank_name(model, rank)
        every = trainer.snapshot_every
        return self._start(
            name, TrainerActor, place.options, rank, make_engine, every, ordered=True
        )

    def replica(self, name: str, number: int, place: Place) -> Worker:
        samples = bool(self._flow.all(GenerateStage))
        shares = self._flow.source.prompts.may_be_external
        urls = self._config.rollout.urls
        make_engine = RolloutFactory(
            config=self._config,
            samples=samples,
            shares=shares,
            shares_device=bool(place.need.colocated_with),
            devices=place.devices,
            url=urls[number] if urls else "",
            sharers=self._sharers,
        )
        # Environment workers decode their own episodes, and completions of a dataset are text
        # already.
        decodes = samples and not self._flow.all(PlayStage)
        tokenizer = self._tokenizer if decodes else None
        gauges = Gauges(self._config.name, name)
        return self._start(name, RolloutActor, place.options, make_engine, tokenizer, gauges)

    @property
    def _sharers(self) -> Mapping[str, Lora]:
        """Return the adapters of the policies that the replicas serve too, by name."""
        adapters: dict[str, Lora] = {}
        for name in self._flow.engine_sharers:
            role = self._flow.models[name].config
            assert isinstance(role, TrainedRoleConfig)
            assert role.model.adapters is not None
            adapters[name] = role.model.adapters
        return adapters

    def playing(
        self, trainer_proxies: Mapping[str, RayTrainerProxy], replica: RayReplica, place: Place
    ) -> EpisodeReplica:
        """Return a replica with environment workers on its node and engines of its partners."""
        config, stage = self._config, self._flow.stage(PlayStage)
        partners: dict[str, RayReplica] = {}
        seats: list[PartnerSeat] = []
        places = iter(place.partners)  # of partners with engines of their own
        for model in stage.partners:
            assert model.config is not None
            path = self._weights_of(model.config.model)
            name = f"{model.name}-{replica.name}"
            if model.name in self._flow.engine_sharers:
                require(
                    bool(model.config.model.path) or path == config.model.path,
                    "warm_start",
                    None,
                    rule=f"the run began with one, from whose result {model.name!r} continues",
                    fix="Give rlsys.launch the same warm start as before.",
                )
                worker: Worker = PolicyWorker(name, replica.worker, model.name)
            else:
                make_engine = PartnerFactory(config=config, role=model.config, path=path)
                options, gauges = next(places).options, Gauges(config.name, name)
                worker = self._start(name, RolloutActor, options, make_engine, None, gauges)
            partners[model.name] = RayReplica(worker, trainer_proxies.get(model.name), self._shards)
            seats += [
                PartnerSeat(name=seat, model=model.name, tokenizer="" if model.may_train else path)
                for seat, player in stage.seats
                if player is model
            ]
        handles = {model: one.worker.handle for model, one in partners.items()}
        make_host = EnvironmentFactory(
            config=config,
            environment=pickling.dumps(stage.environment),
            tokenizer=self._tokenizer,
            max_context=config.data.max_prompt_tokens + config.sampling.max_tokens,
            seats=tuple(seats),
        )

        def start_worker(name: str) -> Worker:
            node = NodeAffinitySchedulingStrategy(replica.node_id, soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": node}
            handle = replica.worker.handle
            return self._start(name, EnvironmentActor, options, name, make_host, handle, handles)

        return EpisodeReplica(
            replica,
            start_worker,
            stage.environment,
            self._shards,
            num_workers=config.reward.num_workers,
            start_timeout_s=config.cluster.start_timeout_s,
            on_death=self._on_death,
            partners=partners,
        )

    def reward(self, number: int) -> Worker:
        rewards = pack_rewards(self._flow.stage(ScoreStage).rewards)
        runner = RewardFactory(config=self._config, rewards=rewards)
        name = f"reward-{number}"
        stop = self._config.sampling.stop
        return self._start(name, RewardActor, {"num_cpus": 0}, runner, self._tokenizer, stop)

    def evaluator(self, evaluate: EvaluationFactory, node_id: str) -> Worker:
        """Start the evaluation worker in its own place, or unreserved on this node."""
        options: dict[str, Any] = {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True),
        }
        if places := self._places.roles.get(EVALUATION):
            options = places[0].options
        return self._start("evaluation", EvaluationActor, options, evaluate)

    def _start(
        self, name: str, actor: Any, options: dict[str, Any], *args: Any, ordered: bool = False
    ) -> Worker:
        tracer = Tracer(name, max_pending=self.max_pending)
        handle = actor.options(**options).remote(*args, self._shards.address, tracer)
        return Worker(
            name,
            handle,
            timeout_s=self._config.cluster.call_timeout_s,
            heartbeat_timeout_s=self._config.cluster.heartbeat_timeout_s,
            ordered=ordered,
        )


def _kill(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.kill()
