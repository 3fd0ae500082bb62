"""The controller with simulated workers in virtual time: bounds, order, failures."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlsys.common.random_streams import request_seed
from rlsys.config import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rlsys.controller.controller import Controller, StallError
from rlsys.controller.failures import RewardsFailed
from rlsys.controller.simulation.event_record import Record
from rlsys.controller.simulation.simulated_replicas import SimulatedFleet, SimulatedReplica
from rlsys.controller.simulation.simulated_workers import (
    SharedDevices,
    SimulatedDisk,
    SimulatedPool,
    SimulatedPrompts,
    SimulatedScorer,
    SimulatedTrainer,
    exponential,
)
from rlsys.controller.simulation.virtual_time import Deadlock, run_in_virtual_time
from rlsys.controller.state import OpenWork
from rlsys.controller.step_hooks import BetweenSteps
from rlsys.controller.worker_protocols import (
    Collected,
    ReplicaDied,
    ReportScores,
    Scored,
    ScoreTask,
    StepRowsRef,
    Unreadable,
    WeightsGone,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.run_graph import complete_graph
from rlsys.dataflow.graph.stages import Prompts
from rlsys.dataflow.graph.store_layout import open_store
from rlsys.dataflow.scheduling.curriculum import Curriculum
from rlsys.dataflow.scheduling.ledger import Event, Ledger
from rlsys.dataflow.scheduling.lending import LendingSettings
from rlsys.engines.generation.sampling import stream_key
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import GenerationRequest, WeightManifest
from tests.errors import error_about, invalid
from tests.tiers import examples


def center(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.mean()


def no_loss(*_: Any) -> Any:
    raise AssertionError("the learner is a fake")


def flow(group_size: int) -> Dataflow:
    built = Dataflow()
    policy = built.model("policy")
    rollouts = built.generate(policy, Prompts(config=DataConfig()), group_size=group_size)
    reward = built.score(rollouts, [lambda rollout: 0.0])
    advantage = built.per_group(center, reward)
    built.train(policy, rollouts, advantage, loss=no_loss, aggregation=no_loss)
    return built


def config(*, num_replicas: int = 1, **changes: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "rollout": RolloutConfig(num_replicas=num_replicas),
        "num_steps": 4,
        "prompts_per_step": 4,
        "group_size": 2,
        "trainer": TrainerConfig(micro_batch_tokens=16),
        "cluster": ClusterConfig(call_timeout_s=1000.0),
    }
    return RunConfig(**{**defaults, **changes})


@dataclass(kw_only=True)
class World:
    """A controller and its surroundings."""

    config: RunConfig
    replicas: list[SimulatedReplica]
    scorer: SimulatedScorer = field(default_factory=SimulatedScorer)
    trainer_proxy: SimulatedTrainer = field(default_factory=SimulatedTrainer)
    others: dict[str, SimulatedTrainer] = field(default_factory=dict)
    pools: dict[str, SimulatedPool] = field(default_factory=dict)
    observer: Record = field(default_factory=Record)
    ledger: Ledger = field(default_factory=lambda: Ledger(lambda event: None, groups_per_step=4))
    checkpoints: list[int] = field(default_factory=list)
    store_bytes: int = 1 << 20  # of each node
    max_row_bytes: int = 1 << 10
    freed: list[Any] = field(default_factory=list)
    dataflow: Dataflow | None = None
    prompts: Any = field(default_factory=SimulatedPrompts)
    fleet: SimulatedFleet = field(default_factory=SimulatedFleet)
    carried: OpenWork = field(default_factory=OpenWork)
    weights: WeightManifest | None = None
    first_step: int = 0
    saved: list[OpenWork] = field(default_factory=list)
    writes: Callable[[int, OpenWork], Awaitable[None]] | None = None  # which may take time
    chaos: Callable[[World], Coroutine[Any, Any, None]] | None = None
    between: list[BetweenSteps] = field(default_factory=list)
    curriculum: Curriculum | None = None
    is_checkpoint_requested: Callable[[], bool] = lambda: False
    borrowed: list[SimulatedReplica] = field(default_factory=list)  # on the trainer's devices
    lending: LendingSettings | None = None

    async def run(self) -> None:
        async def save(step: int, work: OpenWork, on_read: Callable[[], None]) -> None:
            if self.writes is not None:
                await self.writes(step, work)
            on_read()
            self.checkpoints.append(step)
            self.saved.append(work)

        dataflow = complete_graph(self.dataflow or flow(self.config.group_size), self.config)
        self.store = open_store(
            dataflow,
            max_bytes=self.store_bytes,
            max_row_bytes=self.max_row_bytes,
            on_free=self.freed.append,
        )
        self.controller = Controller(
            flow=dataflow,
            config=self.config,
            prompts=self.prompts,
            store=self.store,
            ledger=self.ledger,
            fleet=self.fleet,
            replicas=dict(enumerate(self.replicas)),
            scorer=self.scorer,
            trainer_proxies={dataflow.main.name: self.trainer_proxy, **self.others},
            pools=self.pools,
            observer=self.observer,
            checkpoint=save,
            is_checkpoint_requested=self.is_checkpoint_requested,
            between=self.between,
            curriculum=self.curriculum,
            carried=self.carried,
            weights=self.weights,
            first_step=self.first_step,
            borrowed=dict(enumerate(self.borrowed, start=self.config.rollout.num_replicas)),
            lending=self.lending,
            clock=asyncio.get_running_loop().time,
        )
        chaos = asyncio.create_task(self.chaos(self)) if self.chaos else None
        try:
            await self.controller.run()
        finally:
            if chaos is not None:
                chaos.cancel()
                await asyncio.wait({chaos})
                if not chaos.cancelled():
                    chaos.result()


async def until(w: World, condition: Callable[[], bool]) -> None:
    """Wait for a condition that holds after some progress of the controller."""
    await asyncio.sleep(0)  # for there to be a controller
    await w.controller._state.progress.until(condition)


def world(seed: int = 0, *, num_replicas: int = 1, **changes: Any) -> World:
    rng = random.Random(seed)
    return World(
        config=config(num_replicas=num_replicas, **changes),
        replicas=[
            SimulatedReplica(name=f"rollout-{i}", latency_s=exponential(rng, 1.0), load_s=0.01)
            for i in range(num_replicas)
        ],
    )


def colocated(seed: int = 0, *, num_replicas: int = 1, **changes: Any) -> World:
    """Return a run with shared devices, which raise if both sides use them at once."""
    trainer = TrainerConfig(micro_batch_tokens=16, layout="dp4")
    changes = {"trainer": trainer, "placement": "colocated", **changes}
    w = world(seed, num_replicas=num_replicas, **changes)
    share_devices(w)
    return w


def share_devices(w: World) -> SharedDevices:
    devices = SharedDevices()
    w.trainer_proxy.devices = w.fleet.devices = devices
    w.trainer_proxy.num_data = w.config.trainer.parallel.num_data
    for replica in w.replicas:
        replica.devices = devices
        devices.generation_takes(replica.name)
    return devices


@pytest.mark.parametrize("make", [world, colocated])
def test_a_trainer_that_dies_before_its_first_weights_are_loaded(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that the replica waits for are gone; others come after the restart."""
    w = make(num_steps=2)
    w.weights = WeightManifest(version=0)
    (replica,) = w.replicas
    load = replica.update_weights

    async def update_weights(manifest: WeightManifest, *, delayed: bool) -> float:
        if manifest is w.weights:
            w.trainer_proxy.die()
            raise WeightsGone("version 0 is gone with its trainer")
        return await load(manifest, delayed=delayed)

    monkeypatch.setattr(replica, "update_weights", update_weights)
    run_in_virtual_time(w.run())
    assert w.ledger.num_trained == 8


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 3),
    stream=st.booleans(),
    num_replicas=st.integers(1, 3),
    row_s=st.sampled_from([0.0, 0.1, 1.0]),
    answer_s=st.sampled_from([0.0, 0.5, 5.0]),
    failing=st.sampled_from([0.0, 0.1]),
    order=st.sampled_from(["issued", "complete"]),
    over_issue=st.integers(0, 3),
    weight_update=st.sampled_from(["in_flight", "delayed"]),
    dies_after=st.none() | st.integers(0, 30),
    shares_devices=st.booleans(),
)
def test_every_schedule_drains_within_the_bound_and_ends_each_group_once(
    seed: int,
    max_staleness: int,
    stream: bool,
    num_replicas: int,
    row_s: float,
    answer_s: float,
    failing: float,
    order: Literal["issued", "complete"],
    over_issue: int,
    weight_update: Literal["in_flight", "delayed"],
    dies_after: int | None,
    shares_devices: bool,
) -> None:
    """Run random latencies and failures.

    The ledger raises if a group ends twice, and shared devices raise if both sides have memory.
    """
    rng = random.Random(seed)

    def outcome(task: ScoreTask) -> RewardResult | RewardFailure:
        if rng.random() < failing:
            return RewardFailure(kind="exception", reward="r", message="it broke")
        return RewardResult(total=rng.random(), components={})

    make = colocated if shares_devices else world
    w = make(
        seed,
        num_replicas=num_replicas,
        asynchrony=AsyncConfig(
            max_staleness=max_staleness,
            stream=stream,
            order=order,
            over_issue=over_issue if order == "complete" else 0,
            weight_update="in_flight" if shares_devices else weight_update,
        ),
    )
    if num_replicas > 1:
        w.replicas[0].dies_after = dies_after
    w.scorer = SimulatedScorer(latency_s=exponential(rng, 0.2), outcome=outcome)
    w.trainer_proxy = SimulatedTrainer(row_s=row_s, answer_s=answer_s)
    if shares_devices:
        share_devices(w)
    run_in_virtual_time(w.run())
    assert len(w.observer.steps) == w.config.num_steps
    assert max(w.observer.staleness) <= max_staleness
    assert not w.ledger.open_groups
    assert w.ledger.num_trained == w.config.num_steps * w.config.prompts_per_step
    assert [sum(map(len, step)) for step in w.trainer_proxy.trained[:-1]] == [
        w.config.rollouts_per_step
    ] * 4
    if order == "issued":  # else the run may end while surplus rows are being scored
        assert w.store.bytes_live == 0


