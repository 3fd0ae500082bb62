"""The controller with environments that make the rollouts, in virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsys
from rlsys.algorithms import clipped_surrogate, token_mean
from rlsys.config import AsyncConfig, DataConfig, TrainedRoleConfig, TrainerConfig
from rlsys.controller.failures import RewardsFailed
from rlsys.controller.simulation.simulated_replicas import SimulatedReplica
from rlsys.controller.simulation.simulated_workers import SimulatedTrainer
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import Prompts
from rlsys.dataflow.scheduling.ledger import Event, Ledger
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import NO_VERSION, GenerationRequest
from tests.controller.test_controller import World, center, no_loss, world
from tests.errors import error_about
from tests.tiers import examples


@rlsys.environment
async def game(chat: Any, task: Any) -> float:
    raise AssertionError("the workers are fakes")


def playing(w: World, plays: Any, *, parts: tuple[str, ...] = ()) -> World:
    w.dataflow = flow = Dataflow()
    episodes = flow.play(
        flow.model("policy"),
        game,
        Prompts(config=DataConfig()),
        group_size=w.config.group_size,
        parts=parts,
    )
    advantages = flow.per_group(center, episodes.reward)
    flow.train(
        flow.models["policy"],
        episodes.rollouts,
        advantages,
        loss=no_loss,
        aggregation=no_loss,
        watch=episodes.parts,
    )
    flow.check()
    for replica in w.replicas:
        replica.plays = plays
    return w


def failure(kind: Any = "exception") -> RewardFailure:
    return RewardFailure(kind=kind, reward="game", message="no server", what="environment")


def test_what_episodes_are_worth_reaches_the_store() -> None:
    def plays(request: GenerationRequest) -> RewardResult:
        assert request.task is not None
        index = float(request.task.index)
        return RewardResult(total=2 * index, components={"final": index, "bonus": index})

    w = playing(world(num_replicas=2), plays, parts=("bonus",))
    run_in_virtual_time(w.run())
    assert len(w.observer.steps) == 4
    for step in w.observer.steps:
        for group in step.groups:
            columns = step.columns[group.group_id]
            size = w.config.group_size
            assert list(columns["reward"]) == [2 * n for n in range(size)]
            assert list(columns["bonus"]) == list(range(size))
            assert group.rollouts[1].components == {"final": 1.0, "bonus": 1.0}
    assert w.store.bytes_live == w.store.num_rows == 0


def test_parts_that_no_episode_gives_are_told_once() -> None:
    def plays(request: GenerationRequest) -> RewardResult:
        return RewardResult(total=1.0, components={"final": 1.0, "bonus": 0.0})

    w = playing(world(num_replicas=2), plays, parts=("bonus", "bonnus"))
    run_in_virtual_time(w.run())
    num_episodes = w.config.prompts_per_step * w.config.group_size
    assert w.observer.missing == [(("bonnus",), ("bonus", "final"), num_episodes)]


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 2),
    failing=st.sampled_from([0.0, 0.1, 0.3]),
    which=st.sampled_from([0, -1]),
    gather_s=st.sampled_from([0.0, 1.0, 10.0]),
    dies_after=st.sampled_from([None, 5, 20]),
)
def test_a_failed_episode_drops_its_group_once(
    seed: int,
    max_staleness: int,
    failing: float,
    which: int,
    gather_s: float,
    dies_after: int | None,
) -> None:
    """Over deaths of replicas, together with others; the ledger raises if a group ends twice."""
    rng = random.Random(seed)
    hopeless: set[int] = set()

    def plays(request: GenerationRequest) -> RewardResult | RewardFailure:
        assert request.task is not None
        if request.task.index == which % request.task.group_size and rng.random() < failing:
            hopeless.add(request.task.group_id)
            return failure()
        return RewardResult(total=rng.random(), components={})

    w = world(seed, num_replicas=2, asynchrony=AsyncConfig(max_staleness=max_staleness))
    w.replicas[0].dies_after = dies_after
    for replica in w.replicas:
        replica.gather_s = gather_s
    w.fleet.prepare = lambda replica: setattr(replica, "plays", plays)
    run_in_virtual_time(playing(w, plays).run())
    trained = {g for step in w.trainer_proxy.trained for rows in step for g in rows.group_ids}
    assert len(trained) == w.ledger.num_trained == 16
    if dies_after is None:  # else some were played again, whose failure nobody was told
        assert not trained & hopeless
    assert w.ledger.drop_reasons["environment exception"] <= len(w.observer.failures)
    assert w.store.bytes_live == w.store.num_rows == 0


def test_an_environment_that_always_fails_ends_the_run() -> None:
    w = playing(world(), lambda request: failure())
    with error_about(RewardsFailed, "8 groups", "'game': no server"):
        run_in_virtual_time(w.run())
    assert w.ledger.drop_reasons == {"environment exception": 7}  # the eighth ends the run


def task_of(request: GenerationRequest) -> Any:
    assert request.task is not None
    return request.task


def test_episodes_without_a_reply_count_in_their_groups() -> None:
    """One rollout of each group, and every second group, have no token."""

    def plays(request: GenerationRequest) -> RewardResult:
        index = float(task_of(request).index)
        return RewardResult(total=index, components={"final": index})

    w = playing(world(num_replicas=2), plays)
    for replica in w.replicas:
        replica.is_silent = lambda request: (
            task_of(request).index == 0 or task_of(request).group_id % 2 == 1
        )
    events: list[Event] = []
    w.ledger = Ledger(events.append, groups_per_step=w.config.prompts_per_step)
    run_in_virtual_time(w.run())
    size = w.config.group_size
    assert len(w.observer.steps) == 4
    for step in w.observer.steps:
        for group in step.groups:
            assert list(step.columns[group.group_id]["reward"]) == list(range(size))
            expected = 0 if group.group_id % 2 else 3 * (size - 1)
            assert group.num_trained_tokens() == expected
            assert (group.oldest_version == NO_VERSION) == (expected == 0)
    trained = [event for event in events if event["event"] == "trained"]
    assert len(trained) == 4
    for event in trained:
        for group_id, version in zip(event["groups"], event["oldest_versions"], strict=True):
            assert 0 <= version < event["step"]
            if group_id % 2:  # without tokens
                assert version == event["step"] - 1


def test_an_environment_that_never_asks_the_policy_ends_the_run() -> None:
    w = playing(world(), lambda request: RewardResult(total=1.0, components={"final": 1.0}))
    for replica in w.replicas:
        replica.is_silent = lambda request: True
    with pytest.raises(RewardsFailed) as raised:
        run_in_virtual_time(w.run())
    num = 2 * w.config.prompts_per_step * w.config.group_size
    assert str(num) in str(raised.value)


@rlsys.environment(seats=("first", "second", "third"))
async def three(chat: Any, task: Any) -> float:
    raise AssertionError("the workers are fakes")


def of_two_policies(w: World) -> World:
    """The policy plays two seats and `rival` the one between them; each is trained on its own."""
    w.dataflow = flow = Dataflow()
    policy = flow.model("policy")
    rival = flow.model("rival", TrainedRoleConfig(trainer=TrainerConfig(micro_batch_tokens=16)))
    episodes = flow.play(
        policy,
        three,
        Prompts(config=DataConfig()),
        group_size=w.config.group_size,
        seats={"second": rival},
    )
    advantages = flow.per_group(center, episodes.reward)
    for model in (policy, rival):
        flow.train(
            model, episodes.rollouts, advantages, loss=clipped_surrogate(), aggregation=token_mean
        )
    flow.check()
    w.others["rival"] = SimulatedTrainer(row_s=0.02, step_s=0.1)

    def plays(request: GenerationRequest) -> RewardResult:
        return RewardResult(total=1.0, components={})

    def prepare(replica: SimulatedReplica) -> None:
        replica.plays, replica.num_by_seat = plays, (1, 2)  # of the third nothing was sampled

    for replica in w.replicas:
        prepare(replica)
    w.fleet.prepare = prepare
    return w


def test_each_policy_trains_on_its_own_seats() -> None:
    w = of_two_policies(world(num_replicas=2))
    run_in_virtual_time(w.run())
    size = w.config.group_size
    rows = {name: one.trained for name, one in (("policy", w.trainer_proxy), *w.others.items())}
    for name, seats, num in (("policy", (0, 2), 1), ("rival", (1,), 2)):
        trained = [some for step in rows[name] for some in step]
        assert sum(len(some) for some in trained) == 16 * size
        for some in trained:
            assert some.seats == seats
            assert list(some.group_num_tokens) == [num * size] * len(some)
            assert "seats" in some.cells


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 2),
    answer_s=st.sampled_from([0.0, 0.3]),
    dies=st.sampled_from(["", "policy", "rival", "replica"]),
    loses=st.integers(0, 2),
)
def test_replicas_have_one_version_of_all_policies(
    seed: int, max_staleness: int, answer_s: float, dies: str, loses: int
) -> None:
    """Over deaths of either trainer, with lost steps, and of a replica."""
    w = of_two_policies(
        world(seed, num_replicas=2, asynchrony=AsyncConfig(max_staleness=max_staleness))
    )
    trainer_proxies = {"policy": w.trainer_proxy, **w.others}
    for one in trainer_proxies.values():
        one.answer_s, one.loses = answer_s, loses if dies in trainer_proxies else 0
    if dies == "replica":
        w.replicas[0].dies_after = 5

    async def chaos(w: World) -> None:
        if dies in trainer_proxies:
            await asyncio.sleep(random.Random(seed).uniform(1.0, 12.0))
            trainer_proxies[dies].die()

    w.chaos = chaos
    run_in_virtual_time(w.run())
    assert w.trainer_proxy.version == w.others["rival"].version == 4
    told = [
        others for replica in (*w.replicas, *w.fleet.started_workers) for others in replica.others
    ]
    assert told
    assert all(others == {"rival": version} for version, others in told)
    for step in range(4):
        of_policy, of_rival = (
            sorted(group for some in one.trained[step] for group in some.group_ids)
            for one in trainer_proxies.values()
        )
        assert of_policy == of_rival
        assert len(of_policy) == w.config.prompts_per_step * w.config.group_size
    assert w.store.bytes_live == w.store.num_rows == 0
