"""The controller with graphs of several models: their inputs and timing, over deaths too."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlsys.algorithms.advantages import remax_advantage
from rlsys.algorithms.group_functions import dynamic_sampling
from rlsys.common.user_functions import FunctionFailed
from rlsys.config import (
    AsyncConfig,
    DataConfig,
    RoleConfig,
    TrainedRoleConfig,
    TrainerConfig,
)
from rlsys.controller.failures import RewardsFailed
from rlsys.controller.simulation.simulated_workers import (
    SimulatedPool,
    SimulatedPrompts,
    SimulatedScorer,
    SimulatedTrainer,
    exponential,
)
from rlsys.controller.simulation.virtual_time import run_in_virtual_time
from rlsys.controller.state import OpenWork
from rlsys.controller.trainer_group import TrainerGroup
from rlsys.controller.worker_protocols import (
    ReportScores,
    RolloutMetadata,
    ScoreTask,
    StepRowsRef,
    Written,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import IS_GREEDY, NUM_TOKENS, PREFERENCE, Prompts
from rlsys.dataflow.scheduling.ledger import Ledger
from rlsys.rewards import RewardFailure, RewardResult, reward
from rlsys.types import Completion, Prompt, StepResult
from tests.controller.test_controller import World, center, config, no_loss, world
from tests.errors import error_about, invalid
from tests.tiers import examples


def test_no_two_metrics_of_a_step_have_one_name() -> None:
    """The metrics of a loss are known after the first step only."""

    def told(**metrics: dict[str, float]) -> dict[str, float]:
        trainer_proxies = TrainerGroup(
            {name: SimulatedTrainer() for name in metrics}, main="policy", means={"margin/mean"}
        )
        empty = StepResult(policy_version=1, num_tokens=1, train_s=0.0, metrics={})
        results = [dataclasses.replace(empty, metrics=own) for own in metrics.values()]
        return trainer_proxies.merge_results(results).metrics

    own, critics = {"loss": 1.0, "my/x": 2.0}, {"loss": 3.0}
    assert told(policy=own, critic=critics) == {**own, "critic/loss": 3.0}
    with invalid("metrics of a loss", ["critic/loss"]):
        told(policy={**own, "critic/loss": 1.0}, critic=critics)
    with invalid("metrics of a loss", ["margin/mean"]):
        told(policy={**own, "margin/mean": 7.0})
    with invalid("metrics of a loss", ["margin/mean"]):
        told(policy=own, margin={"mean": 7.0})


@pytest.mark.parametrize("num_turns", range(12))
def test_a_group_that_is_dropped_as_a_model_is_given_its_rows(num_turns: int) -> None:
    """One rollout's reward fails in the same turn of the event loop in which the other ends."""

    class Scorer(SimulatedScorer):
        async def score(self, tasks: Sequence[ScoreTask], tell: ReportScores) -> None:
            for task in tasks:
                if (task.group_id, task.index) == (0, 0):
                    await asyncio.sleep(1.0)
                    for _ in range(num_turns):
                        await asyncio.sleep(0)
            await super().score(tasks, tell)

    def outcome(task: ScoreTask) -> RewardResult | RewardFailure:
        if (task.group_id, task.index) == (0, 0):
            return RewardFailure(kind="exception", reward="r", message="it broke")
        return RewardResult(total=0.0, components={})

    w = world(num_steps=1)
    latencies = iter([1.0, 2.0])
    w.replicas[0].latency_s = lambda: next(latencies, 5.0)
    w.scorer = Scorer(outcome=outcome)
    w.dataflow = flow = Dataflow()
    policy, judge = flow.model("policy"), flow.model("judge", RoleConfig(), head="score")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=2)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    score = flow.infer(judge, rollouts, writes="score")
    advantages = flow.per_group(center, score)
    flow.train(policy, rollouts, advantages, loss=no_loss, aggregation=no_loss, watch=[reward])
    w.pools = {"judge": SimulatedPool(writes="score")}
    run_in_virtual_time(w.run())
    assert w.ledger.drop_reasons == {"reward exception": 1}
    assert w.ledger.num_trained == 4


