from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import rlsys
from rlsys.config import DataConfig, FrozenModelConfig, RewardConfig, RolloutConfig, SamplingConfig
from rlsys.evaluation.model_evaluation import (
    Evaluation,
    EvaluationConfig,
    Sample,
    evaluate_model,
    evaluate_played,
)
from rlsys.launcher.tiny_models import build_tiny_model
from rlsys.rewards import Reward, RewardFailure
from rlsys.types import FinishReason
from tests.errors import invalid

PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EvaluationConfig:
    directory = tmp_path_factory.mktemp("evaluation")
    model = build_tiny_model(
        directory / "model", characters="0123456789+=", width=16, num_layers=1, max_context=64
    )
    data = directory / "data.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "number": i} for i in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluationConfig(
        num_samples=4,
        k=(1, 4),
        model=FrozenModelConfig(path=str(model)),
        data=DataConfig(source=str(data), max_prompt_tokens=32, shuffle=False),
        sampling=SamplingConfig(max_tokens=3),
        rollout=RolloutConfig(max_running=3, kv_cache_gib=0.01),
    )


def evaluated(
    config: EvaluationConfig, *rewards: Reward, samples: list[Sample] | None = None
) -> Evaluation:
    kept: list[Sample] = [] if samples is None else samples
    work = evaluate_model(config, rewards, on_sample=kept.append)
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


@rlsys.reward
def second(rollout: rlsys.Rollout) -> float:
    """Return 1 for one of four samples of the even prompts."""
    return float(rollout.index == 1 and rollout.metadata["number"] % 2 == 0)


def test_each_sample_of_each_prompt_is_scored_once(config: EvaluationConfig) -> None:
    samples: list[Sample] = []
    found = evaluated(config, second, samples=samples)
    places = sorted((one.rollout.group_id, one.rollout.index) for one in samples)
    assert places == [(prompt, index) for prompt in range(6) for index in range(4)]
    assert {one.rollout.prompt_text for one in samples} == {f"{i}+1=" for i in range(6)}
    assert all(1 <= len(one.rollout.token_ids) <= 3 for one in samples)
    assert found.estimates["eval/pass@1"].value == pytest.approx(1 / 8)
    assert found.estimates["eval/pass@4"].value == pytest.approx(1 / 2)
    assert found.estimates["eval/mean@4"].value == pytest.approx(1 / 8)
    assert (found.num_prompts, found.num_left_out, dict(found.failed)) == (6, 0, {})
    assert found.tokens_mean == sum(len(one.rollout.token_ids) for one in samples) / 24
    cut = [one.rollout.finish_reason == FinishReason.LENGTH for one in samples]
    assert found.truncated_frac == sum(cut) / 24


def completions(samples: Sequence[Sample]) -> dict[tuple[int, int], str]:
    return {(s.rollout.group_id, s.rollout.index): s.rollout.completion_text for s in samples}


@pytest.mark.slow
def test_a_seed_gives_the_same_samples_and_greedy_the_most_likely(config: EvaluationConfig) -> None:
    first: list[Sample] = []
    again: list[Sample] = []
    evaluated(config, second, samples=first)
    evaluated(config, second, samples=again)
    assert completions(first) == completions(again)
    other: list[Sample] = []
    evaluated(replace(config, seed=1), second, samples=other)
    assert completions(other) != completions(first)
    greedy = replace(config, greedy=True, num_samples=1, k=(1,))
    likeliest: list[list[Sample]] = [[], []]
    for seed in (0, 1):
        evaluated(replace(greedy, seed=seed), second, samples=likeliest[seed])
    assert completions(likeliest[0]) == completions(likeliest[1])


@rlsys.reward
def hangs_on_the_last_prompt(rollout: rlsys.Rollout) -> float:
    if rollout.metadata["number"] == 5:
        time.sleep(3600)
    return 1.0


@pytest.mark.slow
def test_a_reward_that_hangs_fails_its_own_samples(config: EvaluationConfig) -> None:
    samples: list[Sample] = []
    limited = replace(config, reward=RewardConfig(timeout_s=1.0))
    found = evaluated(limited, hangs_on_the_last_prompt, samples=samples)
    failures = {
        s.rollout.group_id: s.outcome.kind for s in samples if isinstance(s.outcome, RewardFailure)
    }
    assert failures == {5: "timeout"}
    assert dict(found.failed) == {"timeout": 4}
    assert (found.num_prompts, found.num_left_out) == (5, 1)
    assert found.first_failure is not None
    assert "took longer than 1 s" in found.first_failure
    assert found.estimates["eval/pass@1"].value == 1.0


@rlsys.reward
def broken(rollout: rlsys.Rollout) -> float:
    raise KeyError("answr")


def test_a_reward_that_always_fails_ends_the_evaluation(config: EvaluationConfig) -> None:
    with invalid("number of prompts", 0) as refused:
        evaluated(config, broken)
    assert "exception: broken raised" in refused.value.rule


