"""Structured output, forced tools and responses, by the clients that agents are written with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import rlsys
from rlsys.environments.episode_host import Ended
from tests.environments.asking import client, play
from tests.environments.templates import THINKING

pytestmark = pytest.mark.slow  # imports of seconds each


class Answer(BaseModel):
    kind: Literal["big", "small"]
    sure: bool


SAYS = '{"kind": "big", "sure": true}'
ANSWER = Answer(kind="big", sure=True)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def episode(talk: Callable[[Any], Awaitable[None]], *replies: str) -> tuple[Ended, list[str]]:
    """Play an episode; returns it, and the structures that were asked for."""

    @rlsys.agent(num_retries=0)
    async def mine(endpoint: Any, task: Any) -> float:
        await talk(endpoint)
        return 1.0

    said = iter(replies)
    ended, made = play(mine, lambda text: next(said), template=THINKING)
    assert ended.played is not None, ended.failure
    return ended, [one.sampling.structure for one in made.sampler.asked]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain(method: Any) -> None:
    langchain = pytest.importorskip("langchain_openai")

    async def talk(endpoint: Any) -> None:
        model = langchain.ChatOpenAI(base_url=endpoint.url, api_key=endpoint.key, model="policy")
        structured = model.with_structured_output(Answer, method=method)
        assert await structured.ainvoke("json?") == ANSWER

    called = f'<tool_call>\n{{"name": "Answer", "arguments": {SAYS}}}\n</tool_call>'
    _, (structure,) = episode(talk, called if method == "function_calling" else SAYS)
    assert structure


def test_langchain_by_responses() -> None:
    langchain = pytest.importorskip("langchain_openai")

    async def talk(endpoint: Any) -> None:
        model = langchain.ChatOpenAI(
            base_url=endpoint.url, api_key=endpoint.key, model="policy", use_responses_api=True
        )
        assert await model.with_structured_output(Answer).ainvoke("?") == ANSWER
        (part,) = (await model.ainvoke("?")).content
        assert part["text"] == "yes"
        chunks = [one async for one in model.astream("?")]
        assert "".join(one.text for one in chunks) == "streamed"

    episode(talk, SAYS, "yes", "streamed")


@pytest.mark.parametrize("mode", ["tool", "native", "prompted"])
@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(mode: str, api: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai import models
    from pydantic_ai.models import openai as openai_models
    from pydantic_ai.providers.openai import OpenAIProvider

    models.ALLOW_MODEL_REQUESTS = True

    async def talk(endpoint: Any) -> None:
        provider = OpenAIProvider(openai_client=client(endpoint))
        model = getattr(openai_models, api)("policy", provider=provider)
        output = {
            "tool": ai.ToolOutput(Answer, name="final"),
            "native": ai.NativeOutput(Answer),
            "prompted": ai.PromptedOutput(Answer),
        }[mode]
        agent = ai.Agent(model, output_type=output)

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            return a + b

        made = await agent.run("?")
        assert made.output == ANSWER

    final = f'<tool_call>\n{{"name": "final", "arguments": {SAYS}}}\n</tool_call>'
    ended, structures = episode(talk, CALL, final if mode == "tool" else SAYS)
    assert all(structures)
    assert ended.played is not None
    assert ended.played.trajectory.num_branches == 1


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_agents_sdk(api: str, is_streamed: bool) -> None:
    sdk = pytest.importorskip("agents", reason="openai-agents")
    from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
    from agents.models.openai_responses import OpenAIResponsesModel

    sdk.set_tracing_disabled(True)

    @sdk.function_tool
    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    async def talk(endpoint: Any) -> None:
        kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
        agent = sdk.Agent(
            name="mine",
            instructions="Be brief.",
            model=kind(model="policy", openai_client=client(endpoint)),
            tools=[add],
            output_type=Answer,
            model_settings=sdk.ModelSettings(tool_choice="required"),
        )
        if is_streamed:
            made = sdk.Runner.run_streamed(agent, "?")
            async for _ in made.stream_events():
                pass
        else:
            made = await sdk.Runner.run(agent, "?")
        assert made.final_output == ANSWER

    ended, structures = episode(talk, CALL, SAYS)
    assert all(structures)
    assert ended.played is not None
    assert ended.played.trajectory.num_branches == 1
