"""The controller over workers that only take time, in virtual time: bounds, order, failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsys.config import AsyncConfig, ClusterConfig, DataConfig, RunConfig, TrainerConfig
from rlsys.controller import Controller, RewardsFailed, StallError
from rlsys.dataflow.graph import Dataflow, Prompts
from rlsys.dataflow.ledger import Ledger
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.simulation.virtual_time import Deadlock, run_in_virtual_time
from rlsys.simulation.workers import (
    Record,
    SimulatedLearner,
    SimulatedPrompts,
    SimulatedReplica,
    SimulatedScorer,
    exponential,
)
from rlsys.workers import Scored, ScoreTask, TellScores, Unreadable


def center(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.mean()


def no_loss(*_: Any) -> Any:
    raise AssertionError("the learner is a fake")


def flow(group_size: int) -> Dataflow:
    built = Dataflow()
    rollouts = built.generate("policy", Prompts(config=DataConfig()), group_size=group_size)
    reward = built.score(rollouts, [lambda rollout: 0.0])
    advantage = built.per_group(center, reward)
    built.train("policy", rollouts, advantage, loss=no_loss, aggregation=no_loss)
    return built


def config(**changes: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "num_steps": 4,
        "prompts_per_step": 4,
        "group_size": 2,
        "trainer": TrainerConfig(micro_batch_tokens=16),
        "cluster": ClusterConfig(call_timeout_s=1000.0),
    }
    return RunConfig(**{**defaults, **changes})


@dataclass(kw_only=True)
class World:
    """A controller and everything around it."""

    config: RunConfig
    replicas: list[SimulatedReplica]
    scorer: SimulatedScorer = field(default_factory=SimulatedScorer)
    learner: SimulatedLearner = field(default_factory=SimulatedLearner)
    observer: Record = field(default_factory=Record)
    ledger: Ledger = field(default_factory=lambda: Ledger(lambda event: None))
    checkpoints: list[int] = field(default_factory=list)
    store_bytes: int = 1 << 20
    freed: list[Any] = field(default_factory=list)

    async def run(self) -> None:
        async def save(step: int) -> None:
            self.checkpoints.append(step)

        dataflow = flow(self.config.group_size)
        self.store = dataflow.open_store(
            max_bytes=self.store_bytes, max_row_bytes=1 << 10, on_free=self.freed.append
        )
        self.controller = Controller(
            flow=dataflow,
            config=self.config,
            prompts=SimulatedPrompts(),
            store=self.store,
            ledger=self.ledger,
            replicas=self.replicas,
            scorer=self.scorer,
            learner=self.learner,
            observer=self.observer,
            checkpoint=save,
            clock=asyncio.get_running_loop().time,
        )
        await self.controller.run()


def world(seed: int = 0, *, num_replicas: int = 1, **changes: Any) -> World:
    rng = random.Random(seed)
    return World(
        config=config(**changes),
        replicas=[
            SimulatedReplica(name=f"rollout-{i}", latency_s=exponential(rng, 1.0), load_s=0.01)
            for i in range(num_replicas)
        ],
    )


@settings(max_examples=150, deadline=None)
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
) -> None:
    """Random latencies and failures. The ledger itself raises if a group would end twice."""
    rng = random.Random(seed)

    def outcome(task: ScoreTask) -> RewardResult | RewardFailure:
        if rng.random() < failing:
            return RewardFailure(kind="exception", reward="r", message="it broke")
        return RewardResult(total=rng.random(), components={})

    w = world(
        seed,
        num_replicas=num_replicas,
        asynchrony=AsyncConfig(
            max_staleness=max_staleness,
            stream=stream,
            order=order,
            over_issue=over_issue if order == "complete" else 0,
            weight_update=weight_update,
        ),
    )
    if num_replicas > 1:
        w.replicas[0].dies_after = dies_after
    w.scorer = SimulatedScorer(latency_s=exponential(rng, 0.2), outcome=outcome)
    w.learner = SimulatedLearner(row_s=row_s, answer_s=answer_s)
    run_in_virtual_time(w.run())
    assert len(w.observer.steps) == w.config.num_steps
    assert max(w.observer.staleness) <= max_staleness
    assert not w.ledger.open_groups
    assert w.ledger.num_trained == w.config.num_steps * w.config.prompts_per_step
    assert [len(step) for step in w.learner.trained[:-1]] == [w.config.rollouts_per_step] * 4
    if order == "issued":  # else the run may end while surplus rows are being scored
        assert w.store.bytes_live == 0


def test_generation_goes_on_while_the_trainer_works() -> None:
    w = world(asynchrony=AsyncConfig(max_staleness=1))
    w.learner = SimulatedLearner(row_s=1.0)
    run_in_virtual_time(w.run())
    assert max(w.observer.staleness) == 1


def test_the_trainer_waits_for_no_answer() -> None:
    """It has the next call before it is done with the one before, from step to step."""
    w = world(asynchrony=AsyncConfig(max_staleness=2), num_steps=8)
    w.replicas[0].latency_s = lambda: 0.5
    w.learner = SimulatedLearner(row_s=1.0, answer_s=1.5)
    run_in_virtual_time(w.run())
    assert len(w.learner.idle_s) >= 8
    assert max(w.learner.idle_s[1:]) == 0
    assert max(w.observer.staleness) <= 2


def test_on_policy_trains_groups_in_the_order_of_issue() -> None:
    w = world(asynchrony=AsyncConfig(max_staleness=0))
    run_in_virtual_time(w.run())
    trained = [task.group_id for step in w.learner.trained for task in step]
    assert trained == sorted(trained)
    assert max(w.observer.staleness) == 0


def test_advantages_reach_the_trainer() -> None:
    w = world(num_steps=1)
    run_in_virtual_time(w.run())
    assert [task.advantage for task in w.learner.trained[0]] == [-0.5, 0.5] * 4
    assert {task.group_num_tokens for task in w.learner.trained[0]} == {6}


def test_a_reward_that_always_fails_ends_the_run() -> None:
    w = world()
    w.scorer = SimulatedScorer(
        outcome=lambda task: RewardFailure(kind="exception", reward="broken", message="KeyError")
    )
    with pytest.raises(RewardsFailed, match=r"8 groups in a row.*'broken': KeyError"):
        run_in_virtual_time(w.run())


def test_a_step_that_the_store_cannot_hold_is_refused() -> None:
    w = world(prompts_per_step=4, group_size=2)
    w.store_bytes = 3 * 2 << 10  # three groups
    with pytest.raises(ValueError, match=r"prompts_per_step=4 groups would wait for ever"):
        run_in_virtual_time(w.run())


def test_a_replica_that_never_answers_is_a_stall_and_not_a_hang() -> None:
    w = world(cluster=ClusterConfig(call_timeout_s=50.0))
    w.replicas[0].latency_s = lambda: 1e9
    with pytest.raises(StallError, match=r"50 s.*step 1 lacks 4 groups.*rollout-0"):
        run_in_virtual_time(w.run())


def test_an_error_of_a_worker_is_raised_as_it_is() -> None:
    w = world()

    async def fail() -> Any:
        raise ConnectionError("rollout-0 died")

    w.replicas[0].collect = fail  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="rollout-0 died"):
        run_in_virtual_time(w.run())


@pytest.mark.parametrize("method", ["accumulate", "optimizer_step", "publish"])
def test_an_error_of_the_learner_is_raised_while_the_next_step_waits(method: str) -> None:
    w = world(num_steps=8)
    calls = 0
    working = getattr(w.learner, method)

    async def fail_the_third_time(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            w.replicas[0].latency_s = lambda: 1e9  # nothing more comes to train on
            raise FloatingPointError("loss nan at optimizer step 3")
        return await working(*args)

    setattr(w.learner, method, fail_the_third_time)
    with pytest.raises(FloatingPointError, match="loss nan"):
        run_in_virtual_time(w.run())


def test_a_dead_replicas_requests_go_on_elsewhere_with_what_they_had() -> None:
    w = world(num_replicas=2, num_steps=8)
    w.replicas[0].dies_after = 3
    run_in_virtual_time(w.run())
    assert w.observer.deaths == ["rollout-0"]
    assert w.replicas[0].buried
    assert w.replicas[1].continued
    assert w.ledger.num_trained == 8 * 4


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
    assert sum(replica.num_submitted for replica in w.replicas) > 3 * 8


def test_rows_of_a_healthy_shard_are_scored_beside_those_of_a_lost_one() -> None:
    """One batch holds both; the scorer meets the death before the controller is told."""
    w = world(num_replicas=2, num_steps=3)
    w.replicas[1].shard = "healthy"
    dead: set[str] = set()
    num_unreadable = 0

    class Scorer(SimulatedScorer):
        async def score(self, tasks: Sequence[ScoreTask], tell: TellScores) -> None:
            nonlocal num_unreadable
            await asyncio.sleep(1.0)
            lost = [i for i, task in enumerate(tasks) if task.cell[0].shard in dead]
            num_unreadable += len(lost)
            tell(dict.fromkeys(lost, Unreadable()))
            for i in set(range(len(tasks))) - {*lost}:
                tell({i: Scored(outcome=self.outcome(tasks[i]), text=None)})

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
    """Their shard dies while the optimizer step that they are part of is under way."""
    w = world(num_steps=2, asynchrony=AsyncConfig(max_staleness=0))
    w.replicas[0].latency_s = lambda: 1.0
    w.learner = SimulatedLearner(step_s=5.0)

    async def lose_a_shard() -> None:
        await asyncio.sleep(3.0)
        assert len(w.learner.trained[0]) == 8  # all of the first step
        w.replicas[0].shard = "shard-2"
        w.controller.shard_lost("shard")

    async def run() -> None:
        await asyncio.gather(w.run(), lose_a_shard())

    run_in_virtual_time(run())
    trained = [task.group_id for step in w.learner.trained for task in step]
    assert sorted(trained) == sorted([*range(8)] * 2)
    assert (w.ledger.num_issued, w.ledger.num_trained) == (8, 8)


def test_checkpoints_come_when_asked_for_and_at_the_end() -> None:
    w = world(num_steps=5, checkpoint_every=2)
    run_in_virtual_time(w.run())
    assert w.checkpoints == [2, 4, 5]


def test_open_groups_of_a_crashed_run_are_issued_again() -> None:
    w = world(num_steps=2)
    w.ledger.issue(0, prompt_index=0, version=0)
    w.ledger.issue(1, prompt_index=1, version=0)
    run_in_virtual_time(w.run())
    trained = {task.group_id for step in w.learner.trained for task in step}
    assert trained == set(range(8))
    assert (w.ledger.num_issued, w.ledger.num_trained) == (8, 8)


def test_the_virtual_clock_tells_a_deadlock() -> None:
    with pytest.raises(Deadlock):
        run_in_virtual_time(asyncio.Event().wait())
