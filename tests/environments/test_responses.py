"""OpenAI's Responses API at an agent's endpoint, by OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import rlsys
from tests.environments.asking import client, play
from tests.environments.templates import THINKING
from tests.environments.test_endpoint import CALL, assert_sampled_once, trajectory_of

FUNCTION = {
    "type": "function",
    "name": "add",
    "description": "The sum.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def test_a_conversation_of_items_is_one_branch() -> None:
    """Items that a client sends back are matched with the reply."""
    answers: list[Any] = []

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            items: list[Any] = [{"role": "user", "content": "1 + 2?"}]
            for _ in range(3):
                answer = await policy.responses.create(
                    model="m", instructions="Be brief.", input=items, tools=[FUNCTION]
                )
                answers.append(answer)
                items += [one.model_dump() for one in answer.output]
                items += [
                    {"type": "function_call_output", "call_id": one.call_id, "output": "3"}
                    for one in answer.output
                    if one.type == "function_call"
                ]
        return 1.0

    replies = iter([f"<think>\nhm\n</think>\n\n{CALL}", f"Again.\n{CALL}\n{CALL}", "3"])
    ended, made = play(mine, lambda text: next(replies), template=THINKING)
    assert trajectory_of(ended).num_branches == 1
    assert_sampled_once(ended, made)
    first, second, third = answers
    assert [one.type for one in first.output] == ["reasoning", "function_call"]
    assert first.output[0].content[0].text == "hm"
    assert json.loads(first.output[1].arguments) == {"a": 1, "b": [2, "é"]}
    kinds = ["message", "function_call", "function_call"]
    assert [one.type for one in second.output] == kinds
    assert second.output_text == "Again."
    assert (third.status, third.output_text) == ("completed", "3")
    assert first.usage.input_tokens == len(made.sampler.asked[0].prompt_token_ids)
    assert first.usage.output_tokens == len(made.sampler.sampled[0].token_ids)
    assert first.policy_version == 7
    text = made.codec.boundary.decode_written(list(made.sampler.asked[-1].prompt_token_ids))
    assert text.count("Be brief.") == 1
    assert text.count("<tool_response>") == 3


def test_a_response_goes_on_from_a_previous_one() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            first = await policy.responses.create(model="m", input="one?", instructions="Count.")
            second = await policy.responses.create(
                model="m", input="two?", instructions="Count.", previous_response_id=first.id
            )
            assert second.previous_response_id == first.id
        return 1.0

    ended, made = play(mine, lambda text: f"{text.count('?')}.")
    assert trajectory_of(ended).num_branches == 1
    text = made.codec.boundary.decode_written(list(made.sampler.asked[1].prompt_token_ids))
    assert [text.count(one) for one in ("Count.", "one?", "1.", "two?")] == [1, 1, 1, 1]


def test_a_stream_put_together_is_the_response() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            kinds, deltas, numbers = [], {"text": "", "arguments": ""}, []
            stream = await policy.responses.create(
                model="m", input="?", tools=[FUNCTION], stream=True
            )
            async for event in stream:
                kinds.append(event.type)
                numbers.append(event.sequence_number)
                if event.type == "response.output_text.delta":
                    deltas["text"] += event.delta
                if event.type == "response.function_call_arguments.delta":
                    deltas["arguments"] += event.delta
                if event.type == "response.completed":
                    final = event.response
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert numbers == [*range(len(kinds))]
            assert deltas["text"] == final.output_text == "Now."
            assert deltas["arguments"] == final.output[-1].arguments
            # The client's own way to put a stream together.
            async with policy.responses.stream(model="m", input="?", tools=[FUNCTION]) as events:
                async for _ in events:
                    pass
                put_together = await events.get_final_response()
            assert put_together.output_text == "Now."
            assert put_together.output[-1].name == "add"
        return 1.0

    ended, _ = play(mine, lambda text: f"<think>\nhm\n</think>\n\nNow.\n{CALL}", template=THINKING)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0


def test_truncated_replies_and_ignored_fields_are_reported() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            made = await policy.responses.create(
                model="m",
                input=[{"role": "developer", "content": [{"type": "input_text", "text": "hi"}]}],
                max_output_tokens=3,
                temperature=0.1,
                tools=[{"type": "web_search"}],
                include=["message.output_text.logprobs"],
                metadata={"a": "b"},
            )
            assert made.status == "incomplete"
            assert made.incomplete_details.reason == "max_output_tokens"
            assert set(made.model_dump()["ignored"]) == {"temperature", "tools[0]"}
            logprobs = made.output[0].content[0].logprobs
            assert [one.logprob for one in logprobs] == [-0.5] * 3
            assert made.metadata == {"a": "b"}
            async with policy.responses.stream(model="m", input="?", max_output_tokens=3) as events:
                kinds = [event.type async for event in events]
            assert kinds[-1] == "response.incomplete"
        return 1.0

    ended, made = play(mine, lambda text: "the end of it")
    assert ended.played is not None, ended.failure
    assert made.sampler.asked[0].sampling.max_tokens == 3


def test_used_up_turns_are_reported() -> None:
    @rlsys.agent(max_turns=1)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            await policy.responses.create(model="m", input="?")
            with pytest.raises(openai.BadRequestError) as found:
                await policy.responses.create(model="m", input="?")
            assert found.value.code == "max_turns_exceeded"
        return 1.0

    ended, _ = play(mine, lambda text: "yes")
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
