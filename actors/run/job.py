"""A run inside its directory, from the start of Ray to the export of the model."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlsys.common import pickling
from rlsys.common.async_condition import AsyncCondition
from rlsys.common.safe_json import dump_json
from rlsys.common.supervision import TRAINER_OPERATIONS, retried
from rlsys.config import RunConfig
from rlsys.config.fields import to_dict
from rlsys.config.model_paths import with_absolute_paths
from rlsys.controller.controller import Controller
from rlsys.controller.generation_loop import PromptQueue
from rlsys.controller.state import OpenWork
from rlsys.controller.trainer_group import TrainerGroup
from rlsys.controller.worker_protocols import Fleet, Replica, ReplicaDied, TrainerDied
from rlsys.data.completions import encode_examples
from rlsys.data.prompts import PromptSource
from rlsys.data.row_source import RowSource
from rlsys.data.swarm.external_prompts import ExternalPrompts, external_prompts
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import GenerateStage, ScoreStage
from rlsys.dataflow.graph.store_layout import open_store
from rlsys.dataflow.scheduling.curriculum import Curriculum
from rlsys.engines.models.model_shape import ModelShape, model_shape
from rlsys.errors import first_error
from rlsys.evaluation.held_out import environment_of, rewards_of
from rlsys.evaluation.held_out_data import HeldOut
from rlsys.evaluation.held_out_loss import held_out_loss
from rlsys.launcher.launching import WarmStart
from rlsys.launcher.memory_estimate import STORE_FILL, row_bytes, store_bytes
from rlsys.metrics import STEP
from rlsys.rewards import as_rewards, pack_rewards
from rlsys.runs.callbacks import Callbacks
from rlsys.runs.checkpoint import Checkpoints
from rlsys.runs.checkpoint_request import CheckpointRequest
from rlsys.runs.evaluation_log import read_evaluations
from rlsys.runs.export_seal import EarlyEnd
from rlsys.runs.observe.advised_settings import advised_settings
from rlsys.runs.observe.console import RunConsole
from rlsys.runs.observe.step_log import read_lines
from rlsys.runs.resume import History
from rlsys.runs.run_directory import RunDirectory
from rlsys.runs.run_history import State
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import WeightManifest

from ..cluster.cluster_checks import connected
from ..cluster.local_ray import EndedEarly, ends_with_ray
from ..cluster.placement import reserved
from ..cluster.signals import cancel_on_signals
from ..store import inflight_checkpoint
from ..store.store_actor import StoreClient
from ..trainer.elastic import growth
from ..workers.evaluation_actor import EvaluationFactory, Evaluator
from .capacity import machines_of, machines_to_check, require_fit
from .factories import needs, replica_name, role_needs
from .final_model import export_models
from .plan_record import cluster_of_run, live_nodes, start_plan_record
from .run_events import RunEvents
from .run_writers import RunWriters, open_writers
from .worker_team import WorkerTeam, started_workers


class Job:
    """A run inside its directory."""

    def __init__(
        self,
        config: RunConfig,
        flow: RunGraph,
        held_out: HeldOut,
        directory: RunDirectory,
        history: History | None,
        prompts: RowSource,
        tokenizer: Any,
        console: RunConsole,
        callbacks: Callbacks,
    ) -> None:
        self._callbacks = callbacks
        self._config = config
        self._flow = flow
        self._held_out = held_out
        self._directory = directory
        self._prompts = prompts
        self._order = prompts.order  # reads all rows, so it is computed before the first checkpoint
        self._tokenizer = tokenizer
        self._console = console
        self._checkpoints = Checkpoints(
            directory.checkpoints,
            config.keep_checkpoints,
            records=(*directory.records, directory.external),
            finished=directory.checkpointed,
            keep_every=config.keep_every,
        )
        self._request = CheckpointRequest(directory.path)
        self._history = history
        self._resume_from = history.checkpoint if history else None
        self._first_step = history.checkpoint.step if history else 0
        self._initial_weights = history.state.beginning if history else None
        self._samples = bool(flow.all(GenerateStage))
        self._alternates = config.placement == "colocated"
        # Whether replicas start on devices of the trainer, which must release them before.
        self._shares_devices = self._alternates or config.rollout.borrow > 0
        self._boundary = TokenizerBoundary(tokenizer)

    @property
    def _roles_share_initial_weights(self) -> bool:
        """Return whether another model starts from the weights of the main one."""
        roles = [model.config for model in self._flow.models.values()]
        return any(not role.model.path for role in roles if role is not None)

    @property
    def _partners_share_initial_weights(self) -> bool:
        """Return whether a partner starts from the weights of the main model."""
        roles = [model.config for model in self._flow.partners]
        return any(not role.model.path for role in roles if role is not None)

    async def run(
        self, warm_start: WarmStart | None, on_early_end: Callable[[EndedEarly], None]
    ) -> None:
        """Run to the last step and export the models.

        `on_early_end` is explained in `ends_with_ray`.
        """
        config = self._config
        ranks, replicas = needs(config, self._flow)
        roles = role_needs(config, self._flow)
        every = [*ranks, *replicas, *(need for some in roles.values() for need in some)]
        every += [need for replica in replicas for need in replica.partners]
        num_cpus = sum(need.num_cpus for need in every if not need.colocated_with)
        async with contextlib.AsyncExitStack() as cluster:
            prompts = cluster.enter_context(self._all_prompts())
            with self._console.phase("Starting Ray"):
                warning = cluster.enter_context(connected(config.cluster, num_cpus=num_cpus))
                # again, because Ray's start made signals interrupt system calls
                cancel_on_signals()
                await cluster.enter_async_context(ends_with_ray(on_early_end))
                self._check_cluster()
                places = await cluster.enter_async_context(
                    reserved(
                        ranks,
                        replicas,
                        roles=roles,
                        min_replicas=config.rollout.num_first,
                        timeout_s=config.cluster.start_timeout_s,
                    )
                )
            if warning:
                self._console.warn(warning)
            devices = cluster_of_run(config, live_nodes())
            self._console.settings = advised_settings(to_dict(config), devices)
            start_plan_record(
                self._directory,
                config,
                self._flow,
                self._shape,
                self._prompts,
                resumes=self._history is not None,
            )
            team = await cluster.enter_async_context(
                started_workers(
                    config,
                    self._flow,
                    self._tokenizer,
                    self._directory.trace,
                    places,
                    self._checkpoints,
                    on_death=self._console.warn,
                )
            )
            # The store is empty, so a shard that dies during the start is replaced without loss.
            first, weights = await team.keep_store_while(self._start(team, warm_start))
            borrowed = await team.keep_store_while(self._start_borrowed(team))
            end_step, early_end = await self._train(team, first, borrowed, prompts, weights)
            await export_models(
                config,
                self._flow,
                team.trainer_proxies,
                self._directory,
                self._console,
                step=end_step,
                early_end=early_end,
            )

    def _shape(self) -> ModelShape:
        """Return the shape of the main model."""
        return model_shape(self._config.model.path, self._flow.main.head)

    def _check_cluster(self) -> None:
        """Raise an InvalidValue if the run does not fit onto the GPUs of the joined cluster.

        A run on this machine alone was checked before.
        """
        if machines_to_check(self._config, self._flow, False) is not None:
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        require_fit(self._config, self._flow, self._shape(), machines_of(nodes))

    def _all_prompts(self) -> contextlib.AbstractContextManager[PromptQueue]:
        """Return the run's own prompts, with groups of other runs if the graph takes them."""
        source = self._flow.source.prompts
        own = self._prompts
        if source.shared is None or not source.may_be_external:
            return contextlib.nullcontext(own)
        assert isinstance(own, PromptSource), "environment tasks are never shared"
        rewards = [one for stage in self._flow.all(ScoreStage) for one in as_rewards(stage.rewards)]
        return external_prompts(
            own,
            source.shared,
            config=self._config,
            tokenizer=self._tokenizer,
            rewards=rewards,
            path=self._directory.external,
            run_id=self._directory.run_id,
        )

    async def _start(
        self, team: WorkerTeam, warm_start: WarmStart | None
    ) -> tuple[dict[int, Replica], WeightManifest | None]:
        """Start the actors; return the first replicas by number and their weights.

        Actors start concurrently. Replicas wait for the trainer if they share its devices, or if
        they have partners whose weights the warm start has yet to train. Replicas that died while
        they started are missing from the result.
        """
        changed = warm_start is not None or bool(self._history)
        try:
            async with asyncio.TaskGroup() as tasks:
                models = tasks.create_task(self._start_models(team, warm_start))
                tasks.create_task(team.scorer.start(self._config.cluster.start_timeout_s))
                if self._alternates or (warm_start and self._partners_share_initial_weights):
                    await models
                if self._alternates:
                    weights = await self._first_weights(team, changed=changed)
                first = [
                    tasks.create_task(self._start_replica(team.fleet, number))
                    for number in range(self._config.rollout.num_first)
                ]
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        if not self._alternates:
            weights = await self._first_weights(team, changed=changed)
        started = {number: task.result() for number, task in enumerate(first)}
        found = {number: replica for number, replica in started.items() if replica is not None}
        return found, weights

    async def _start_borrowed(self, team: WorkerTeam) -> dict[int, Replica]:
        """Start the borrowed replicas and release their memory; return them by number.

        The trainer has released its devices. Replicas that died while they started are missing.
        """

        async def start(number: int) -> Replica | None:
            if (replica := await self._start_replica(team.fleet, number)) is None:
                return None
            try:
                await replica.release()
            except ReplicaDied as death:
                self._console.warn(str(death))
                return None
            return replica

        first = self._config.rollout.num_replicas
        numbers = range(first, first + self._config.rollout.borrow)
        started = zip(numbers, await asyncio.gather(*map(start, numbers)), strict=True)
        return {number: replica for number, replica in started if replica is not None}

    async def _start_replica(self, fleet: Fleet, number: int) -> Replica | None:
        engine = self._config.rollout.engine if self._samples else "dataset"
        name = replica_name(self._config, number)
        with self._console.phase(f"Starting {name} ({engine})"):
            try:
                return await fleet.start_worker(number)
            except ReplicaDied as death:  # the controller starts another one
                self._console.warn(str(death))
                return None

    async def _start_models(self, team: WorkerTeam, warm_start: WarmStart | None) -> None:
        """Start the main model's trainer, then all models that may start from its weights."""
        await self._start_trainer(team, warm_start)
        roles = [model for model in self._flow.models.values() if model.config is not None]
        if not roles:
            return
        if warm_start and self._roles_share_initial_weights and not self._resume_from:
            await team.trainer_proxy.export_final(self._checkpoints.initial_weights)
            self._initial_weights = await asyncio.to_thread(self._checkpoints.seal_initial_weights)
        limit_s = self._config.cluster.start_timeout_s
        names = [
            model.name for model in roles if model.name in (*team.trainer_proxies, *team.pools)
        ]
        if not names:  # frozen models that play a seat start with the replicas
            return
        with self._console.phase(f"Loading {', '.join(names)}"):
            async with asyncio.TaskGroup() as tasks:
                for name, trainer_proxy in team.trainer_proxies.items():
                    if trainer_proxy is not team.trainer_proxy:
                        tasks.create_task(trainer_proxy.start(self._checkpoint_of(name)))
                for pool in team.pools.values():
                    tasks.create_task(pool.start(limit_s))

    def _checkpoint_of(self, model: str) -> Path | None:
        return self._resume_from.role_dir(model) if self._resume_from else None

    async def _start_trainer(self, team: WorkerTeam, warm_start: WarmStart | None) -> None:
        with self._console.phase("Loading the model into the trainer"):
            await team.trainer_proxy.start(self._checkpoint_of(self._flow.main.name))
        if warm_start and not self._resume_from:
            with self._console.phase("Warm start") as phase:

                async def supervised_steps() -> None:
                    for done in range(1, warm_start.num_steps + 1):
                        loss = await team.trainer_proxy.sft_step(
                            *encode_examples(self._boundary, warm_start.batch(done), step=done),
                            warm_start.rate(done),
                        )
                        phase.update(done, warm_start.num_steps, f"loss {loss:.3f}")

                await team.trainer_proxy.warm_start(supervised_steps)

    async def _train(
        self,
        team: WorkerTeam,
        replicas: Mapping[int, Replica],
        borrowed: Mapping[int, Replica],
        prompts: PromptQueue,
        weights: WeightManifest | None,
    ) -> tuple[int, EarlyEnd | None]:
        """Train; return the last step, and why it is one if the run stopped early."""
        config = self._config
        store = open_store(
            self._flow,
            max_bytes=int(store_bytes(config, self._flow) * STORE_FILL),
            max_row_bytes=row_bytes(config, self._flow),
            on_free=team.shards.free,
        )
        stepped = AsyncCondition()
        curriculum = Curriculum(
            self._flow.source.prompts.config.retire_at,
            num_rows=self._prompts.num_rows,
            retired=self._history.state.retired if self._history else (),
        )
        carried = await self._carried(team, replicas)
        events = RunEvents(
            config, self._directory.path, self._console, self._callbacks, self._recorded()
        )
        async with events, contextlib.AsyncExitStack() as ending:
            writers = ending.enter_context(
                open_writers(
                    config,
                    self._directory,
                    self._history,
                    self._console,
                    tracer=team.tracer,
                    queue_depths=store.queue_depths,
                    stepped=stepped,
                    on_step=events.stepped,
                )
            )
            evaluator: Evaluator | None = None
            if config.evaluation.every:
                evaluator = self._evaluator(team, writers, events, lambda: controller)
            controller = Controller(
                flow=self._flow,
                config=config,
                prompts=prompts,
                store=store,
                ledger=writers.ledger,
                fleet=team.fleet,
                replicas=replicas,
                scorer=team.scorer,
                trainer_proxies=team.trainer_proxies,
                pools=team.pools,
                observer=writers.recorder,
                checkpoint=functools.partial(
                    self._checkpoint, team, writers, events, prompts, curriculum
                ),
                is_checkpoint_requested=self._request.is_pending,
                between=[
                    growth(
                        team.trainer_proxies.values(),
                        first_step=self._first_step,
                        num_steps=config.num_steps,
                    ),
                    *([evaluator.between_steps] if evaluator else []),
                ],
                weights=weights,
                carried=carried,
                curriculum=curriculum,
                first_step=self._first_step,
                borrowed=borrowed,
            )
            events.control(controller)

            async def work() -> None:
                await controller.run()
                if evaluator is not None:
                    with self._console.phase("Evaluating") as phase:
                        evaluator.on_samples = functools.partial(phase.update, detail="samples")
                        await evaluator.finish()

            ending.enter_context(self._console.training(after_step=self._first_step))
            await team.serve_while(
                work(),
                stepped,
                *([evaluator.run()] if evaluator else []),
                on_report=writers.recorder.actor_reported,
                on_shard_lost=controller.shard_lost,
            )
        return controller.last_step, events.early_end

    def _recorded(self) -> list[dict[str, float]]:
        """Return the lines of steps and evaluations up to the checkpoint of a resumed run."""
        if self._history is None or not self._config.stop_conditions:
            return []
        lines = [
            *read_lines(self._directory.metrics),
            *read_evaluations(self._directory.evaluations),
        ]
        return [line for line in lines if line[STEP] <= self._first_step]

    async def _carried(self, team: WorkerTeam, replicas: Mapping[int, Replica]) -> OpenWork:
        """Return the rollouts that were sampled and not trained when the checkpoint was written."""
        if self._history is None:
            return OpenWork()
        carried = await inflight_checkpoint.load(
            self._history.checkpoint.path,
            team.shards.address,
            nodes=sorted({replica.node for replica in replicas.values()}),
        )
        return replace(carried, coefficients=self._history.state.coefficients)

    async def _first_weights(self, team: WorkerTeam, *, changed: bool) -> WeightManifest | None:
        """Publish the initial weights; return None if they are those of model.path.

        If replicas start on devices of the trainer, it releases them.
        """
        if not self._samples:
            return WeightManifest(version=self._first_step)

        main, others = self._flow.main.name, self._flow.other_policies
        trainer_proxies = TrainerGroup(team.trainer_proxies, main=main, others=others)

        async def published() -> WeightManifest | None:
            manifest = None
            if changed:
                calls = [trainer_proxy.publish() for trainer_proxy in trainer_proxies.samplers]
                manifest = trainer_proxies.join_manifests(await asyncio.gather(*calls))
            if self._shares_devices:
                await team.trainer_proxy.release()
            return manifest

        async def restart(death: Exception) -> None:
            self._console.warn(f"{death}; restarting the trainer")
            restarts = [one.restart(self._first_step) for one in trainer_proxies.samplers]
            await asyncio.gather(*restarts)

        return await retried(published, TRAINER_OPERATIONS, TrainerDied, restart)

    def _checkpoint(
        self,
        team: WorkerTeam,
        writers: RunWriters,
        events: RunEvents,
        prompts: PromptQueue,
        curriculum: Curriculum,
        step: int,
        work: OpenWork,
        on_read: Callable[[], None],
    ) -> Awaitable[None]:
        # Captured now, in line with the open work: training continues while the checkpoint is
        # written.
        state = State(
            step=step,
            prompts=self._order,
            records=writers.tallies(),
            external=prompts.tally if isinstance(prompts, ExternalPrompts) else None,
            retired=curriculum.retired,
            coefficients=work.coefficients,
            beginning=self._initial_weights,
        )

        is_requested = self._request.is_pending()

        async def rollouts(directory: Path) -> None:
            await inflight_checkpoint.save(work, StoreClient(team.shards.address), directory)
            on_read()

        async def write() -> None:
            async with self._checkpoints.writing(step) as unfinished:
                try:
                    async with asyncio.TaskGroup() as tasks:
                        for model, trainer_proxy in team.trainer_proxies.items():
                            tasks.create_task(trainer_proxy.write(unfinished.role_dir(model)))
                        tasks.create_task(rollouts(unfinished.path))
                except BaseExceptionGroup as group:
                    raise first_error(group) from None
                unfinished.controller_file.write_text(dump_json(state.to_dict()))
            events.checkpointed(step, self._checkpoints.path(step))
            if is_requested:
                await asyncio.to_thread(self._request.end)

        return write()

    def _evaluator(
        self,
        team: WorkerTeam,
        writers: RunWriters,
        events: RunEvents,
        controller: Callable[[], Controller],
    ) -> Evaluator:
        def on_result(line: Mapping[str, float]) -> None:
            writers.recorder.evaluated(line)
            events.evaluated(line)

        assert writers.evaluation_log is not None
        rewards = rewards_of(self._flow, self._held_out)
        environment = environment_of(self._flow)
        factory = EvaluationFactory(
            config=with_absolute_paths(self._config),
            rewards=pack_rewards(rewards) if rewards else None,
            environment=pickling.dumps(environment) if environment else None,
            loss=held_out_loss(self._config, self._flow),
            rows=self._held_out.rows,
        )
        return Evaluator(
            self._config,
            writers.evaluation_log,
            self._directory.evaluating,
            start_worker=lambda: team.start_evaluator(factory),
            export=team.trainer_proxy.export,
            on_result=on_result,
            on_progress=lambda: controller().report_progress(),
            is_last=lambda step: step == controller().last_step,
            warn=self._console.warn,
            first_step=self._first_step,
        )