class critic_loss:
    needs = ("returns", "values")

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("the learner is a fake")


def four_models(group_size: int) -> Dataflow:
    """PPO's graph: the policy, a critic, a reference and a reward model."""
    flow = Dataflow()
    policy = flow.model("policy")
    critic = flow.model("critic", TrainedRoleConfig(), head="value")
    reference = flow.model("reference", RoleConfig())
    judge = flow.model("judge", RoleConfig(), head="score")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=group_size)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    score = flow.infer(judge, rollouts, writes="score")
    centered = flow.per_group(center, score, name="centered")
    logprobs = flow.infer(reference, rollouts, writes="reference_logprobs")
    values = flow.infer(critic, rollouts, writes="values")
    advantages, returns = flow.per_batch(
        token_advantages,
        centered,
        logprobs,
        values,
        writes=("advantages", "returns"),
        per="token",
    )
    flow.train(
        policy, rollouts, advantages, loss=no_loss, aggregation=no_loss, watch=[reward, score]
    )
    flow.train(critic, rollouts, returns, values, loss=critic_loss(), aggregation=no_loss)
    flow.check()
    return flow


def token_advantages(
    scores: torch.Tensor, logprobs: torch.Tensor, values: torch.Tensor, row_offsets: torch.Tensor
) -> Any:
    raise AssertionError("computed by the learner, which is a fake")


class Reference(SimulatedPool):
    """A pool that writes a token per row, like a trainer."""

    async def run(self, rows: Any) -> Any:
        await super().run(rows)
        return SimulatedTrainer._write(SimulatedTrainer(), self.writes, rows)


def with_four_models(w: World, rng: random.Random, *, losing: float = 0.0) -> World:
    w.dataflow = four_models(w.config.group_size)
    w.others = {"critic": SimulatedTrainer(num_data=2, row_s=0.05, restart_s=2.0)}

    def loses() -> bool:
        return rng.random() < losing

    w.pools = {
        "judge": SimulatedPool(writes="score", latency_s=exponential(rng, 0.3), losing=loses),
        "reference": Reference(
            writes="reference_logprobs", latency_s=exponential(rng, 0.3), losing=loses
        ),
    }
    return w


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 3),
    losing=st.sampled_from([0.0, 0.2]),
    deaths=st.integers(0, 3),
    loses=st.integers(0, 2),
)
def test_all_models_train_the_same_steps_on_the_same_rows(
    seed: int, max_staleness: int, losing: float, deaths: int, loses: int
) -> None:
    rng = random.Random(seed)
    w = world(seed, num_replicas=2, asynchrony=AsyncConfig(max_staleness=max_staleness))
    w = with_four_models(w, rng, losing=losing)
    critic = w.others["critic"]

    async def kill(w: World) -> None:
        for _ in range(deaths):
            await asyncio.sleep(rng.uniform(0, 8))
            victim = rng.choice([w.trainer_proxy, critic])
            victim.loses = rng.randint(0, loses)
            victim.die()

    w.chaos = kill
    run_in_virtual_time(w.run())
    steps = w.config.num_steps
    assert len(w.observer.steps) == w.trainer_proxy.version == critic.version == steps
    for ours, theirs in zip(w.trainer_proxy.trained[:steps], critic.trained[:steps], strict=True):
        assert groups(ours) == groups(theirs)
        assert sum(map(len, ours)) == sum(map(len, theirs)) == w.config.rollouts_per_step
        for rows in ours:
            assert set(rows.cells) == {*ROLLOUT, "advantages"} or not len(rows)
        for rows in theirs:
            assert set(rows.cells) == {*ROLLOUT, "returns", "values"} or not len(rows)
    assert max(w.observer.staleness) <= max_staleness
    assert w.store.bytes_live == w.store.num_rows == 0
    # Nothing is kept, of steps either.
    assert not w.store.live_rows("shard")


ROLLOUT = ("prompt_token_ids", "token_ids", "sampler_logprobs", "policy_versions")


def groups(step: list[Any]) -> set[int]:
    return {group_id for rows in step for group_id in rows.group_ids}