def test_data_without_a_column_that_a_reward_reads_is_refused(config: EvaluationConfig) -> None:
    reads = rlsys.reward(required_columns=("solution",))(lambda rollout: 1.0)
    with invalid("reward '<lambda>': column", "solution"):
        evaluated(config, reads)


def test_fewer_prompts(config: EvaluationConfig) -> None:
    assert evaluated(replace(config, num_prompts=2), second).num_prompts == 2
    with invalid("num_prompts", 7):
        evaluated(replace(config, num_prompts=7), second)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"k": (1, 8)}, "k"),
        ({"k": ()}, "k"),
        ({"num_samples": 0}, "num_samples"),
        ({"greedy": True}, "num_samples"),
        ({"num_prompts": 1}, "num_prompts"),
        ({"model": FrozenModelConfig()}, "model.path"),
        ({"right_at": math.nan}, "right_at"),
        ({"seats": ("second=m",)}, "seats"),
    ],
)
def test_mistakes_are_refused_at_construction(
    config: EvaluationConfig, wrong: dict[str, object], field: str
) -> None:
    with invalid(field):
        replace(config, **wrong)  # type: ignore[arg-type]


@rlsys.environment(turn_tokens=2, plain_text=True, num_retries=0)
async def counted(chat: Any, task: Any) -> dict[str, float]:
    """Return 1 on the even tasks; on the others half as much for each of two turns."""
    await chat(str(task["number"]))
    await chat("=")
    if task["number"] % 2:
        chat.reward(0.25, "odd")
        return {"right": 0.25}
    return {"right": 1.0}


def played(
    config: EvaluationConfig, environment: Any, samples: list[Sample] | None = None
) -> Evaluation:
    kept: list[Sample] = [] if samples is None else samples
    work = evaluate_played(config, environment, on_sample=kept.append)
    return asyncio.run(asyncio.wait_for(work, PATIENCE_S))


def test_episodes_of_an_environment_are_samples(config: EvaluationConfig) -> None:
    samples: list[Sample] = []
    longer = replace(config, sampling=SamplingConfig(max_tokens=16))
    found = played(longer, counted, samples)
    places = sorted((one.rollout.group_id, one.rollout.index) for one in samples)
    assert places == [(task, index) for task in range(6) for index in range(4)]
    assert found.estimates["eval/pass@1"].value == pytest.approx(1 / 2)
    assert found.estimates["eval/mean@4"].value == pytest.approx(3 / 4)
    assert found.estimates["eval/right/mean"].value == pytest.approx(5 / 8)
    odd = found.estimates["eval/odd/mean"]
    assert (odd.low, odd.value, odd.high) != (odd.value, odd.value, odd.value)
    assert odd.value == pytest.approx(1 / 8)
    assert found.as_metrics()["eval/odd/mean/high"] == odd.high
    assert found.tokens_mean == sum(len(one.rollout.token_ids) for one in samples) / 24
    for one in samples:
        assert one.transcript is not None
        said = [line["text"] for line in one.transcript if not line["sampled"]]
        assert said == [str(one.rollout.metadata["number"]), "="]


def test_an_episode_whose_environment_fails_is_in_no_estimate(config: EvaluationConfig) -> None:
    @rlsys.environment(turn_tokens=2, plain_text=True, num_retries=0)
    async def fails_once(chat: Any, task: Any) -> float:
        await chat("1")
        if task["number"] == 5:
            raise OSError("no server")
        return 1.0

    samples: list[Sample] = []
    found = played(config, fails_once, samples)
    assert dict(found.failed) == {"exception": 4}
    assert (found.num_prompts, found.num_left_out) == (5, 1)
    assert found.first_failure is not None
    assert "no server" in found.first_failure
    assert found.estimates["eval/mean@4"].value == 1.0
    assert set(found.estimates) == {"eval/pass@1", "eval/pass@4", "eval/mean@4"}
    assert found.tokens_mean == sum(len(one.rollout.token_ids) for one in samples) / 20


def test_a_column_that_an_environment_requires_must_exist(config: EvaluationConfig) -> None:
    @rlsys.environment(required_columns=("solution",))
    async def reads(chat: Any, task: Any) -> float:
        return float(await chat("1") == task["solution"])

    with invalid("environment 'reads': column", "solution"):
        played(config, reads)


def test_several_rewards_have_their_own_metrics(config: EvaluationConfig) -> None:
    @rlsys.reward(weight=2.0)
    def half(rollout: rlsys.Rollout) -> float:
        return 0.5

    found = evaluated(config, second, half)
    assert found.estimates["eval/mean@4"].value == pytest.approx(1 / 8 + 1)
    assert found.estimates["eval/half/mean"].value == 0.5
    assert found.estimates["eval/second/mean"].value == pytest.approx(1 / 8)


def test_a_precision_that_is_not_quantized_is_refused(config: EvaluationConfig) -> None:
    rollout = RolloutConfig(engine="vllm", quantization="fp8_per_channel")
    with invalid("rollout.quantization"):
        replace(config, rollout=rollout)
