"""Simulated runs: times by hand, and what must hold for every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsys
from rlsys.config import (
    AsyncConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import Prompts
from rlsys.dataflow.scheduling.microbatch_plan import GroupLengths
from rlsys.planner.simulate import ReplicaModel, SimulationResult, TrainerModel, Work, simulate
from rlsys.types import GenerationRequest

GROUPS, GROUP_SIZE, PROMPT = 4, 2, 10


@dataclass(frozen=True, kw_only=True)
class Costs:
    """One second per decode step and 0.1 s per trained token."""

    load_s: float = 0.0
    token_s: float = 0.1
    optimizer_s: float = 1.0
    publish_s: float = 0.5
    release_s: float = 0.0

    def decode_step_s(self, num_sequences: int, context_tokens: float) -> float:
        return 1.0

    def prefill_s(self, num_tokens: int) -> float:
        return 0.0

    def train_s(self, groups: Sequence[GroupLengths]) -> float:
        return self.token_s * sum(one.prompt + sum(one.completions) for one in groups)

    def infer_s(self, groups: Sequence[GroupLengths]) -> float:
        return self.train_s(groups) / 3


def center(rewards: torch.Tensor) -> torch.Tensor:
    return rewards - rewards.mean()


def never_called(*_: Any) -> Any:
    raise AssertionError("the workers are simulated")


def grpo() -> Dataflow:
    flow = Dataflow()
    policy = flow.model("policy")
    rollouts = flow.generate(policy, Prompts(config=DataConfig()), group_size=GROUP_SIZE)
    reward = flow.score(rollouts, [never_called])
    advantage = flow.per_group(center, reward)
    flow.train(policy, rollouts, advantage, loss=never_called, aggregation=never_called)
    return flow


@rlsys.environment
async def game(chat: Any, task: Any) -> float:
    raise AssertionError("the workers are simulated")


def playing() -> Dataflow:
    flow = Dataflow()
    policy = flow.model("policy")
    prompts = Prompts(config=DataConfig())
    episodes = flow.play(policy, game, prompts, group_size=GROUP_SIZE, parts=("bonus",))
    advantage = flow.per_group(center, episodes.reward)
    flow.train(
        policy,
        episodes.rollouts,
        advantage,
        loss=never_called,
        aggregation=never_called,
        watch=episodes.parts,
    )
    return flow


def run(
    asynchrony: AsyncConfig,
    *,
    flow: Dataflow | None = None,
    tools_s: Sequence[float] = (),
    reward_s: float = 0.0,
    controller_s: float = 0.0,
    other_s: float = 0.0,
    num_cores: float = math.inf,
    costs: Costs | None = None,
    num_replicas: int = 1,
    num_steps: int = 6,
    placement: Any = "separate",
    cache_tokens: int = 1 << 20,
    lengths: Sequence[int] = (20,),
    borrow: int = 0,
) -> SimulationResult:
    costs = costs or Costs()

    def length(request: GenerationRequest) -> int:
        group_id, index, _ = map(int, request.request_id.split("."))
        return lengths[(group_id * GROUP_SIZE + index) % len(lengths)]

    return simulate(
        RunConfig(
            num_steps=num_steps,
            prompts_per_step=GROUPS,
            group_size=GROUP_SIZE,
            asynchrony=asynchrony,
            placement=placement,
            rollout=RolloutConfig(num_replicas=num_replicas, borrow=borrow),
            trainer=TrainerConfig(micro_batch_tokens=1 << 20),
        ),
        flow or grpo(),
        replica=ReplicaModel(costs=costs, cache_tokens=cache_tokens, max_running=1 << 20),
        trainers={"policy": TrainerModel(costs=costs)},
        work=Work(
            prompt_tokens=lambda index: PROMPT,
            completion_tokens=length,
            reward_s=lambda: reward_s,
            tools_s=lambda request: tools_s,
            controller_s=controller_s,
            other_s=other_s,
        ),
        num_cores=num_cores,
    )


SEQUENTIAL = AsyncConfig(max_staleness=0, stream=False)


def test_a_synchronous_step_is_generation_then_training_then_the_new_weights() -> None:
    result = run(SEQUENTIAL, costs=Costs(load_s=0.25))
    tokens = GROUPS * (PROMPT + GROUP_SIZE * 20)
    assert result.step_s == pytest.approx([20 + 0.1 * tokens + 1.0 + 0.5 + 0.25] * 4)
    assert result.trained_tokens == [GROUPS * GROUP_SIZE * 20] * 4
    assert set(result.staleness) == {0}


def test_time_limits_of_calls_do_not_end_a_slow_plan() -> None:
    """Rollouts of 3,000 s, and micro-batches of 100 s per token, beyond cluster.call_timeout_s."""
    result = run(SEQUENTIAL, costs=Costs(token_s=100.0), lengths=[3000])
    tokens = GROUPS * (PROMPT + GROUP_SIZE * 3000)
    assert result.step_s == pytest.approx([3000 + 100 * tokens + 1.0 + 0.5] * 4)


def test_an_asynchronous_step_takes_as_long_as_its_slower_half() -> None:
    tokens = GROUPS * (PROMPT + GROUP_SIZE * 20)
    slow_training = run(AsyncConfig(max_staleness=2), num_steps=12)
    assert slow_training.step_s[-1] == pytest.approx(0.1 * tokens + 1.0 + 0.5, rel=0.02)
    assert slow_training.trainer_busy > 0.9
    slow_generation = run(AsyncConfig(max_staleness=2), costs=Costs(token_s=0.001), num_steps=12)
    assert slow_generation.mean_step_s < 20.0  # two versions are sampled at once
    assert slow_generation.generation_busy > 0.85


def test_a_small_cache_serialises_generation() -> None:
    fits_all = run(SEQUENTIAL)
    fits_one_group = run(SEQUENTIAL, cache_tokens=PROMPT + 2 * 20 + 2)
    assert fits_one_group.num_preempted > 0
    # 52 tokens at a time; the groups need 4 * 50, each token for at least one of 20 steps.
    assert fits_one_group.mean_step_s > fits_all.mean_step_s + 20


def test_shared_devices_give_the_synchronous_time() -> None:
    costs = Costs(load_s=0.25)
    shared = run(AsyncConfig(max_staleness=0, stream=False), costs=costs, placement="colocated")
    assert shared.mean_step_s == pytest.approx(run(SEQUENTIAL, costs=costs).mean_step_s)


def test_borrowed_replicas_share_what_does_not_fit_into_one_cache() -> None:
    # One replica samples two groups at a time: two rounds of 20 s. Two replicas need one round.
    cache_tokens, costs = 2 * (PROMPT + 2 * 20) + 4, Costs(token_s=0.02, load_s=0.25)
    alone = run(SEQUENTIAL, costs=costs, cache_tokens=cache_tokens, num_steps=8)
    lent = run(SEQUENTIAL, costs=costs, cache_tokens=cache_tokens, num_steps=8, borrow=1)
    assert lent.mean_step_s < alone.mean_step_s - 10
    assert lent.num_hand_overs == 6  # after two measured steps
    assert lent.not_lent == {"not_measured": 2}
    assert lent.num_lent_rollouts >= 6 * 2


def test_lending_pauses_if_all_replicas_share_the_cores() -> None:
    costs = Costs(load_s=0.25)
    alone = run(SEQUENTIAL, costs=costs, num_cores=1, num_steps=40)
    lent = run(SEQUENTIAL, costs=costs, num_cores=1, num_steps=40, borrow=1)
    # Two replicas on one core take twice as long for a token each.
    assert lent.num_hand_overs == 3 + 2  # then pauses of 8, 16 and 32 steps
    assert lent.not_lent["no_gain"] > 30
    assert lent.mean_step_s < 1.07 * alone.mean_step_s


def test_the_longest_completion_decides_a_synchronous_step() -> None:
    result = run(SEQUENTIAL, lengths=[10, 10, 10, 10, 10, 10, 10, 90])
    tokens = GROUPS * PROMPT + 7 * 10 + 90
    assert result.mean_step_s == pytest.approx(90 + 0.1 * tokens + 1.5)


TRAINED_S = 0.1 * GROUPS * (PROMPT + GROUP_SIZE * 20) + 1.0 + 0.5


def test_an_episode_waits_for_its_tools_between_its_turns() -> None:
    plain = run(SEQUENTIAL, flow=playing())
    assert plain.step_s == pytest.approx([20 + TRAINED_S] * 4)
    with_tools = run(SEQUENTIAL, flow=playing(), tools_s=(5.0, 7.0))
    assert with_tools.step_s == pytest.approx([20 + 5 + 7 + TRAINED_S] * 4)
    assert with_tools.trained_tokens == plain.trained_tokens


def test_an_episode_shorter_than_its_turns_ends() -> None:
    result = run(SEQUENTIAL, flow=playing(), tools_s=(1.0,) * 9, lengths=[3])
    assert result.trained_tokens == [GROUPS * GROUP_SIZE * 3] * 4


def test_other_episodes_decode_while_one_waits() -> None:
    # two rollouts run at a time: while tools take 10 s, others use the engine
    bound = AsyncConfig(max_staleness=1)
    result = run(bound, flow=playing(), tools_s=(10.0,), costs=Costs(token_s=0.001), num_steps=12)
    assert result.mean_step_s < 20 + 10 + 2.5


def test_weights_change_while_episodes_wait_for_tools() -> None:
    result = run(AsyncConfig(max_staleness=2), flow=playing(), tools_s=(30.0,), num_steps=10)
    assert max(result.staleness) <= 2
    assert sum(result.staleness.values()) == (10 + 2) * GROUPS


def test_rewards_take_their_time() -> None:
    # one reward process: 8 rewards, one after the other
    result = run(SEQUENTIAL, reward_s=0.5)
    assert result.mean_step_s == pytest.approx(20 + 8 * 0.5 + TRAINED_S)


def test_the_controllers_process_receives_one_rollout_after_the_other() -> None:
    # the 8 rollouts of a step end together
    after = run(SEQUENTIAL, controller_s=0.25)
    assert after.mean_step_s == pytest.approx(20 + 8 * 0.25 + TRAINED_S)
    # it is the slowest part of a run that overlaps the others
    bound = AsyncConfig(max_staleness=1)
    slowest = run(bound, num_steps=12, controller_s=5.0)
    assert slowest.mean_step_s == pytest.approx(8 * 5.0, rel=0.15)


def test_nothing_waits_for_other_threads_that_need_a_core() -> None:
    # 8 rollouts of a step, 20 s of generation and the training of a step on one core
    spare = run(SEQUENTIAL, other_s=0.5, num_cores=2)
    assert spare.mean_step_s == pytest.approx(20 + TRAINED_S)
    shared = run(SEQUENTIAL, other_s=0.5, num_cores=1)
    assert shared.mean_step_s == pytest.approx(20 + TRAINED_S + 8 * 0.5)


def test_workers_share_one_core() -> None:
    bound = AsyncConfig(max_staleness=1)
    two, one = (run(bound, num_steps=12, num_cores=cores).mean_step_s for cores in (2, 1))
    assert two == pytest.approx(run(bound, num_steps=12).mean_step_s)
    # a core does the work of generation and of training one after the other
    assert one == pytest.approx(20 + TRAINED_S, rel=0.15)


def test_the_end_of_a_run_without_generation_does_not_count() -> None:
    result = run(AsyncConfig(max_staleness=3), num_steps=9, num_cores=1)
    # Replicas stop three steps before the run ends. With one core, a step without them is training.
    assert len(result.step_s) == len(result.trained_tokens) == 9 - 2
    assert min(result.step_s[-4:]) > 20
    assert result.generation_busy == pytest.approx(20 / (20 + TRAINED_S), rel=0.15)


@settings(max_examples=20)
@given(
    bound=st.integers(0, 3),
    num_replicas=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    cache_tokens=st.integers(60, 400),
)
def test_no_group_is_staler_than_the_bound_and_no_step_beats_its_parts(
    bound: int, num_replicas: int, lengths: list[int], cache_tokens: int
) -> None:
    result = run(
        AsyncConfig(max_staleness=bound),
        num_replicas=num_replicas,
        lengths=lengths,
        cache_tokens=cache_tokens,
    )
    assert max(result.staleness) <= bound
    assert sum(result.staleness.values()) == (6 + bound) * GROUPS
    for seconds, tokens in zip(result.step_s, result.trained_tokens, strict=True):
        assert seconds >= 0.1 * tokens + 1.0 - 1e-6