@settings(max_examples=examples(300), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 3),
    num_replicas=st.integers(1, 2),
    order=st.sampled_from(["issued", "complete"]),
    over_issue=st.integers(0, 3),
    deaths=st.lists(
        st.tuples(
            st.floats(0.0, 30.0),
            st.sampled_from(["replica", "learner", "learner back to an older step", "shard"]),
        ),
        max_size=5,
    ),
    row_s=st.sampled_from([0.0, 0.1]),
    answer_s=st.sampled_from([0.0, 0.5, 5.0]),
    step_s=st.sampled_from([0.0, 1.0]),
    checkpoint_every=st.integers(0, 2),
    write_s=st.sampled_from([0.0, 1.0, 20.0]),
    shares_devices=st.booleans(),
)
@example(  # a replica that starts after the roll-back, before the weights come again
    seed=58660,
    max_staleness=1,
    num_replicas=1,
    order="issued",
    over_issue=0,
    deaths=[
        (9.82607676582989, "replica"),
        (9.84259236217728, "replica"),
        (23.531349798622774, "learner back to an older step"),
        (0.0, "replica"),
    ],
    row_s=0.1,
    answer_s=5.0,
    step_s=0.0,
    checkpoint_every=2,
    write_s=0.0,
    shares_devices=False,
)
def test_deaths_cost_time_and_nothing_else(
    seed: int,
    max_staleness: int,
    num_replicas: int,
    order: Literal["issued", "complete"],
    over_issue: int,
    deaths: list[tuple[float, str]],
    row_s: float,
    answer_s: float,
    step_s: float,
    checkpoint_every: int,
    write_s: float,
    shares_devices: bool,
) -> None:
    """Replicas, the trainer and shards die at random moments, each several times.

    Each step is trained completely and once in the surviving history, within the bound.
    """
    events: list[dict[str, Any]] = []

    async def chaos(w: World) -> None:
        for delay_s, kind in deaths:
            await asyncio.sleep(delay_s)
            alive = [r for r in [*w.replicas, *w.fleet.started_workers] if not r.dead]
            if kind == "replica" and alive:
                alive[0].die()
            elif kind.startswith("learner"):
                w.trainer_proxy.loses = 1 if "older" in kind else 0
                w.trainer_proxy.die()
            elif kind == "shard" and alive:
                lost = alive[0].shard
                for replica in alive:
                    replica.shard = f"{lost}+"
                w.fleet.prepare = functools.partial(_write_to, f"{lost}+")
                w.controller.shard_lost(lost)

    make = colocated if shares_devices else world
    w = make(
        seed,
        num_replicas=num_replicas,
        checkpoint_every=checkpoint_every,
        asynchrony=AsyncConfig(
            max_staleness=max_staleness,
            order=order,
            over_issue=over_issue if order == "complete" else 0,
        ),
    )
    rng = random.Random(seed)
    w.fleet.latency_s = exponential(rng, 1.0)
    w.scorer = SimulatedScorer(latency_s=exponential(rng, 0.2))
    w.trainer_proxy = SimulatedTrainer(row_s=row_s, answer_s=answer_s, step_s=step_s)
    if shares_devices:
        share_devices(w)
    w.ledger = Ledger(events.append, groups_per_step=w.config.prompts_per_step)
    w.chaos = chaos
    disk = SimulatedDisk(trainer_proxy=w.trainer_proxy, write_s=write_s)
    w.writes = lambda step, work: disk.write(step)
    run_in_virtual_time(w.run())
    assert len(w.observer.steps) == w.config.num_steps
    assert max(w.observer.staleness) <= max_staleness
    assert not w.ledger.open_groups
    assert w.ledger.num_trained == w.config.num_steps * w.config.prompts_per_step
    assert [sum(map(len, step)) for step in w.trainer_proxy.trained[:-1]] == [
        w.config.rollouts_per_step
    ] * 4
    trained = [
        {g for rows in step for g in rows.group_ids} for step in w.trainer_proxy.trained[:-1]
    ]
    recorded = [set(event["groups"]) for event in _surviving(events) if event["event"] == "trained"]
    assert trained == recorded
    assert w.checkpoints[-1] == w.config.num_steps


