"""A judge's questions and scores, which equal those of its model asked directly."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from actors.run.factories import JudgeFactory
from rlsys.common.random_streams import request_seed
from rlsys.config import DataConfig, FrozenModelConfig, RoleConfig, RolloutConfig, RunConfig
from rlsys.dataflow.graph.graph import Dataflow
from rlsys.dataflow.graph.stages import JudgeStage, Prompts
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.engines.inference.judge import JudgeEngine, QuestionEncoder, question, sampling_of, score
from rlsys.launcher.tiny_models import build_tiny_model, build_tokenizer
from rlsys.rewards import RewardFailure
from rlsys.types import FinishReason, Generation, GenerationRequest, Rollout

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
CONTEXT = 128


def stage(ask: Any = None, parse: Any = None, **settings: Any) -> JudgeStage:
    flow = Dataflow()
    rollouts = flow.generate(flow.model("policy"), Prompts(config=DataConfig()), group_size=2)
    judge = flow.model("judge", RoleConfig())
    settings = {"max_tokens": 12, **settings}
    flow.judge(judge, rollouts, ask=ask or about, parse=parse or digits, **settings)
    return flow.stage(JudgeStage)


def about(rollout: Rollout) -> str:
    return f"{rollout.prompt_text} {rollout.completion_text} of {rollout.metadata['answer']}?"


def digits(reply: str) -> float:
    """Score a reply of a random model, which may contain any characters."""
    return sum(map(ord, reply)) / 1000 + sum(character.isdigit() for character in reply)


def rollout(group_id: int = 0, index: int = 0, completion: str = "two") -> Rollout:
    return Rollout(
        group_id=group_id,
        index=index,
        prompt_text="1+1=",
        completion_text=completion,
        prompt_token_ids=np.array([1, 2], np.int32),
        token_ids=np.array([3], np.int32),
        finish_reason=FinishReason.STOP,
        metadata={"answer": "2"},
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def test_a_question_is_in_the_judges_tokens(tokenizer: Any) -> None:
    tokens = question(stage(), rollout(), QuestionEncoder(tokenizer), context=CONTEXT)
    assert tokens == tokenizer("1+1= two of 2?")["input_ids"]


def test_a_chat_is_rendered_with_the_judges_template() -> None:
    def asks(one: Rollout) -> list[dict[str, str]]:
        return [{"role": "system", "content": "be fair"}, {"role": "user", "content": about(one)}]

    chatty = build_tokenizer()
    chatty.chat_template = None
    failure = question(stage(asks), rollout(), QuestionEncoder(chatty), context=CONTEXT)
    assert isinstance(failure, RewardFailure)
    assert (failure.kind, failure.reward) == ("question", "score")
    assert "chat template" in failure.message

    chatty.chat_template = TEMPLATE
    text = "s:be fair\nu:1+1= two of 2?\na:"
    tokens = question(stage(asks), rollout(), QuestionEncoder(chatty), context=CONTEXT)
    assert tokens == chatty(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("content", [5, b"so", [{"type": "image", "text": "so"}]])
def test_a_message_that_is_no_text_fails_its_rollout(content: Any) -> None:
    chatty = build_tokenizer()
    chatty.chat_template = TEMPLATE
    asks = lambda _: [{"role": "user", "content": content}]  # noqa: E731
    failure = question(stage(asks), rollout(), QuestionEncoder(chatty), context=CONTEXT)
    assert isinstance(failure, RewardFailure)
    assert failure.kind == "question"
    assert "content" in failure.message


def test_a_question_in_parts_is_their_text_and_holds_no_special_token() -> None:
    chatty = build_tokenizer()
    chatty.chat_template = TEMPLATE
    asks = lambda _: [{"role": "user", "content": [{"type": "text", "text": "<eos>1"}]}]  # noqa: E731
    tokens = question(stage(asks), rollout(), QuestionEncoder(chatty), context=CONTEXT)
    assert isinstance(tokens, list)
    assert chatty.decode(tokens) == "u:<eos>1\na:"
    assert chatty.eos_token_id not in tokens


def test_a_question_loses_no_character() -> None:
    failure = question(
        stage(), rollout(), QuestionEncoder(build_tokenizer("0123456789+= ")), context=CONTEXT
    )
    assert isinstance(failure, RewardFailure)
    assert failure.kind == "question"


def key_error(_: Any) -> Any:
    raise KeyError("hint")


class Panic(BaseException):
    """An error as extensions in Rust raise them."""


def panic(_: Any) -> Any:
    raise Panic("index")


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (key_error, "exception", r"judge 'judge', ask key_error raised KeyError: 'hint'"),
        (lambda _: sys.exit(3), "exception", "ask <lambda> raised SystemExit: 3"),
        (panic, "exception", "ask panic raised test_judge.Panic: index"),
        (lambda _: None, "question", "judge 'judge', ask <lambda>: question=None: "),
        (lambda _: "", "question", "judge 'judge', ask <lambda>: question: "),
        (lambda _: "\ud800", "question", "judge 'judge', ask <lambda>: question"),
        (lambda _: "x" * 117, "question", "tokens of the question=117: must be in [1, 116]"),
    ],
)
def test_an_invalid_question_fails_its_rollout(
    ask: Any, kind: str, message: str, tokenizer: Any
) -> None:
    failure = question(stage(ask), rollout(), QuestionEncoder(tokenizer), context=CONTEXT)
    assert isinstance(failure, RewardFailure)
    assert (failure.kind, failure.reward) == (kind, "score")
    assert message in failure.message


def test_ask_gets_a_copy_of_the_rollout(tokenizer: Any) -> None:
    def asks(one: Rollout) -> str:
        assert isinstance(one.metadata, dict)
        return str(one.metadata.pop("answer"))

    one = rollout()
    assert [
        question(stage(asks), one, QuestionEncoder(tokenizer), context=CONTEXT) for _ in range(2)
    ] == [tokenizer("2")["input_ids"]] * 2


def test_the_longest_question_leaves_room_for_the_reply(tokenizer: Any) -> None:
    tokens = question(
        stage(lambda _: "x" * 116), rollout(), QuestionEncoder(tokenizer), context=CONTEXT
    )
    assert isinstance(tokens, list)
    assert len(tokens) == 116


@pytest.mark.parametrize(
    ("parse", "kind", "message"),
    [
        (lambda reply: None, "reply", "'so: 7'"),
        (lambda reply: "7", "type", "'7'"),
        (lambda reply: math.nan, "nan", "nan for a reply that ends 'so: 7'"),
        (lambda reply: 10**400, "nan", "inf"),
        (lambda reply: 1e39, "nan", "1e+39"),  # infinite in float32
        (panic, "exception", "parse panic raised test_judge.Panic: index"),
        (key_error, "exception", "judge 'judge', parse key_error raised KeyError: 'hint'"),
    ],
)
def test_a_reply_without_a_score_fails_its_rollout(parse: Any, kind: str, message: str) -> None:
    failure = score(stage(parse=parse), "so: 7")
    assert isinstance(failure, RewardFailure)
    assert (failure.kind, failure.reward) == (kind, "score")
    assert message in failure.message


def test_a_score_is_a_float() -> None:
    assert score(stage(parse=lambda reply: int(reply[-1])), "so: 7") == 7.0
    assert score(stage(parse=lambda reply: "7" in reply), "so: 7") == 1.0
    assert score(stage(parse=lambda reply: np.bool_(True)), "so: 7") == 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a judge with another vocabulary than the policies, since it reads text."""
    directory = tmp_path_factory.mktemp("judge")
    return build_tiny_model(directory, width=32, num_layers=2, max_context=CONTEXT)


