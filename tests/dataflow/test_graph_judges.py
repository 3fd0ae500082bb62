"""Judges in a graph: frozen models that write a score."""

from typing import Any

import pytest

from rlsys.algorithms import (
    cispo,
    grpo_advantage,
    token_mean,
)
from rlsys.config import (
    JudgeConfig,
    RoleConfig,
    TrainedRoleConfig,
)
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import (
    Column,
)
from tests.dataflow.graphs import generated
from tests.errors import invalid


def asks(rollout: Any) -> str:
    return f"Is {rollout.completion_text!r} right?"


def finds(reply: str) -> float | None:
    return float("yes" in reply)


def takes_two(a: Any, b: Any) -> Any: ...


async def waits(reply: str) -> float:
    return 0.0


def test_a_judge_is_a_frozen_model_that_writes_a_score() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    judge = flow.model("judge", JudgeConfig())
    score = flow.judge(judge, rollouts, ask=asks, parse=finds, max_tokens=8)
    assert score == Column("score")
    advantage = flow.per_group(grpo_advantage, score)
    flow.train(flow.main, rollouts, advantage, loss=cispo(), aggregation=token_mean)
    flow.check()
    assert [stage.name for stage in flow.row_stages] == ["judge score"]
    assert 's1["judge score<br/><i>judge</i>"]' in flow.to_mermaid()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"ask": "is it?"}, ""),
        ({"ask": takes_two}, "'b'"),
        ({"parse": float}, ""),
        ({"parse": waits}, ""),
        ({"parse": lambda: 0.0}, ""),
        ({"max_tokens": 0}, "99"),
        ({"max_tokens": 100}, "99"),
        ({"max_tokens": 1.5}, ""),
        ({"temperature": -1}, ""),
        ({"temperature": float("inf")}, ""),
        ({"temperature": 1e-9}, ""),
    ],
)
def test_a_judge_that_could_not_answer_is_refused(changes: dict[str, Any], name: str) -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    judge = flow.model("judge", JudgeConfig(engine="vllm", pass_tokens=100))
    arguments: dict[str, Any] = {"ask": asks, "parse": finds, "max_tokens": 8, **changes}
    ((field, value),) = changes.items()
    value = getattr(value, "__name__", value) if value is not float else value
    with invalid(f"flow.judge('judge'): {field}", value) as found:
        flow.judge(judge, rollouts, **arguments)
    assert name in found.value.rule


def test_models_that_are_no_judge_are_refused() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    for config, field in ((TrainedRoleConfig(), "model"), (RoleConfig(num_gpus=0.5), "num_gpus")):
        wrong = flow.model(type(config).__name__, config)
        with invalid(f"flow.judge({wrong.name!r}): {field}"):
            flow.judge(wrong, rollouts, ask=asks, parse=finds)
    with invalid("flow.judge('policy'): model", "policy"):
        flow.judge(flow.main, rollouts, ask=asks, parse=finds)
    scorer = flow.model("scorer", RoleConfig(), head="score")
    with invalid("flow.judge('scorer'): head", "score"):
        flow.judge(scorer, rollouts, ask=asks, parse=finds)
    judge = flow.model("judge", JudgeConfig())
    with invalid("flow.infer: model", "judge"):
        flow.infer(judge, rollouts, writes="judge_logprobs")
    with invalid("flow.judge: rollouts", ["token_ids"]):
        flow.judge(judge, rollouts[1:2], ask=asks, parse=finds)


def test_what_a_judge_writes_must_be_read() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    advantage = flow.per_group(grpo_advantage, flow.score(rollouts, [lambda rollout: 1.0]))
    flow.judge(flow.model("judge", RoleConfig()), rollouts, ask=asks, parse=finds)
    flow.train(flow.main, rollouts, advantage, loss=cispo(), aggregation=token_mean)
    with invalid("stage 'judge score'", ["score"]):
        flow.check()


def test_a_frozen_model_has_one_stage() -> None:
    flow = Dataflow()
    rollouts = generated(flow)
    judge = flow.model("judge", RoleConfig())
    scores = [
        flow.judge(judge, rollouts, ask=asks, parse=finds, writes=name) for name in ("kind", "true")
    ]
    advantage = flow.per_group(grpo_advantage, scores[0])
    flow.train(
        flow.main, rollouts, advantage, loss=cispo(), aggregation=token_mean, watch=scores[1:]
    )
    with invalid("stage 'judge true': model", "judge"):
        flow.check()
