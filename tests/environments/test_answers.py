"""Several answers to one request, where turns or tokens do not suffice for all of them."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

import rlsys
from rlsys.environments.token_budget import EpisodeLimits
from tests.environments.asking import client, play
from tests.environments.templates import THINKING
from tests.environments.test_endpoint import TOOLS, assert_sampled_once, trajectory_of
from tests.environments.test_endpoint_errors import QUESTION, ask, by_hand
from tests.environments.test_responses import FUNCTION


@pytest.mark.parametrize("route", ["chats", "completions"])
def test_more_answers_than_turns_are_refused_before_any_is_sampled(route: str) -> None:
    """The turns that are left can be used."""

    @rlsys.agent(max_turns=2)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            three = (
                ask(policy, n=3, max_tokens=9)
                if route == "chats"
                else policy.completions.create(model="m", prompt=["a", "b", "c"], max_tokens=9)
            )
            with pytest.raises(openai.BadRequestError) as found:
                await three
            assert found.value.code == "invalid_request"
            answer = await ask(policy, n=2, max_tokens=9)
            assert len(answer.choices) == 2
        return 1.0

    ended, made = play(mine, lambda text: "yes")
    assert len(made.sampler.asked) == 2
    assert_sampled_once(ended, made)


@pytest.mark.parametrize("raises", [False, True])
def test_answers_before_the_tokens_were_used_up_are_returned(raises: bool) -> None:
    @rlsys.agent(format_reward=-1.0, num_retries=0)
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            answer = await ask(policy, n=2)
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason) == (0, "length")
        assert answer.usage.completion_tokens == 100
        if raises:
            raise IndexError("no second choice")
        return 1.0

    limits = EpisodeLimits(max_prompt_tokens=600, max_tokens=100, max_context=2000)
    ended, made = play(mine, lambda text: "x" * 900, limits=limits)
    assert_sampled_once(ended, made)
    assert ended.played is not None
    assert ended.played.total == (-1.0 if raises else 1.0)


def test_answers_to_several_prompts_keep_their_index() -> None:
    """The second prompt does not fit."""

    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            answer = await policy.completions.create(
                model="m", prompt=["a", "b" * 150, "c"], n=2, max_tokens=4, echo=True
            )
        return float([one.index for one in answer.choices] == [0, 1, 4, 5])

    limits = EpisodeLimits(max_prompt_tokens=200, max_tokens=100, max_context=400)
    ended, made = play(mine, lambda text: "yes", limits=limits)
    assert ended.played is not None, ended.failure
    assert ended.played.total == 1.0
    assert_sampled_once(ended, made)


def test_a_stop_text_in_the_reasoning_is_removed() -> None:
    @rlsys.agent
    async def mine(endpoint: Any, task: Any) -> float:
        async with client(endpoint) as policy:
            answer = await ask(policy, stop=["END"])
            message = answer.choices[0].message.model_dump()
            assert (message["content"], message["reasoning_content"]) == ("", "so ")
            await ask(policy, messages=[*QUESTION, message, *QUESTION], stop=["END"])
        return 1.0

    replies = iter(["<think>\nso END", "yes"])
    ended, made = play(mine, lambda text: next(replies), template=THINKING)
    assert trajectory_of(ended).num_branches <= 2  # the template drops reasoning later
    assert_sampled_once(ended, made)


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/chat/completions", {"tools": TOOLS, "parallel_tool_calls": True}, set()),
        ("/chat/completions", {"parallel_tool_calls": False}, {"parallel_tool_calls"}),
        ("/chat/completions", {"max_tokens": 9, "max_completion_tokens": 9}, {"max_tokens"}),
        ("/chat/completions", {"echo": True, "prompt": "a"}, {"echo", "prompt"}),
        (
            "/chat/completions",
            {"stream_options": {"include_usage": True, "include_obfuscation": False}},
            {"stream_options.include_obfuscation"},
        ),
        ("/completions", {"messages": QUESTION, "tools": TOOLS}, {"messages", "tools"}),
        (
            "/responses",
            {
                "text": {"verbosity": "low", "format": {"type": "text"}},
                "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            },
            {"text.verbosity", "include[1]"},
        ),
        ("/responses", {"parallel_tool_calls": False}, {"parallel_tool_calls"}),
    ],
)
def test_what_is_ignored_is_listed(path: str, body: Any, ignored: set[str]) -> None:
    needed: dict[str, Any] = {
        "/chat/completions": {"messages": QUESTION},
        "/completions": {"prompt": "a"},
        "/responses": {"input": "a"},
    }

    async def talk(http: httpx.AsyncClient) -> None:
        answer = await http.post(path, json={**body, **needed[path]})
        assert set(answer.json()["ignored"]) == ignored

    ended, _ = play(by_hand(talk), lambda text: "yes", template=THINKING)
    assert ended.played is not None, ended.failure


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
def test_a_forced_choice_of_tools_follows_the_number_of_calls(path: str) -> None:
    pytest.importorskip("xgrammar")
    tools: Any = {"/chat/completions": TOOLS, "/responses": [FUNCTION]}[path]
    asked = {"messages": QUESTION} if path == "/chat/completions" else {"input": "a"}
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "tools": tools}

    async def talk(http: httpx.AsyncClient) -> None:
        answer = await http.post(path, json={**asked, **forced})
        assert answer.json()["ignored"] == []

    ended, _ = play(by_hand(talk), lambda text: "yes", template=THINKING)
    assert ended.played is not None, ended.failure