def test_values_are_those_of_the_steps_beginning() -> None:
    w = with_four_models(world(num_replicas=1), random.Random(0))
    run_in_virtual_time(w.run())
    inferred = [(what, version) for what, version, _ in w.others["critic"].inferred]
    # Two ranks, each with a share.
    assert inferred == [("values", step) for step in range(4) for _ in range(2)]
    metrics = w.observer.steps[0].columns
    assert {name for columns in metrics.values() for name in columns} >= {"score", "reward"}


def test_several_updates_share_a_step() -> None:
    trainer = TrainerConfig(num_minibatches=2, num_epochs=3, micro_batch_tokens=16)
    w = world(num_replicas=1, trainer=trainer, asynchrony=AsyncConfig(max_staleness=11))
    run_in_virtual_time(w.run())
    assert (w.trainer_proxy.version, w.trainer_proxy.updates) == (4, 24)
    assert [sum(map(len, step)) for step in w.trainer_proxy.trained[:4]] == [3 * 8] * 4
    for step in w.trainer_proxy.trained[:4]:
        for epoch in range(3):
            of_epoch = step[4 * epoch : 4 * epoch + 4]  # two updates of two passes each
            assert [len(rows) for rows in of_epoch] == [2] * 4
            assert len(groups(of_epoch)) == 4
    assert max(w.observer.staleness) <= 1  # versions: (11 + 1) / 6 - 1
    # Their ratios are to the policy at the beginning of the step, not of each update.
    assert [(what, version) for what, version, _ in w.trainer_proxy.inferred] == [
        ("proximal_logprobs", step) for step in range(4)
    ]
    assert all(
        "proximal_logprobs" in rows.cells for step in w.trainer_proxy.trained[:4] for rows in step
    )


def test_a_bound_that_a_steps_own_updates_break_is_refused() -> None:
    with invalid("asynchrony.max_staleness", 4) as found:
        config(
            trainer=TrainerConfig(num_minibatches=2, num_epochs=3),
            asynchrony=AsyncConfig(max_staleness=4),
        )
    assert " 6 updates" in found.value.rule
    assert " 5," in found.value.fix


def test_a_refused_group_is_replaced() -> None:
    def refuse_some(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        assert lengths.tolist() == [3.0, 3.0]
        refused.append(len(refused))
        return None if len(refused) % 2 else center(rewards)

    refused: list[int] = []
    w = world(num_replicas=1)
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=2)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    advantages = flow.per_group(refuse_some, reward, NUM_TOKENS)
    flow.train(policy, rollouts, advantages, loss=no_loss, aggregation=no_loss)
    w.dataflow = flow
    run_in_virtual_time(w.run())
    assert [sum(map(len, step)) for step in w.trainer_proxy.trained[:4]] == [8] * 4
    assert w.ledger.drop_reasons["refused"] == 16
    assert len(w.observer.refused) == 16
    assert all(group["num_tokens"] == [3, 3] for group in w.observer.refused)
    assert all(len(group["reward"]) == 2 for group in w.observer.refused)


def remax() -> Dataflow:
    """Groups of two: one sampled, one greedy."""
    flow = Dataflow()
    policy = flow.model("policy")
    prompts = Prompts(config=DataConfig())
    rollouts = flow.generate(policy, prompts, group_size=2, greedy_baseline=True)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    advantages = flow.per_group(remax_advantage, reward, IS_GREEDY)
    flow.train(policy, rollouts, advantages, loss=no_loss, aggregation=no_loss)
    flow.check()
    return flow


def greedy_of(names: Iterable[str]) -> list[str]:
    """Return the index in a request id "group.index.attempt"."""
    return [name for name in names if name.split(".")[1] == "1"]