def _write_to(shard: str, replica: SimulatedReplica) -> None:
    replica.shard = shard


def _surviving(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the steps that were undone."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "resumed":
            kept = [e for e in kept if e["event"] != "trained" or e["step"] <= event["step"]]
        kept.append(event)
    return kept


def test_shared_devices_change_hands_once_a_step() -> None:
    w = colocated(num_replicas=2, num_steps=6, asynchrony=AsyncConfig(max_staleness=0))
    w.trainer_proxy.row_s = w.trainer_proxy.step_s = 1.0
    run_in_virtual_time(w.run())
    assert [replica.num_releases for replica in w.replicas] == [6, 6]
    assert w.trainer_proxy.devices is not None
    assert w.trainer_proxy.devices.num_turns == 6
    assert w.observer.waited_s["train", "devices"] > 0


def test_what_runs_when_the_devices_change_hands_goes_on_afterwards() -> None:
    """A group of the next step has started; none of it is sampled twice."""
    w = colocated(num_steps=4, asynchrony=AsyncConfig(max_staleness=1))
    w.trainer_proxy.row_s = 5.0
    run_in_virtual_time(w.run())
    assert len(w.replicas[0].submitted) == w.ledger.num_issued * w.config.group_size
    assert max(w.observer.staleness) == 1  # sampled before the turn, trained after it


def test_steps_that_are_there_already_are_trained_in_one_turn() -> None:
    w = colocated(num_steps=8, asynchrony=AsyncConfig(max_staleness=3))
    w.replicas[0].latency_s = lambda: 1.0  # four steps at once
    run_in_virtual_time(w.run())
    assert w.trainer_proxy.devices is not None
    assert w.trainer_proxy.devices.num_turns < 8
    assert max(w.observer.staleness) <= 3


def test_a_replica_that_joins_waits_for_generations_turn() -> None:
    """The previous replica died while the trainer worked."""
    w = colocated(num_replicas=2, num_steps=4, asynchrony=AsyncConfig(max_staleness=0))
    w.trainer_proxy.step_s = 50.0
    accumulate = w.trainer_proxy.accumulate

    async def die_meanwhile(micro_batches: Sequence[Sequence[StepRowsRef]]) -> None:
        if not w.replicas[0].dead:
            w.replicas[0].die()
        await accumulate(micro_batches)

    w.trainer_proxy.accumulate = die_meanwhile  # type: ignore[method-assign]
    run_in_virtual_time(w.run())
    assert len(w.fleet.started_workers) == 1
    assert w.fleet.started_workers[0].version >= 1
    assert w.ledger.num_trained == 16


def test_what_is_done_before_the_first_step_leaves_replicas_that_can_sample() -> None:
    """For example an evaluation of the initial model, whose weights come from the trainer."""
    w = colocated(num_steps=2)

    async def export(step: int) -> None:
        await w.trainer_proxy.hold()

    w.between.append(BetweenSteps(name="evaluation", is_due=lambda step: True, do=export, done=-1))
    run_in_virtual_time(w.run())
    assert w.ledger.num_trained == 8


def test_a_learner_that_dies_in_generations_turn_starts_in_its_own() -> None:
    w = colocated(num_replicas=2, num_steps=4, asynchrony=AsyncConfig(max_staleness=0))
    load = w.replicas[1].update_weights

    async def die_meanwhile(manifest: WeightManifest, *, delayed: bool) -> float:
        if manifest.version == 2 and not w.trainer_proxy.deaths:
            w.trainer_proxy.die()
        return await load(manifest, delayed=delayed)

    w.replicas[1].update_weights = die_meanwhile  # type: ignore[method-assign]
    run_in_virtual_time(w.run())
    assert len(w.observer.restarts) == 1
    assert w.ledger.num_trained == 16


def test_generation_goes_on_while_the_trainer_works() -> None:
    w = world(asynchrony=AsyncConfig(max_staleness=1))
    w.trainer_proxy = SimulatedTrainer(row_s=1.0)
    run_in_virtual_time(w.run())
    assert max(w.observer.staleness) == 1


@dataclass(kw_only=True)
class LateReplica(SimulatedReplica):
    """A replica that requests a version after the trainer may have dropped it."""

    trainer_proxy: SimulatedTrainer
    num_late: int = 0
    late_at: float | None = None
    waited_s: list[float] = field(default_factory=list)  # for newer weights

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        now = asyncio.get_running_loop().time()
        if self.trainer_proxy.version >= manifest.version + 2:
            self.num_late += 1
            self.late_at = now
            raise WeightsGone(f"version {manifest.version} is gone")
        if self.late_at is not None:
            self.waited_s.append(now - self.late_at)
            self.late_at = None
        return await SimulatedReplica.update_weights(self, manifest, delayed=delayed)


@pytest.mark.parametrize("weight_update", ["in_flight", "delayed"])
def test_a_version_that_is_given_up_before_it_is_loaded_gives_way_to_a_newer_one(
    weight_update: Literal["in_flight", "delayed"],
) -> None:
    w = world(asynchrony=AsyncConfig(max_staleness=8, weight_update=weight_update), num_steps=40)
    w.trainer_proxy = SimulatedTrainer(row_s=0.05)
    late = [
        LateReplica(
            name=f"rollout-{i}", latency_s=lambda: 0.1, load_s=load_s, trainer_proxy=w.trainer_proxy
        )
        for i, load_s in enumerate((3.0, 0.01))
    ]
    w.replicas = [*late]
    w.config = dataclasses.replace(w.config, rollout=RolloutConfig(num_replicas=2))
    run_in_virtual_time(w.run())
    assert len(w.observer.steps) == 40
    assert max(w.observer.staleness) <= 8
    assert (late[1].num_late > 0) == (weight_update == "delayed")
    assert max(late[1].waited_s, default=0.0) < 1  # not until the slow one has loaded again


@dataclass(kw_only=True)
class TakingReplica(SimulatedReplica):
    taken: list[int] = field(default_factory=list)

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        self.taken.append(manifest.version)
        return await SimulatedReplica.update_weights(self, manifest, delayed=delayed)


@dataclass(kw_only=True)
class ForgetfulLearner(SimulatedTrainer):
    """A trainer that publishes the weights of step 1 again after step 3."""

    async def publish(self) -> WeightManifest:
        manifest = await SimulatedTrainer.publish(self)
        return WeightManifest(version=1) if manifest.version == 3 else manifest


def test_a_version_older_than_what_replicas_have_is_refused() -> None:
    w = world(asynchrony=AsyncConfig(max_staleness=8), num_steps=6)
    w.trainer_proxy = ForgetfulLearner(row_s=1.0)
    replica = TakingReplica(name="rollout-0", latency_s=lambda: 0.1)
    w.replicas = [replica]
    with error_about(AssertionError, "version 1 "):
        run_in_virtual_time(w.run())
    assert replica.taken == [1, 2]


def test_the_trainer_waits_for_no_answer() -> None:
    """The next call is queued before the current one ends, across steps too."""
    w = world(asynchrony=AsyncConfig(max_staleness=2), num_steps=8)
    w.replicas[0].latency_s = lambda: 0.5
    w.trainer_proxy = SimulatedTrainer(row_s=1.0, answer_s=1.5)
    run_in_virtual_time(w.run())
    assert len(w.trainer_proxy.idle_s) >= 8
    assert max(w.trainer_proxy.idle_s[1:]) == 0
    assert max(w.observer.staleness) <= 2


def test_a_pipeline_gets_all_passes_of_a_part_at_once() -> None:
    """Two groups of 14 tokens do not fit into a micro-batch of 16."""
    w = world(num_steps=2, trainer=TrainerConfig(micro_batch_tokens=16, layout="pp2"))
    w.trainer_proxy.num_stages = 2
    run_in_virtual_time(w.run())
    assert [len(step) for step in w.trainer_proxy.trained] == [4, 4, 0]
    assert len(w.trainer_proxy.idle_s) == 4  # calls, each with two passes


def test_on_policy_trains_groups_in_the_order_of_issue() -> None:
    w = world(asynchrony=AsyncConfig(max_staleness=0))
    run_in_virtual_time(w.run())
    trained = [g for step in w.trainer_proxy.trained for rows in step for g in rows.group_ids]
    assert trained == sorted(trained)
    assert max(w.observer.staleness) == 0


def test_rows_of_recorded_groups_carry_the_index_of_their_rollout() -> None:
    w = world(num_steps=2, asynchrony=AsyncConfig(max_staleness=0))
    run_in_virtual_time(w.run())
    found = [
        (group, index)
        for step in w.trainer_proxy.trained
        for rows in step
        for group, index in zip(rows.group_ids, rows.recorded_as, strict=True)
    ]
    recorded = sorted((group, index) for group, index in found if index is not None)
    assert recorded == [(0, 0), (0, 1), (4, 0), (4, 1)]  # one group of 4 in each step
    assert len(found) == 16


def test_advantages_reach_the_trainer() -> None:
    w = world(num_steps=1)
    run_in_virtual_time(w.run())
    assert [x for rows in w.trainer_proxy.trained[0] for x in rows.scalars["advantages"]] == [
        -0.5,
        0.5,
    ] * 4
    assert {n for rows in w.trainer_proxy.trained[0] for n in rows.group_num_tokens} == {6}


def test_a_reward_that_always_fails_ends_the_run() -> None:
    w = world()
    w.scorer = SimulatedScorer(
        outcome=lambda task: RewardFailure(kind="exception", reward="broken", message="KeyError")
    )
    with error_about(RewardsFailed, "8 groups", "'broken'", "KeyError"):
        run_in_virtual_time(w.run())


def test_a_reward_that_fails_once_in_every_group_ends_the_run() -> None:
    """No step can be filled, whatever other rewards the groups have."""
    w = world()

    def outcome(task: ScoreTask) -> RewardResult | RewardFailure:
        if task.index == 0:
            return RewardFailure(kind="exception", reward="broken", message="KeyError")
        return RewardResult(total=1.0, components={})

    w.scorer = SimulatedScorer(outcome=outcome)
    with error_about(RewardsFailed, "8 groups", "'broken'", "KeyError"):
        run_in_virtual_time(w.run())


def test_groups_that_are_whole_break_the_row_of_those_that_fail() -> None:
    """Seven in eight groups fail, and the run still ends."""
    w = world(num_steps=2)

    def outcome(task: ScoreTask) -> RewardResult | RewardFailure:
        if task.group_id % 4 and task.index == 0:
            return RewardFailure(kind="exception", reward="broken", message="KeyError")
        return RewardResult(total=1.0, components={})

    w.scorer = SimulatedScorer(outcome=outcome)
    run_in_virtual_time(w.run())
    assert w.ledger.num_trained == 8


def test_a_step_that_the_store_cannot_hold_is_refused() -> None:
    w = world(prompts_per_step=4, group_size=2)
    w.store_bytes = 3 * 2 << 10  # three groups
    with invalid("prompts_per_step", 4):
        run_in_virtual_time(w.run())


def test_a_replica_that_never_answers_is_a_stall_and_not_a_hang() -> None:
    w = world(cluster=ClusterConfig(call_timeout_s=50.0))
    w.replicas[0].latency_s = lambda: 1e9
    with error_about(StallError, "650 s", "step 1", "4 groups", "rollout-0"):
        run_in_virtual_time(w.run())


def one_endless_rollout(*, samples: bool) -> World:
    """Return a run whose first rollout takes 2,000 s, with a limit of 650 s.

    Its replica answers every 5 s, like a real one, and reports progress if `samples`.
    """
    w = world(num_steps=1, cluster=ClusterConfig(call_timeout_s=50.0))
    (replica,) = w.replicas
    latencies = iter([2000.0])
    replica.latency_s = lambda: next(latencies, 1.0)
    ended = replica.collect

    async def collect() -> Collected:
        try:
            async with asyncio.timeout(5.0):
                return await ended()
        except TimeoutError:
            return Collected(finished=[], num_sampled=int(samples))

    replica.collect = collect  # type: ignore[method-assign]
    return w


def test_a_rollout_longer_than_the_limit_is_no_stall_while_it_samples() -> None:
    w = one_endless_rollout(samples=True)
    run_in_virtual_time(w.run())
    assert w.ledger.num_trained == 4
    assert w.observer.waited_s["train", "groups"] >= 1000.0


def test_a_replica_that_answers_and_samples_nothing_is_a_stall() -> None:
    with error_about(StallError, "650 s", "step 1", "4 groups"):
        run_in_virtual_time(one_endless_rollout(samples=False).run())


def test_an_error_of_a_worker_is_raised_as_it_is() -> None:
    w = world()

    async def fail() -> Any:
        raise ConnectionError("rollout-0 died")

    w.replicas[0].collect = fail  # type: ignore[method-assign]
    with error_about(ConnectionError, "rollout-0 died"):
        run_in_virtual_time(w.run())


def test_a_policy_without_finite_probabilities_ends_the_run_and_restarts_no_replica() -> None:
    w = world(num_replicas=2, num_steps=8)
    working = w.replicas[1].collect

    async def fail_at_version_2() -> Any:
        collected = await working()
        if w.replicas[1].version == 2:
            raise FloatingPointError("no finite probability with version 2 of the weights")
        return collected

    w.replicas[1].collect = fail_at_version_2  # type: ignore[method-assign]
    with error_about(FloatingPointError, "version 2"):
        run_in_virtual_time(w.run())
    assert w.observer.deaths == []
    assert w.observer.joined == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("method", ["accumulate", "optimizer_step", "publish"])
def test_an_error_of_the_learner_is_raised_while_the_next_step_waits(method: str) -> None:
    w = world(num_steps=8)
    calls = 0
    working = getattr(w.trainer_proxy, method)

    async def fail_the_third_time(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            w.replicas[0].latency_s = lambda: 1e9  # nothing more comes to train on
            raise FloatingPointError("loss nan at optimizer step 3")
        return await working(*args)

    setattr(w.trainer_proxy, method, fail_the_third_time)
    with error_about(FloatingPointError, "loss nan"):
        run_in_virtual_time(w.run())


def test_a_dead_replicas_requests_go_on_elsewhere_with_what_they_had() -> None:
    w = world(num_replicas=2, num_steps=8)
    w.replicas[0].dies_after = 3
    run_in_virtual_time(w.run())
    assert w.observer.deaths == ["rollout-0"]
    assert w.replicas[0].cleaned_up
    assert w.replicas[1].continued
    ((num_continued, num_dropped),) = w.observer.unfinished
    assert num_continued >= len(w.replicas[1].continued)
    assert num_dropped == 0
    assert w.ledger.num_trained == 8 * 4


def test_a_replica_that_died_has_a_successor_with_the_newest_weights() -> None:
    w = world(num_replicas=1, num_steps=8)
    w.replicas[0].dies_after = 20
    run_in_virtual_time(w.run())
    assert w.observer.deaths == ["rollout-0"]
    assert w.observer.joined == ["rollout-0", "rollout-0.1"]
    assert w.fleet.started_workers[0].version >= 2  # of the steps that 20 rollouts had trained
    assert w.ledger.num_trained == 8 * 4


def test_the_last_replicas_death_pauses_the_run_until_another_has_started() -> None:
    w = world(num_replicas=2, num_steps=4)
    w.replicas[0].dies_after = w.replicas[1].dies_after = 3
    w.fleet.start_s = 200.0
    run_in_virtual_time(w.run())
    assert len(w.fleet.started_workers) == 2
    assert w.observer.waited_s["train", "groups"] >= 200.0
    assert w.ledger.num_trained == 4 * 4
    assert w.ledger.num_dropped == 0


def test_replicas_that_cannot_start_end_the_run_with_the_last_reason() -> None:
    w = world(num_replicas=1)
    w.replicas[0].dies_after = 0
    w.fleet.num_duds = 99
    with error_about(ReplicaDied, "rollout-0"):
        run_in_virtual_time(w.run())
    assert len(w.observer.deaths) == 5


def test_a_learner_that_dies_while_nobody_asks_it_gives_its_weights_to_whoever_joins() -> None:
    """The trainer waits for rollouts, and the replica for weights that died with the trainer."""
    w = world()
    w.replicas[0].dies_after = 20
    gone: list[WeightManifest] = []

    def comes_late(replica: SimulatedReplica) -> None:
        take = replica.update_weights

        async def update(manifest: WeightManifest, *, delayed: bool) -> float:
            if not w.trainer_proxy.deaths:
                w.trainer_proxy.die()
                gone.append(manifest)
            if any(manifest is one for one in gone):
                raise WeightsGone("its learner has died")
            return await take(manifest, delayed=delayed)

        replica.update_weights = update  # type: ignore[method-assign]

    w.fleet.prepare = comes_late
    run_in_virtual_time(w.run())
    assert gone
    assert w.observer.steps[-1].step == w.config.num_steps
    assert len(w.observer.restarts) == 1


def poison(w: World, is_poison: Callable[[int, int], bool]) -> None:
    """Let replicas die 30 s after they get a rollout for which `is_poison(group, index)` is true.

    Such rollouts never end.
    """

    def prepare(replica: SimulatedReplica) -> None:
        submit = replica.submit

        def is_deadly(request: GenerationRequest) -> bool:
            group, index, _ = map(int, request.request_id.split("."))
            return is_poison(group, index)

        async def submit_and_die(
            requests: Sequence[GenerationRequest], priors: Mapping[str, Any]
        ) -> None:
            healthy = [request for request in requests if not is_deadly(request)]
            await submit(healthy, priors)
            if len(healthy) < len(requests):
                asyncio.get_running_loop().call_later(30.0, replica.die)

        replica.submit = submit_and_die  # type: ignore[method-assign]

    w.fleet.prepare = prepare
    for replica in w.replicas:
        prepare(replica)


def test_a_group_that_replicas_die_of_is_dropped() -> None:
    w = world(num_replicas=1, num_steps=2, asynchrony=AsyncConfig(max_staleness=0))
    poison(w, lambda group, index: group == 2)
    run_in_virtual_time(w.run())
    assert w.ledger.drop_reasons == {"replica died": 1}
    assert w.ledger.num_trained == 8
    # Its rollouts continue twice, then they are dropped with it.
    size = w.config.group_size
    assert w.observer.unfinished == [(size, 0), (size, 0), (0, size)]


@settings(max_examples=examples(15), deadline=None)
@given(
    every=st.integers(2, 5),
    num_replicas=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    is_whole=st.booleans(),
)
def test_many_groups_that_replicas_die_of_are_dropped_each(
    every: int, num_replicas: int, max_staleness: int, is_whole: bool
) -> None:
    """The others are trained, although replicas keep dying."""
    asynchrony = AsyncConfig(max_staleness=max_staleness)
    w = world(num_replicas=num_replicas, num_steps=4, asynchrony=asynchrony)
    poison(w, lambda group, index: group % every == 0 and (is_whole or index == 0))
    run_in_virtual_time(w.run())
    trained = {g for step in w.trainer_proxy.trained for rows in step for g in rows.group_ids}
    assert len(trained) == w.ledger.num_trained == 16
    assert not any(group % every == 0 for group in trained)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("index", [None, 0])
def test_a_run_ends_if_replicas_die_of_every_group(num_replicas: int, index: int | None) -> None:
    """All rollouts are deadly, or one of each group: then replicas finish others before."""
    w = world(num_replicas=num_replicas)
    poison(w, lambda group, i: index in (None, i))
    with error_about(ReplicaDied, "rollout-"):
        run_in_virtual_time(w.run())
    assert len(w.observer.deaths) <= 20 * num_replicas
    assert w.ledger.num_trained == 0


def test_over_issue_replaces_no_group_that_could_only_be_stale() -> None:
    """On-policy, 4 groups per step and 4 more in flight.

    After each step, the 4 late groups are dropped once, not repeatedly until the new weights are
    loaded.
    """
    w = world(
        num_steps=8,
        asynchrony=AsyncConfig(max_staleness=0, order="complete", over_issue=4),
    )
    w.replicas[0].load_s = 10.0
    run_in_virtual_time(w.run())
    assert w.ledger.num_dropped == 8 * 4


def test_what_a_checkpoint_has_of_open_groups_goes_on_after_a_crash() -> None:
    """Finished rollouts are not sampled again, and running ones continue from their tokens."""
    w = world(num_steps=4, checkpoint_every=2, asynchrony=AsyncConfig(max_staleness=2))
    events: list[dict[str, Any]] = []
    w.ledger = Ledger(events.append, groups_per_step=4)
    w.trainer_proxy.step_s = 2.0
    run_in_virtual_time(w.run())
    work = w.saved[0]
    assert work.finished
    assert work.parts
    at_crash = next(i for i, e in enumerate(events) if e.get("step") == 3)
    later = world(1, num_steps=4, asynchrony=AsyncConfig(max_staleness=2))
    later.ledger = Ledger.replay(events[:at_crash], events.append, groups_per_step=4)
    later.ledger.resume(step=2)
    open_ids = {group.group_id for group in later.ledger.open_groups}
    nodes = dict.fromkeys(open_ids, "node")
    later.carried = dataclasses.replace(work, nodes=nodes)
    later.first_step = later.trainer_proxy.version = 2
    later.observer.first_step = 2
    run_in_virtual_time(later.run())
    kept = {rollout.request_id for rollout in work.finished}
    assert {int(request_id.split(".")[0]) for request_id in kept} <= open_ids
    sampled = {tuple(name.split(".")[:2]) for name in later.replicas[0].submitted}
    assert sampled.isdisjoint(tuple(name.split(".")[:2]) for name in kept)
    assert len(later.replicas[0].continued) == len({part.request_id for part in work.parts})
    assert later.ledger.num_trained == 16
    assert max(later.observer.staleness) <= 2
    assert later.store.bytes_live == 0


def test_a_resumed_run_issues_no_more_than_the_bound_lets_it() -> None:
    """With a bound of 0, the 12 open groups of a crash are issued one step's worth at a time."""
    w = world(num_steps=4, asynchrony=AsyncConfig(max_staleness=0))
    for group_id in range(12):
        w.ledger.issue(group_id, prompt_index=group_id, version=0)
    run_in_virtual_time(w.run())
    assert w.ledger.num_dropped == 0
    assert len(w.replicas[0].submitted) == 4 * 8


def test_stragglers_are_cancelled_and_surplus_groups_end_as_dropped() -> None:
    w = world(asynchrony=AsyncConfig(max_staleness=0, order="complete", over_issue=4))
    run_in_virtual_time(w.run())
    assert w.ledger.drop_reasons.keys() == {"stale", "surplus"}
    assert max(w.observer.staleness) == 0


def test_groups_of_a_lost_shard_are_issued_again() -> None:
    w = world(num_steps=3)
    w.scorer = SimulatedScorer(latency_s=lambda: 1.0)

    async def lose_a_shard() -> None:
        await asyncio.sleep(1.5)
        w.replicas[0].shard = "shard-2"
        w.controller.shard_lost("shard")

    async def run() -> None:
        await asyncio.gather(w.run(), lose_a_shard())

    run_in_virtual_time(run())
    assert w.ledger.num_trained == 3 * 4
    assert w.ledger.num_issued == 3 * 4  # the same groups, under their own ids
    assert sum(len(replica.submitted) for replica in w.replicas) > 3 * 8


def test_rows_of_a_healthy_shard_are_scored_beside_those_of_a_lost_one() -> None:
    """One batch holds both. The scorer notices the death before the controller does."""
    w = world(num_replicas=2, num_steps=3)
    w.replicas[1].shard = "healthy"
    dead: set[str] = set()
    num_unreadable = 0

    class Scorer(SimulatedScorer):
        async def score(self, tasks: Sequence[ScoreTask], tell: ReportScores) -> None:
            nonlocal num_unreadable
            await asyncio.sleep(1.0)
            lost = [i for i, task in enumerate(tasks) if task.cell[0].shard in dead]
            num_unreadable += len(lost)
            tell(dict.fromkeys(lost, Unreadable()))
            for i in set(range(len(tasks))) - {*lost}:
                tell({i: Scored(outcome=self.outcome(tasks[i]))})

    w.scorer = Scorer()

    async def lose_a_shard() -> None:
        await asyncio.sleep(1.5)
        dead.add("shard")
        await asyncio.sleep(2.0)
        w.replicas[0].shard = "shard-2"
        w.controller.shard_lost("shard")

    async def run() -> None:
        await asyncio.gather(w.run(), lose_a_shard())

    run_in_virtual_time(run())
    assert num_unreadable > 0
    assert w.ledger.num_trained == 3 * 4


def test_groups_that_the_learner_has_read_are_not_issued_again() -> None:
    """Their shard dies during the optimizer step that trains them."""
    w = world(num_steps=2, asynchrony=AsyncConfig(max_staleness=0))
    w.replicas[0].latency_s = lambda: 1.0
    w.trainer_proxy = SimulatedTrainer(step_s=5.0)

    async def lose_a_shard() -> None:
        await asyncio.sleep(3.0)
        assert sum(map(len, w.trainer_proxy.trained[0])) == 8  # all of the first step
        w.replicas[0].shard = "shard-2"
        w.controller.shard_lost("shard")

    async def run() -> None:
        await asyncio.gather(w.run(), lose_a_shard())

    run_in_virtual_time(run())
    trained = [g for step in w.trainer_proxy.trained for rows in step for g in rows.group_ids]
    assert sorted(trained) == sorted([*range(8)] * 2)
    assert (w.ledger.num_issued, w.ledger.num_trained) == (8, 8)


def test_checkpoints_come_when_asked_for_and_at_the_end() -> None:
    w = world(num_steps=5, checkpoint_every=2)
    run_in_virtual_time(w.run())
    assert w.checkpoints == [2, 4, 5]


def right(task: ScoreTask) -> bool:
    return task.group_id % 3 == 0


def test_a_learnt_prompt_does_not_come_again_and_the_ledger_says_so() -> None:
    w = world(num_steps=5)  # 20 groups of 8 rows: beyond the second epoch
    w.prompts = SimulatedPrompts(num_rows=8)
    w.curriculum = Curriculum(1.0, num_rows=8)

    def outcome(task: ScoreTask) -> RewardResult:
        """A wrong group has a mean of 0, though one of its rollouts alone would look solved."""
        return RewardResult(total=1.0 if right(task) else 3.0 - 6.0 * task.index, components={})

    w.scorer.outcome = outcome
    events: list[Event] = []
    w.ledger = Ledger(events.append, groups_per_step=4)
    run_in_virtual_time(w.run())
    prompts: list[int | None] = [None] * w.ledger.next_prompt
    for event in events:
        if event["event"] == "issued":
            prompts[event["prompt"]] = event["group"]
    skipped = [event["prompt"] for event in events if event["event"] == "skipped"]
    assert skipped
    assert [prompt for prompt, group in enumerate(prompts) if group is None] == skipped
    issued = {prompt: group for prompt, group in enumerate(prompts) if group is not None}
    assert list(issued.values()) == list(range(len(issued)))
    learnt = {prompt % 8 for prompt, group in issued.items() if group % 3 == 0}
    assert {prompt % 8 for prompt in skipped} <= learnt == set(w.curriculum.retired)
    assert w.ledger.num_skipped == len(skipped)
    again = Ledger.replay(events, events.append, groups_per_step=4)
    assert (again.next_prompt, again.num_skipped) == (w.ledger.next_prompt, len(skipped))


def test_what_is_done_between_steps_finds_the_learner_at_its_step() -> None:
    w = world(num_steps=6)
    seen: list[tuple[int, int]] = []

    async def look(step: int) -> None:
        await asyncio.sleep(3.0)
        seen.append((step, len(w.trainer_proxy.trained) - 1))  # the last one is under way

    w.between.append(BetweenSteps(name="look", is_due=lambda step: step % 2 == 0, do=look, done=-1))
    run_in_virtual_time(w.run())
    assert seen == [(0, 0), (2, 2), (4, 4), (6, 6)]


def test_open_groups_of_a_crashed_run_are_issued_again() -> None:
    w = world(num_steps=2)
    w.ledger.issue(0, prompt_index=0, version=0)
    w.ledger.issue(1, prompt_index=1, version=0)
    run_in_virtual_time(w.run())
    trained = {g for step in w.trainer_proxy.trained for rows in step for g in rows.group_ids}
    assert trained == set(range(8))
    assert (w.ledger.num_issued, w.ledger.num_trained) == (8, 8)


def test_requests_of_different_seeds_groups_and_places_have_streams_of_their_own() -> None:
    seeds = [0, 1, 2**24, 2**40, 2**63, 2**64 - 1, -1]
    made = {
        request_seed(seed, group_id, index)
        for seed in seeds
        for group_id in range(40)
        for index in range(40)
    }
    assert len({stream_key(seed) for seed in made}) == len(seeds) * 40 * 40
    assert all(0 <= seed < 2**64 for seed in made)
    assert request_seed(7, 3, 1) == 7854715285349225158  # in every life of a run


def test_the_virtual_clock_tells_a_deadlock() -> None:
    with pytest.raises(Deadlock):
        run_in_virtual_time(asyncio.Event().wait())
