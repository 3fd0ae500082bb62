"""Agents that use the endpoint of a host with a scripted policy and chat templates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

import rlsys
from rlsys.environments.environment import Environment
from rlsys.environments.episode_host import Ended, EpisodeHost, SyncExecutor
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from tests.environments.playing import InThreads, Says, Scripted, played, request
from tests.environments.templates import CHATML, tokenizer

LIMITS = EpisodeLimits(max_prompt_tokens=600, max_tokens=1000, max_context=2000)


def client(endpoint: rlsys.Endpoint, **options: Any) -> Any:
    """OpenAI's own; not typed, since its types ask for its own kinds of dictionaries."""
    return openai.AsyncOpenAI(
        **{"base_url": endpoint.url, "api_key": endpoint.key, "max_retries": 0, **options}
    )


class Asking:
    """A host for tests, open while it is entered."""

    def __init__(
        self,
        agent: Environment,
        says: Says,
        *,
        template: str = CHATML,
        limits: EpisodeLimits = LIMITS,
        sampler: Any = None,
        executor: SyncExecutor | None = None,
    ) -> None:
        self.codec = Codec(tokenizer(), chat_template=template)
        end = tokenizer().convert_tokens_to_ids("<|im_end|>")
        self.sampler: Any = Scripted(self.codec, says, end=end) if sampler is None else sampler
        self.host = EpisodeHost(
            agent,
            self.codec,
            self.sampler,
            limits=limits,
            executor=InThreads() if executor is None else executor,
            template=template or None,
        )


@asynccontextmanager
async def asking(agent: Environment, says: Says, **named: Any) -> AsyncIterator[Asking]:
    made = Asking(agent, says, **named)
    await made.host.start()
    try:
        yield made
    finally:
        await made.host.close()


def play(agent: Environment, says: Says, task: Any = None, **named: Any) -> tuple[Ended, Asking]:
    """One episode of it."""

    async def run() -> tuple[Ended, Asking]:
        async with asking(agent, says, **named) as made:
            (ended,) = await asyncio.wait_for(played(made.host, [request(task=task)]), 60)
        return ended, made

    return asyncio.run(run())