@pytest.mark.parametrize("dies", [False, True])
def test_the_last_of_each_group_is_greedy_over_deaths_too(dies: bool) -> None:
    """Its reward is the baseline, and none of its tokens count as trained."""
    w = world(num_replicas=2)
    w.dataflow = remax()
    w.scorer = SimulatedScorer(
        outcome=lambda task: RewardResult(total=float(task.index == 0), components={})
    )
    if dies:
        w.replicas[0].dies_after = 5
        w.trainer_proxy.step_s = 1.0
    run_in_virtual_time(w.run())
    replicas = [*w.replicas, *w.fleet.started_workers]
    for replica in replicas:
        assert replica.greedy == greedy_of(replica.submitted)
    if dies:
        assert w.observer.deaths == ["rollout-0"]
        again = Counter(name for replica in replicas for name in replica.submitted)
        assert greedy_of(name for name, count in again.items() if count > 1)
    assert len(w.observer.steps) == 4
    for step in w.observer.steps:
        for group in step.groups:
            columns = step.columns[group.group_id]
            assert columns["advantages"] == [1.0, 0.0]
            assert [note.is_greedy for note in group.rollouts] == [False, True]
            assert group.num_trained_tokens() == 3
            assert group.of_trained(columns["reward"]) == [1.0]
    for rows in itertools.chain.from_iterable(w.trainer_proxy.trained):
        assert set(rows.group_num_tokens) == {3}


def test_what_a_checkpoint_has_of_greedy_rollouts_stays_greedy() -> None:
    w = world(num_steps=4, checkpoint_every=2, asynchrony=AsyncConfig(max_staleness=2))
    w.dataflow = remax()
    events: list[dict[str, Any]] = []
    w.ledger = Ledger(events.append, groups_per_step=4)
    w.trainer_proxy.step_s = 2.0
    run_in_virtual_time(w.run())
    work = w.saved[0]
    assert greedy_of(rollout.request_id for rollout in work.finished)
    assert greedy_of(part.request_id for part in work.parts)
    at_crash = next(i for i, e in enumerate(events) if e.get("step") == 3)
    later = world(1, num_steps=4, asynchrony=AsyncConfig(max_staleness=2))
    later.dataflow = remax()
    later.ledger = Ledger.replay(events[:at_crash], events.append, groups_per_step=4)
    later.ledger.resume(step=2)
    open_ids = {group.group_id for group in later.ledger.open_groups}
    later.carried = dataclasses.replace(work, nodes=dict.fromkeys(open_ids, "node"))
    later.first_step = later.trainer_proxy.version = later.observer.first_step = 2
    run_in_virtual_time(later.run())
    (replica,) = later.replicas
    assert greedy_of(replica.continued)
    assert replica.greedy == greedy_of(replica.submitted)
    for step in later.observer.steps:
        for group in step.groups:
            assert [note.is_greedy for note in group.rollouts] == [False, True]
            assert group.num_trained_tokens() == 3