def made(model: Path, **settings: Any) -> Any:
    config = RoleConfig(model=FrozenModelConfig(path=str(model)), pass_tokens=4096)
    one = stage(**settings)
    one = replace(one, model=replace(one.model, config=config))
    run = RunConfig(seed=5)
    return JudgeFactory(config=run, stage=one, path=str(model), tokenizer=build_tokenizer())()


@pytest.fixture
def judges(model: Path) -> Iterator[Any]:
    opened: list[JudgeEngine] = []

    def judge(**settings: Any) -> JudgeEngine:
        opened.append(made(model, **settings).engine)
        return opened[-1]

    yield judge
    for one in opened:
        one.close()


def directly(model: Path, one: JudgeStage, rollouts: list[Rollout]) -> list[float]:
    """Return scores of the generation engine's replies, without a JudgeEngine."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    async def generated() -> dict[str, str]:
        engine = TorchEngine(model, RolloutConfig(), dtype="float32")
        await engine.start()
        engine.submit(
            [
                GenerationRequest(
                    request_id=str(place),
                    prompt_token_ids=tokenizer(about(each))["input_ids"],
                    sampling=sampling_of(one),
                    seed=request_seed(5, each.group_id, each.index),
                )
                for place, each in enumerate(rollouts)
            ]
        )
        replies: dict[str, str] = {}
        while len(replies) < len(rollouts):
            for ended in await engine.collect():
                replies[ended.request_id] = tokenizer.decode(
                    ended.token_ids, skip_special_tokens=True
                )
        await engine.close()
        return replies

    replies = asyncio.run(generated())
    return [digits(replies[str(place)]) for place in range(len(rollouts))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_are_those_of_direct_generation(
    temperature: float, model: Path, judges: Any
) -> None:
    rollouts = [rollout(group, index, "x" * group) for group in range(5) for index in range(2)]
    judge = judges(temperature=temperature)
    scores = judge.judge(rollouts)
    assert scores == directly(model, stage(temperature=temperature), rollouts)
    # A row's random numbers depend neither on other rows nor on earlier calls.
    assert judge.judge(rollouts[3:6]) == scores[3:6]
    equal = [scores[2 * group] == scores[2 * group + 1] for group in range(5)]
    assert all(equal) == (temperature == 0)
    assert judge.judge([]) == []


def test_one_that_fails_leaves_the_others_their_scores(judges: Any) -> None:
    def parse(reply: str) -> float | None:
        return digits(reply) if len(reply) else None

    rollouts = [rollout(0), rollout(1, completion="x" * CONTEXT), rollout(2)]
    first, failure, third = judges(parse=parse).judge(rollouts)
    assert first == third
    assert isinstance(failure, RewardFailure)
    assert failure.kind == "question"
    assert "must be in [1, 116]" in failure.message


def test_a_reply_without_finite_probabilities_fails_its_rollout(
    judges: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judges()
    rollouts = [rollout(group, 0, "x" * group) for group in range(3)]
    scores = judge.judge(rollouts)
    collect = TorchEngine.collect

    async def with_a_failure(engine: TorchEngine) -> list[Generation]:
        return [
            replace(one, sampler_logprobs=one.sampler_logprobs * np.nan).until_failure()
            if one.request_id == "1"
            else one
            for one in await collect(engine)
        ]

    monkeypatch.setattr(TorchEngine, "collect", with_a_failure)
    first, failure, third = judge.judge(rollouts)
    assert [first, third] == [scores[0], scores[2]]
    assert isinstance(failure, RewardFailure)
    assert failure.kind == "nan"


def test_pass_tokens_bound_a_judges_memory(model: Path) -> None:
    """All questions together need far more tokens than pass_tokens."""
    judge = made(model).engine
    config = RoleConfig(model=FrozenModelConfig(path=str(model)), pass_tokens=64)
    one = stage()
    one = replace(one, model=replace(one.model, config=config))
    small = JudgeFactory(
        config=RunConfig(seed=5), stage=one, path=str(model), tokenizer=build_tokenizer()
    )().engine
    rollouts = [rollout(group, 0, "x" * (group % 3)) for group in range(20)]
    try:
        assert small.judge(rollouts) == judge.judge(rollouts)
        (failure,) = small.judge([rollout(completion="x" * 50)])
        assert isinstance(failure, RewardFailure)
        assert "must be in [1, 52]" in failure.message
    finally:
        judge.close()
        small.close()
