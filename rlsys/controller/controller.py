"""All loops of one run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlsys.common.option_names import option
from rlsys.config import RunConfig
from rlsys.controller.checkpointing import Checkpointing
from rlsys.controller.device_sharing import DeviceSharing
from rlsys.controller.generation_loop import GenerationSide, PromptQueue
from rlsys.controller.inference_loop import InferenceSide
from rlsys.controller.lender import Lender, Lending
from rlsys.controller.scoring_loop import ScoringSide
from rlsys.controller.state import NO_WORK, Observer, OpenWork, RunState
from rlsys.controller.step_hooks import BetweenSteps
from rlsys.controller.trainer_group import TrainerGroup
from rlsys.controller.training_loop import TrainingSide
from rlsys.controller.worker_protocols import Fleet, Pool, Replica, Scorer, TrainerProxy
from rlsys.dataflow.graph.run_graph import RunGraph
from rlsys.dataflow.graph.stages import GenerateStage, PlayStage
from rlsys.dataflow.scheduling.curriculum import Curriculum
from rlsys.dataflow.scheduling.ledger import Ledger
from rlsys.dataflow.scheduling.lending import LendingPolicy, LendingSettings
from rlsys.dataflow.store.stream_store import StreamStore
from rlsys.errors import first_error, require
from rlsys.types import WeightManifest

# (step, open work, callback after its bytes are read). The call records the rest of the step's
# state at once. Awaiting the result writes everything, with the states that the trainers hold.
WriteCheckpoint = Callable[[int, OpenWork, Callable[[], None]], Awaitable[None]]

NO_POOLS: Mapping[str, Pool] = {}
NO_REPLICAS: Mapping[int, Replica] = {}


class StallError(RuntimeError):
    """No progress for too long. The message says what each part of the run waits for."""


class Controller:
    """The loops of one run, from its first to its last optimizer step.

    Args:
        replicas: Replicas that run already, by number. Others come from `fleet`.
        borrowed: Replicas on the devices of trainer ranks, released, by number.
        lending: Parameters of the policy that lends these devices.
        weights: The newest published weights; None if those of model.path are the newest.
        ledger: The run's history so far. Its open groups are issued again under their ids and
            continue from `carried`.
        carried: Unfinished work in the checkpoint of a resumed run.
        checkpoint: Function that writes a checkpoint.
        between: Other work between optimizer steps.
        first_step: Number of optimizer steps that the trainer has done.

    Raises:
        ValueError: The store could never hold the groups of one step.
    """

    def __init__(
        self,
        *,
        flow: RunGraph,
        config: RunConfig,
        prompts: PromptQueue,
        store: StreamStore,
        ledger: Ledger,
        fleet: Fleet,
        replicas: Mapping[int, Replica],
        scorer: Scorer,
        trainer_proxies: Mapping[str, TrainerProxy],
        pools: Mapping[str, Pool] = NO_POOLS,
        observer: Observer,
        checkpoint: WriteCheckpoint,
        is_checkpoint_requested: Callable[[], bool] = lambda: False,
        between: Sequence[BetweenSteps] = (),
        weights: WeightManifest | None = None,
        carried: OpenWork = NO_WORK,
        curriculum: Curriculum | None = None,
        first_step: int = 0,
        borrowed: Mapping[int, Replica] = NO_REPLICAS,
        lending: LendingSettings | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        source = flow.source
        for replica in replicas.values():
            store.add_node(replica.node)
        # If a replica has died by now, the number of nodes is not known yet.
        require(
            len(replicas) < config.rollout.num_first or config.prompts_per_step <= store.max_groups,
            "prompts_per_step",
            config.prompts_per_step,
            rule=_capacity(store),
            fix="Raise cluster.store_gib (of each node), or lower prompts_per_step, "
            "data.max_prompt_tokens or sampling.max_tokens.",
        )
        self._state = RunState(
            config=config,
            store=store,
            ledger=ledger,
            observer=observer,
            step=first_step,
            clock=clock,
            curriculum=curriculum or Curriculum(),
        )
        self._checkpoint = checkpoint
        self._checkpoints = Checkpointing(
            self._state, self._begin_checkpoint, is_checkpoint_requested
        )
        devices = DeviceSharing(are_shared=config.placement == "colocated")
        self._generation = GenerationSide(
            self._state,
            devices,
            prompts,
            stage=source.name,
            greedy_baseline=isinstance(source, GenerateStage) and source.greedy_baseline,
            play=source if isinstance(source, PlayStage) else None,
            fleet=fleet,
            replicas=replicas,
            newest=weights,
            carried=carried,
            is_in_training=lambda group_id: self._training.has_taken(group_id),
        )
        self._scoring = ScoringSide(self._state, scorer, flow)
        self._inference = InferenceSide(self._state, flow.row_stages, pools)
        trainers = TrainerGroup(
            trainer_proxies, main=flow.main.name, others=flow.other_policies, means=flow.means
        )
        self._training = TrainingSide(
            self._state,
            devices,
            trainers,
            flow,
            publish=self._generation.pool.publish,
            release_replicas=self._generation.pool.release,
            lender=self._lender(borrowed, trainers, lending) if borrowed else Lending(),
            roll_back=self._roll_back,
            between=[self._checkpoints.between_steps, *between],
            coefficients=carried.coefficients,
        )

    def _lender(
        self,
        replicas: Mapping[int, Replica],
        trainers: TrainerGroup,
        settings: LendingSettings | None,
    ) -> Lender:
        """Return what lends the devices of the main trainer to these replicas."""
        policy = LendingPolicy(
            num_own=self._state.config.rollout.num_replicas,
            drains=self._state.config.is_repeatable,
            clock=self._state.clock,
            settings=settings,
        )
        lender = Lender(
            self._state, policy, self._generation.borrow(replicas), trainers.main.release
        )
        self._generation.pool.on_loaded = lender.loaded
        self._generation.pool.on_sampled = lender.sampled
        return lender

    @property
    def last_step(self) -> int:
        """The step after which the run ends: config.num_steps, unless it stops early."""
        return self._state.last_step

    def stop(self) -> None:
        """End the run early: the step whose groups are being collected is the last one.

        Everything that follows a last step follows this one. Before `run`, no step is trained,
        unless groups of the next one are open.
        """
        self._training.stop()

    async def run(self) -> None:
        """Train until config.num_steps, or until `stop` ends the run early.

        Raises the first error of any loop, after all loops have ended.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(loop, name=name)
                    for name, loop in (
                        *self._generation.loops().items(),
                        *self._scoring.loops().items(),
                        *self._inference.loops().items(),
                        ("checkpoint", self._checkpoints.run()),
                        ("watch", self._watch()),
                    )
                ]
                await self._training.run()
                for loop in loops:
                    loop.cancel()
        except BaseExceptionGroup as group:
            await self._checkpoints.finish()
            raise first_error(group) from None
        finally:
            await self._checkpoints.cancel()

    def report_progress(self) -> None:
        """Report progress of work between two steps, so that it does not count as a stall."""
        self._state.progress.notify()

    def shard_lost(self, shard: str) -> None:
        """Issue the groups again whose rows were in a shard that died."""
        self._generation.shard_lost(shard)
        for group_id in self._state.store.lost(shard):
            # Other groups are trained already; only a checkpoint still reads their rows.
            if group_id in self._state.groups and self._training.shard_lost(group_id):
                self._state.reissue(self._state.groups[group_id])

    def _roll_back(self, step: int) -> None:
        """Undo the optimizer steps after `step`, which are lost."""
        self._state.roll_back(step)
        self._generation.pool.rolled_back()

    async def _begin_checkpoint(self, step: int) -> Coroutine[Any, Any, None]:
        holding = asyncio.create_task(self._training.hold())
        await self._generation.pool.collect_progress()
        await holding
        pins = contextlib.ExitStack()
        work = pins.enter_context(self._generation.open_work())
        own = replace(work, coefficients=self._training.coefficients.after(step))
        written = self._checkpoint(step, own, pins.close)

        async def write() -> None:
            with pins:
                await written

        return write()

    async def _watch(self) -> None:
        """Raise StallError after a time without progress.

        Within this time every call ends or times out, and every failed worker is replaced.
        """
        cluster = self._state.config.cluster
        limit = cluster.call_timeout_s + cluster.start_timeout_s
        while True:
            try:
                async with asyncio.timeout(limit):
                    await self._state.progress.next()
            except TimeoutError:
                raise StallError(
                    f"no progress for {limit:g} s (cluster.call_timeout_s + "
                    "cluster.start_timeout_s): "
                    f"{self._training.describe()}, {len(self._state.groups)} groups are open, "
                    f"{self._generation.pool.describe()}; {self._state.store.describe()}. "
                    f"{self._advice()}"
                ) from None

    def _advice(self) -> str:
        state = self._state
        if state.config.prompts_per_step > state.store.max_groups:
            return (
                f"prompts_per_step={state.config.prompts_per_step}: {_capacity(state.store)}. Add "
                "a node with room for a replica, or raise cluster.store_gib (of each node), and "
                f"run again with {option('resume', True)}."
            )
        return "Raise these limits if a part of the run takes longer."


def _capacity(store: StreamStore) -> str:
    return (
        f"the store holds only {store.max_groups} groups of the longest rollouts, on the "
        f"{len(store.nodes)} node(s) with replicas ({store.describe()})"
    )