def test_an_advantage_of_ones_own_as_the_page_shows_it() -> None:
    """Run the block of docs/algorithms.md to its end."""
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*def best_only.*?)```", page, re.DOTALL)
    w = world()
    w.dataflow = flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=2)
    names: dict[str, Any] = {"torch": torch, "flow": flow}
    names["reward"] = flow.score(rollouts, [lambda rollout: 0.0])
    exec(block, names)
    flow.train(policy, rollouts, names["advantage"], loss=no_loss, aggregation=no_loss)
    run_in_virtual_time(w.run())
    assert w.ledger.num_trained == 4 * 4
    for step in w.observer.steps:
        for columns in step.columns.values():
            assert (columns["reward"], columns["advantages"]) == ([0.0, 1.0], [0.0, 1.0])


def test_a_function_over_tokens_is_sent_their_versions_besides() -> None:
    """The function gets a mask without the tokens marked INJECTED."""
    sent: list[set[str]] = []

    class Noting(SimulatedTrainer):
        async def compute(self, stage: str, rows: StepRowsRef) -> Written:
            sent.append(set(rows.cells))
            return await super().compute(stage, rows)

    w = with_four_models(world(num_replicas=1), random.Random(0))
    w.trainer_proxy = Noting()
    run_in_virtual_time(w.run())
    assert sent == [{"reference_logprobs", "values", "policy_versions"}] * w.config.num_steps


def over_groups(flow: Dataflow, function: Any, reward: Any) -> Any:
    return flow.per_group(function, reward)


def over_the_step(flow: Dataflow, function: Any, reward: Any) -> Any:
    return flow.per_batch(function, reward)[0]


def raising(rewards: torch.Tensor) -> torch.Tensor:
    raise KeyError("difficulty")


def dividing(rewards: torch.Tensor) -> torch.Tensor:
    return rewards / (rewards - rewards)


@pytest.mark.parametrize("over", [over_groups, over_the_step])
@pytest.mark.parametrize(
    ("function", "names"),
    [
        (raising, ("'advantages'", "raising", "KeyError: 'difficulty'")),
        (dividing, ("'advantages'", "dividing", "[nan, inf")),
    ],
)
def test_an_advantage_that_fails_ends_the_run_with_its_name(
    over: Any, function: Any, names: tuple[str, ...]
) -> None:
    w = world(num_replicas=1)
    w.dataflow = flow = Dataflow()
    rollouts = flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    advantages = over(flow, function, reward)
    flow.train(flow.main, rollouts, advantages, loss=no_loss, aggregation=no_loss)
    with error_about(FunctionFailed, *names):
        run_in_virtual_time(w.run())


def test_a_coefficient_that_is_no_number_ends_the_run_with_its_name() -> None:
    @dataclasses.dataclass(frozen=True)
    class growing(counting):
        def next(self, coefficient: float, divergence: float) -> float:
            return math.inf

    w = with_control(world(num_steps=4), [], growing())
    with error_about(FunctionFailed, "'kl_coefficient': growing(", ").next(1.0, 0.5)"):
        run_in_virtual_time(w.run())


def test_a_function_over_the_step_sees_all_its_rows() -> None:
    seen: list[tuple[int, list[int]]] = []

    def whitened(rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        seen.append((len(rewards), group_index.tolist()))
        return rewards - rewards.mean()

    w = world(num_replicas=1, prompts_per_step=4)
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=2)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    (advantages,) = flow.per_batch(whitened, reward)
    flow.train(policy, rollouts, advantages, loss=no_loss, aggregation=no_loss)
    w.dataflow = flow
    run_in_virtual_time(w.run())
    assert seen == [(8, [0, 0, 1, 1, 2, 2, 3, 3])] * 4
    assert [x for rows in w.trainer_proxy.trained[0] for x in rows.scalars["advantages"]] == [
        -0.5,
        0.5,
    ] * 4


class HeldPrompts(SimulatedPrompts):
    """Prompts with a pair of completions each."""

    def at(self, index: int) -> Prompt:
        pair = (
            Completion(text="right", token_ids=(1, 2, 3)),
            Completion(text="no", token_ids=(2,)),
        )
        return dataclasses.replace(super().at(index), completions=pair)


class Unpublished(SimulatedTrainer):
    """A reward model, whose weights no replica loads."""

    async def publish(self) -> Any:
        raise AssertionError("published")


class of_pairs:
    needs = ("preference",)
    uses_advantages = False

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("the learner is a fake")


class needs_preference:
    needs = ("preference",)

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("the learner is a fake")


def test_a_stage_tells_the_better_one_of_two_samples() -> None:
    w = world(group_size=2)
    w.dataflow = flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=2)
    preference = flow.per_group(
        lambda num_tokens: torch.tensor([-1.0, 1.0]), NUM_TOKENS, name="preference"
    )
    flow.train(policy, rollouts, preference, loss=of_pairs(), aggregation=no_loss)
    run_in_virtual_time(w.run())
    assert w.trainer_proxy.version == 4
    for step in w.trainer_proxy.trained:
        for rows in step:
            assert list(rows.scalars["preference"]) == [-1, 1] * (len(rows) // 2)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 2),
    deaths=st.integers(0, 3),
    loses=st.integers(0, 2),
)
def test_pairs_of_a_dataset_train_a_model_that_nobody_samples_with(
    seed: int, max_staleness: int, deaths: int, loses: int
) -> None:
    rng = random.Random(seed)
    w = world(seed, num_replicas=2, asynchrony=AsyncConfig(max_staleness=max_staleness))
    w.prompts, w.trainer_proxy = HeldPrompts(), Unpublished(row_s=0.1)
    w.dataflow = flow = Dataflow()
    judge = flow.model("judge", head="score")
    pairs = flow.dataset(Prompts(config=DataConfig()), group_size=2)
    flow.train(judge, pairs, PREFERENCE, loss=needs_preference(), aggregation=no_loss)
    flow.check()

    async def kill(w: World) -> None:
        for _ in range(deaths):
            await asyncio.sleep(rng.uniform(0, 8))
            w.trainer_proxy.loses = rng.randint(0, loses)
            w.trainer_proxy.die()

    w.chaos = kill
    run_in_virtual_time(w.run())
    assert len(w.observer.steps) == w.trainer_proxy.version == 4
    for step in w.trainer_proxy.trained[:4]:
        for rows in step:
            assert set(rows.cells) == {*ROLLOUT} - {"sampler_logprobs"} or not len(rows)
            assert list(rows.scalars["preference"]) == [1, -1] * (len(rows) // 2)
    assert max(w.observer.staleness) <= max_staleness
    assert w.store.bytes_live == w.store.num_rows == 0
    texts = [
        note.text
        for step in w.observer.steps
        for group in step.groups
        for note in group.rollouts
        if note.text is not None
    ]
    # One group of each step is recorded, at every time that the step was trained.
    assert [text.completion for text in texts] == ["right", "no"] * (len(texts) // 2)
    assert len(texts) >= 4


@pytest.mark.parametrize("stage", ["infer", "score", "judge", "per_group"])
def test_sampled_rollouts_are_recorded_whatever_scores_them(stage: str) -> None:
    """One group of each step is recorded, whenever the step is trained."""
    w = world(num_replicas=1)
    w.dataflow = flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=2)
    value: Any = NUM_TOKENS
    if stage == "score":
        value = flow.score(rollouts, [lambda rollout: 0.0])
    elif stage != "per_group":
        judge = flow.model("judge", RoleConfig(), head="score" if stage == "infer" else "logits")
        w.pools = {"judge": SimulatedPool(writes="score")}
        if stage == "infer":
            value = flow.infer(judge, rollouts, writes="score")
        else:
            value = flow.judge(judge, rollouts, ask=lambda rollout: "", parse=lambda reply: 0.0)
    advantages = flow.per_group(center, value)
    flow.train(policy, rollouts, advantages, loss=no_loss, aggregation=no_loss)
    run_in_virtual_time(w.run())
    for step in w.observer.steps:
        recorded = {
            (group.group_id, note.index): note.text
            for group in step.groups
            for note in group.rollouts
            if note.text is not None
        }
        groups = [g.group_id for g in step.groups if g.group_id % w.config.prompts_per_step == 0]
        assert recorded.keys() == {(group, index) for group in groups for index in range(2)}
        for (group_id, index), text in recorded.items():
            assert text.prompt == "?"
            assert text.completion.startswith(f"{group_id}.{index}.")


def test_an_advantage_of_lengths_alone_is_computed() -> None:
    w = world(num_replicas=1)
    w.dataflow = flow = Dataflow()
    rollouts = flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)
    shortness = flow.per_group(center, NUM_TOKENS, name="shortness")
    (advantages,) = flow.per_batch(
        lambda *columns: sum(map(center, columns)), shortness, NUM_TOKENS
    )
    flow.train(flow.main, rollouts, advantages, loss=no_loss, aggregation=no_loss)
    flow.check()
    run_in_virtual_time(w.run())
    assert [x for rows in w.trainer_proxy.trained[0] for x in rows.scalars["advantages"]] == [
        0.0
    ] * 8


@dataclasses.dataclass(frozen=True)
class counting:
    """A controller whose value encodes its history: ten times the last value plus the input."""

    initial: float = 1.0

    def next(self, coefficient: float, divergence: float) -> float:
        return 10 * coefficient + divergence


def with_control(w: World, seen: list[list[float]], controller: Any = counting()) -> World:
    def noted(rewards: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
        seen.append(sorted(set(coefficient.tolist())))
        return rewards

    flow = Dataflow()
    policy = flow.model("policy")
    prompts = Prompts(config=DataConfig())
    rollouts = flow.generate(policy, prompts, group_size=w.config.group_size)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    coefficient = flow.control(controller, reward)
    advantages = flow.per_batch(noted, reward, coefficient)
    flow.train(policy, rollouts, *advantages, loss=no_loss, aggregation=no_loss)
    flow.check()
    w.dataflow = flow
    return w


def test_a_coefficient_is_set_by_each_step_for_the_next_and_a_checkpoint_has_it() -> None:
    seen: list[list[float]] = []
    w = with_control(world(num_steps=4, checkpoint_every=2), seen)  # rewards 0 and 1: mean 0.5
    run_in_virtual_time(w.run())
    assert seen == [[1.0], [10.5], [105.5], [1055.5]]
    assert [work.coefficients for work in w.saved] == [
        {"kl_coefficient": 105.5},
        {"kl_coefficient": 10555.5},
    ]


def test_a_resumed_run_goes_on_with_its_coefficient() -> None:
    seen: list[list[float]] = []
    w = with_control(world(num_steps=4), seen)
    w.first_step = w.observer.first_step = 2
    for step in (1, 2):
        for group in range(4 * (step - 1), 4 * step):
            w.ledger.issue(group, prompt_index=group, version=step - 1)
        w.ledger.train(dict.fromkeys(range(4 * (step - 1), 4 * step), step - 1), step=step)
    w.carried = OpenWork(coefficients={"kl_coefficient": 105.5})
    w.trainer_proxy.version = w.replicas[0].version = 2
    run_in_virtual_time(w.run())
    assert seen == [[105.5], [1055.5]]


def test_steps_that_are_trained_again_have_the_coefficient_that_they_had() -> None:
    seen: list[list[float]] = []
    w = with_control(world(num_steps=4), seen)
    w.trainer_proxy.loses = 1

    async def chaos(w: World) -> None:
        await asyncio.sleep(4.0)  # two steps are trained by then
        w.trainer_proxy.die()

    w.chaos = chaos
    run_in_virtual_time(w.run())
    assert w.trainer_proxy.deaths == 1
    assert len(seen) > 4
    assert {tuple(step) for step in seen} == {(1.0,), (10.5,), (105.5,), (1055.5,)}
    assert seen[-2:] == [[105.5], [1055.5]]


def test_control_wants_a_controller_and_one_value_per_row() -> None:
    flow = Dataflow()
    rollouts = flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)
    reward = flow.score(rollouts, [lambda rollout: 0.0])
    with invalid("flow.control: controller", 0.05):
        flow.control(0.05, reward)  # type: ignore[arg-type]
    with invalid("flow.control: column", rollouts[2].name):
        flow.control(counting(), rollouts[2])


def test_parts_of_a_reward_have_columns_of_their_own() -> None:
    """One function refuses groups, and the other's column is trained on."""
    rng = random.Random(0)
    w = world(num_replicas=1)
    w.scorer.outcome = lambda task: RewardResult(
        total=-1.0,
        components={"right": float(rng.random() < 0.5), "shape/form": float(task.index)},
    )
    refusing = dynamic_sampling(center, by_last_column=True)
    w.dataflow = flow = Dataflow()
    rollouts = flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)
    total, right, form = flow.score(
        rollouts,
        [reward(name="right")(lambda _: 0.0), reward(name="shape")(lambda _: {"form": 0.0})],
        parts=["right", "shape/form"],
    )
    advantages = flow.per_group(refusing, form, right)
    flow.train(
        flow.models["policy"],
        rollouts,
        advantages,
        loss=no_loss,
        aggregation=no_loss,
        watch=[total, right],
    )
    run_in_virtual_time(w.run())
    assert len(w.observer.steps) == 4
    for step in w.observer.steps:
        for group in step.groups:
            columns = step.columns[group.group_id]
            assert sorted(columns["right"]) == [0, 1]  # the others are refused
            assert list(columns["reward"]) == [-1, -1]
            assert list(columns["advantages"]) == [-0.5, 0.5]
    assert w.ledger.num_dropped > 0


def test_a_part_that_a_rollout_lacks_ends_the_run() -> None:
    w = world(num_replicas=1)
    w.scorer.outcome = lambda task: RewardResult(total=0.0, components={"shape": 1.0})
    w.dataflow = flow = Dataflow()
    rollouts = flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)
    total, form = flow.score(
        rollouts, [reward(name="shape")(lambda _: {"form": 0.0})], parts=["shape/form"]
    )
    advantages = flow.per_group(center, form)
    flow.train(flow.main, rollouts, advantages, loss=no_loss, aggregation=no_loss, watch=[total])
    with invalid("flow.score: parts", "shape/form"):
        run_in_virtual_time(w.run())


def judged(w: World, pool: SimulatedPool) -> World:
    """Score groups with a judge only."""
    w.dataflow = flow = Dataflow()
    policy, judge = flow.model("policy"), flow.model("judge", RoleConfig())
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=w.config.group_size)
    score = flow.judge(judge, rollouts, ask=lambda rollout: "", parse=lambda reply: 0.0)
    advantages = flow.per_group(center, score)
    flow.train(policy, rollouts, advantages, loss=no_loss, aggregation=no_loss)
    flow.check()
    w.pools = {"judge": pool}
    return w


def no_score(kind: Any) -> RewardFailure:
    return RewardFailure(kind=kind, reward="score", message="no score in the reply")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_staleness=st.integers(0, 2),
    losing=st.sampled_from([0.0, 0.2]),
    failing=st.sampled_from([0.1, 0.3]),
)
@example(seed=2231, max_staleness=1, losing=0.2, failing=0.3)
def test_a_row_that_a_judge_refuses_drops_its_group(
    seed: int, max_staleness: int, losing: float, failing: float
) -> None:
    """Other rows of the same call may do anything; the ledger raises if a group ends twice."""
    rng = random.Random(seed)
    asked: list[RolloutMetadata] = []
    hopeless: set[int] = set()

    def failure(origin: RolloutMetadata) -> RewardFailure | None:
        asked.append(origin)
        if origin.index == 1 and rng.random() < failing:
            hopeless.add(origin.group_id)
            return no_score("reply")
        return None

    pool = SimulatedPool(
        writes="score",
        latency_s=exponential(rng, 0.3),
        losing=lambda: rng.random() < losing,
        failure=failure,
    )
    w = world(seed, num_replicas=2, asynchrony=AsyncConfig(max_staleness=max_staleness))
    run_in_virtual_time(judged(w, pool).run())
    trained = {g for step in w.trainer_proxy.trained for rows in step for g in rows.group_ids}
    assert len(trained) == w.ledger.num_trained == 16
    assert not trained & hopeless
    assert w.ledger.drop_reasons["reward reply"] <= len(hopeless) <= len(w.observer.failures)
    assert {(origin.prompt_text, origin.finish_reason) for origin in asked} == {("?", "stop")}
    # Of a dropped group, what a call has read stays until that ends, or until rows that it has lost
    # are read again; the run may end before.
    assert w.store.num_rows <= len(hopeless)
    assert (w.store.bytes_live > 0) == (w.store.num_rows > 0)


def test_a_judge_that_always_refuses_ends_the_run() -> None:
    w = judged(world(), SimulatedPool(writes="score", failure=lambda origin: no_score("question")))
    with error_about(RewardsFailed, "8 groups", "'score'"):
        run_in_virtual_time(w.run())


def test_a_judge_that_refuses_one_in_every_group_ends_the_run() -> None:
    def failure(origin: RolloutMetadata) -> RewardFailure | None:
        return no_score("question") if origin.index == 0 else None

    w = judged(world(), SimulatedPool(writes="score", failure=failure))
    with error_about(RewardsFailed, "8 groups", "'score'"):
        run_in_virtual_time(w.run())


def test_nothing_of_their_texts_travels_to_other_models() -> None:
    w = with_four_models(world(num_replicas=1), random.Random(0))
    told: list[int] = []

    class Noting(SimulatedPool):
        async def run(self, rows: Any) -> Any:
            told.append(len(rows.origins))
            return await super().run(rows)

    w.pools = {**w.pools, "judge": Noting(writes="score")}
    run_in_virtual_time(w.run())
    assert told
    assert not any(told)
