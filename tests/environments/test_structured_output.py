"""Structured output and forced tools, by OpenAI's client and a real engine."""

from __future__ import annotations

import json
import random
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

import rlsys
from rlsys.common.structural_tags import structural_tag
from rlsys.engines.models.causal_lm import load_causal_lm
from rlsys.environments.tools.tool_formats import FORMATS, ToolFormat
from rlsys.environments.tools.tool_grammars import behind_reasoning, either, json_of
from rlsys.launcher.tiny_models import build_tiny_model, build_tokenizer
from rlsys.types import INJECTED
from tests.engines.torch_engine_harness import trainer_logprobs
from tests.environments.asking import client, play
from tests.environments.engine_playing import THINKING, play_engine
from tests.environments.templates import CHANNELS
from tests.environments.templates import THINKING as QWEN

xgrammar = pytest.importorskip("xgrammar")

QUESTION: Any = [{"role": "user", "content": "?"}]


class Kind(Enum):
    BIG = "big"
    SMALL = "small"


class Answer(BaseModel):
    kind: Kind
    sure: bool


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("paint", color={"enum": ["red", "blue"]}, fast={"type": "boolean"}),
    tool("stop"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), width=64, num_layers=2)


def test_clients_parse_structured_output_and_the_ratio_is_one(path: Path) -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            made = await policy.chat.completions.parse(
                model="m", messages=QUESTION, response_format=Answer
            )
            assert isinstance(made.choices[0].message.parsed, Answer)
            forced = await policy.chat.completions.create(
                model="m",
                messages=QUESTION,
                tools=TOOLS,
                tool_choice="required",
                parallel_tool_calls=False,
            )
            assert forced.choices[0].finish_reason == "tool_calls"
            (call,) = forced.choices[0].message.tool_calls
            assert call.function.name in ("paint", "stop")
            named = await policy.chat.completions.create(
                model="m",
                messages=QUESTION,
                tools=TOOLS,
                tool_choice={"type": "function", "function": {"name": "paint"}},
                parallel_tool_calls=False,
            )
            (call,) = named.choices[0].message.tool_calls
            assert call.function.name == "paint"
            assert json.loads(call.function.arguments)["color"] in ("red", "blue")
            response = await policy.responses.parse(model="m", input="?", text_format=Answer)
            assert isinstance(response.output_parsed, Answer)
            text = await policy.completions.create(
                model="m",
                prompt="x",
                extra_body={"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            )
            assert json.loads(text.choices[0].text) in (1, 22)
        return 1.0

    ended, sampler = play_engine(path, mine)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
    model = load_causal_lm(path, dtype="float32")
    for asked, made in zip(sampler.asked, sampler.sampled, strict=True):
        (expected,) = trainer_logprobs(
            model, [asked.prompt_token_ids], [made.token_ids.tolist()], temperature=1.0
        )
        assert np.abs(np.exp(made.sampler_logprobs - expected.numpy()) - 1).max() < 1e-5
    # Tokens that had no alternative are part of the rollout, and nothing is trained on them.
    trajectory = ended.played.trajectory
    num_free = sum(int((one.policy_versions != INJECTED).sum()) for one in sampler.sampled)
    assert int((trajectory.policy_versions != INJECTED).sum()) == num_free
    assert 0 < num_free < sum(len(one.token_ids) for one in sampler.sampled)


SCHEMA = {"name": "n", "schema": {"enum": [1, 22]}}


def test_a_reply_without_a_free_token_has_its_reward_at_another(path: Path) -> None:
    """A reward at a token that is not trained on would be lost."""
    only = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            await policy.chat.completions.create(model="m", messages=QUESTION, max_tokens=4)
            made = await policy.chat.completions.create(
                model="m", messages=QUESTION, response_format=only
            )
            assert made.choices[0].message.content == "7"
        return 1.0

    ended, _ = play_engine(path, mine)
    assert ended.played is not None, ended.failure
    trajectory = ended.played.trajectory
    (place,) = np.flatnonzero(trajectory.turn_rewards)
    assert trajectory.policy_versions[place] != INJECTED
    assert trajectory.turn_rewards[place] == 1.0


def test_a_model_that_thinks_may_do_so_before(path: Path) -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            for _ in range(8):
                await policy.chat.completions.create(
                    model="m",
                    messages=QUESTION,
                    response_format={"type": "json_object"},
                    max_tokens=9,
                )
        return 1.0

    ended, sampler = play_engine(path, mine, template=THINKING)
    assert ended.played is not None, ended.failure
    texts = [build_tokenizer().decode(one.token_ids.tolist()) for one in sampler.sampled]
    assert all(one.lstrip("\n").startswith(("<think>", "{"[: len(one)])) for one in texts)
    assert any(one.startswith("<think>") for one in texts)


def test_the_structure_of_sampling_requests() -> None:
    """With optional tools, a reply is a call or has the format."""

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            made = await policy.chat.completions.parse(
                model="m", messages=QUESTION, response_format=Answer, tools=[STRICT]
            )
            assert made.choices[0].message.parsed == Answer(kind=Kind.BIG, sure=True)
            plain = await policy.chat.completions.create(model="m", messages=QUESTION, tools=TOOLS)
            assert plain.choices[0].message.content is not None
            made = await policy.chat.completions.create(
                model="m", messages=QUESTION, response_format={"type": "json_object"}
            )
            assert made.model_dump()["ignored"] == []
        return 1.0

    ended, made = play(mine, lambda text: '{"kind": "big", "sure": true}', template=QWEN)
    assert ended.played is not None, ended.failure
    first, second, third = (one.sampling.structure for one in made.sampler.asked)
    assert accepts(first, '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>')
    assert accepts(first, '<think>\nhm\n</think>\n\n{"kind": "big", "sure": false}')
    assert accepts(first, '{"kind": "small", "sure": true}')
    assert not accepts(first, '{"kind": "huge", "sure": true}')
    assert second == ""
    assert accepts(third, '{"any": [1, {"thing": null}]}')
    assert not accepts(third, "[1]")


STRICT = {"type": "function", "function": {**tool("go")["function"], "strict": True}}


@pytest.mark.parametrize(
    ("template", "own", "body"),
    [
        (CHANNELS, "", {"response_format": {"type": "json_object"}}),
        (QWEN, ToolFormat("mine", lambda text, tools: iter([text])), {"tool_choice": "required"}),
        (QWEN, "", {"tool_choice": {"type": "function", "function": {"name": "no"}}}),
    ],
)
def test_formats_that_cannot_be_forced_are_rejected(template: str, own: Any, body: Any) -> None:
    @rlsys.agent(tool_format=own)
    async def mine(endpoint: Any, task: Any) -> float:
        import openai

        async with client(endpoint) as policy:
            tools = {"tools": TOOLS} if "tool_choice" in body else {}
            with pytest.raises(openai.BadRequestError):
                await policy.chat.completions.create(model="m", messages=QUESTION, **tools, **body)
            await policy.chat.completions.create(model="m", messages=QUESTION)
        return 1.0

    ended, made = play(mine, lambda text: "yes", template=template)
    assert ended.played is not None, ended.failure
    assert len(made.sampler.asked) == 1


# What a grammar allows is what the readers read.

ASCII = xgrammar.TokenizerInfo([chr(i) for i in range(128)] + ["</s>"], stop_token_ids=[128])
COMPILER = xgrammar.GrammarCompiler(ASCII)
WALKED = [
    tool("paint", color={"enum": ["red", "blue"]}, n={"type": "integer"}),
    tool("note", text={"type": "string", "pattern": "^[a-c ]{1,5}$"}, deep={"type": "boolean"}),
]


def accepts(structure: str, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(structure))
    return all(matcher.accept_token(ord(one)) for one in text) and matcher.is_completed()


def walk(structure: str, seed: int, longest: int = 2000) -> str:
    """A random text that a structure allows; ends as soon as it may."""
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(structure))
    mask = np.zeros((1, 5), np.int32)
    choose = random.Random(seed)
    text = ""
    while not matcher.is_completed() and len(text) < longest:
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:128]
        allowed = [i for i in np.flatnonzero(bits).tolist() if chr(i) not in " \n\t\r"]
        token = choose.choice(allowed or np.flatnonzero(bits).tolist())
        assert matcher.accept_token(token)
        text += chr(token)
    return text


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("several", [False, True])
def test_forced_calls_are_read(name: str, several: bool) -> None:
    tool_format = FORMATS[name]
    assert tool_format.calls is not None
    structure = structural_tag(tool_format.calls(WALKED, several))
    found = set()
    for seed in range(30):
        text = walk(structure, seed)
        reply = tool_format.parse(text, WALKED)
        assert reply.content == "", text
        assert reply.calls, text
        for call in reply.calls:
            assert not call.error, text
            found.add(call.name)
            if call.name == "paint":
                assert call.arguments["color"] in ("red", "blue")
                assert isinstance(call.arguments["n"], int)
            else:
                assert isinstance(call.arguments["text"], str)
                assert isinstance(call.arguments["deep"], bool)
    assert found == {"paint", "note"}


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_are_allowed_only_if_asked_for(name: str) -> None:
    tool_format = FORMATS[name]
    assert tool_format.calls is not None
    two = {
        "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=stop>\n\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=stop>\n\n</function>\n</tool_call>",
        "llama3": '{"name": "stop", "parameters": {}}; {"name": "stop", "parameters": {}}',
        "mistral": '[TOOL_CALLS][{"name": "stop", "arguments": {}}, '
        '{"name": "stop", "arguments": {}}]',
        "mistral_args": "[TOOL_CALLS]stop[ARGS]{}[TOOL_CALLS]stop[ARGS]{}",
        "json": '{"name": "stop", "arguments": {}}\n{"name": "stop", "arguments": {}}',
    }[name]
    tools = [tool("stop")]
    assert len(tool_format.parse(two, tools).calls) == 2
    assert accepts(structural_tag(tool_format.calls(tools, True)), two)
    assert not accepts(structural_tag(tool_format.calls(tools, False)), two)


def test_reasoning_that_the_prompt_has_begun_must_end() -> None:
    made = either([json_of({"type": "boolean"})])
    begun = structural_tag(behind_reasoning(made, start="<think>", end="</think>", is_begun=True))
    assert accepts(begun, "so be it</think>\n\ntrue")
    assert not accepts(begun, "true")
