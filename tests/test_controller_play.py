"""The controller where environments make the rollouts, in virtual time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsys
from rlsys.config import AsyncConfig, DataConfig
from rlsys.controller import RewardsFailed
from rlsys.dataflow.graph import Dataflow
from rlsys.dataflow.stages import Prompts
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.simulation.virtual_time import run_in_virtual_time
from rlsys.types import GenerationRequest
from tests.test_controller import World, center, no_loss, world


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
    return RewardFailure(kind=kind, reward="game", message="no server")


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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 2),
    failing=st.sampled_from([0.0, 0.1, 0.3]),
    dies_after=st.sampled_from([None, 5, 20]),
)
def test_a_failed_episode_drops_its_group_once(
    seed: int, max_staleness: int, failing: float, dies_after: int | None
) -> None:
    """Over deaths of replicas too; the ledger raises if a group ends twice."""
    rng = random.Random(seed)
    hopeless: set[int] = set()

    def plays(request: GenerationRequest) -> RewardResult | RewardFailure:
        assert request.task is not None
        if request.task.index == 0 and rng.random() < failing:
            hopeless.add(request.task.group_id)
            return failure()
        return RewardResult(total=rng.random(), components={})

    w = world(seed, num_replicas=2, asynchrony=AsyncConfig(max_staleness=max_staleness))
    w.replicas[0].dies_after = dies_after
    w.fleet.prepare = lambda replica: setattr(replica, "plays", plays)
    run_in_virtual_time(playing(w, plays).run())
    trained = {g for step in w.learner.trained for rows in step for g in rows.group_ids}
    assert len(trained) == w.ledger.num_trained == 16
    if dies_after is None:  # else some were played again, whose failure nobody was told
        assert not trained & hopeless
    assert w.ledger.drop_reasons["reward exception"] <= len(w.observer.failures)
    assert w.store.bytes_live == w.store.num_rows == 0


def test_an_environment_that_always_fails_ends_the_run() -> None:
    w = playing(world(), lambda request: failure())
    with pytest.raises(RewardsFailed, match=r"8 groups in a row .* 'game': no server"):
        run_in_virtual_time(w.run())
