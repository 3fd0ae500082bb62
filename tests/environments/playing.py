"""Helpers that play episodes without an engine: a scripted sampler and a host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from rlsys.environments.chat import Chat
from rlsys.environments.environment import Endpoint, Environment
from rlsys.environments.episode_host import Ended, EpisodeHost, EpisodeRequest
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.launcher.tiny_models import build_tokenizer
from rlsys.types import FinishReason, Generation, GenerationRequest, SamplingParams

CHARACTERS = "0123456789?<>+- "
LIMITS = EpisodeLimits(max_prompt_tokens=16, max_tokens=64, max_context=80)

Says = Callable[[str], str]  # text so far -> reply


class Scripted:
    """Sampler of the replies of `says`, followed by the token `end` if it fits; version 7.

    With `cuts_at_end`, a reply counts as cut although its end fits.
    """

    def __init__(self, codec: Codec, says: Says, delay_s: float = 0.0, end: int = 2) -> None:
        self.codec = codec
        self._says = says
        self._delay_s = delay_s
        self.end = end
        self.cuts_at_end = False
        self.asked: list[GenerationRequest] = []
        self.sampled: list[Generation] = []

    async def sample(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        await asyncio.sleep(self._delay_s)
        text = self._says(self.codec.boundary.decode(list(request.prompt_token_ids)))
        token_ids = [*self.codec.text.encode_plain(text), self.end]
        is_cut = self.cuts_at_end or len(token_ids) > request.sampling.max_tokens
        token_ids = token_ids[: request.sampling.max_tokens]
        generation = Generation(
            request_id=request.request_id,
            token_ids=np.array(token_ids, np.int32),
            sampler_logprobs=np.full(len(token_ids), -0.5, np.float32),
            policy_versions=np.full(len(token_ids), 7, np.int32),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )
        self.sampled.append(generation)
        return generation


class InThreads:
    """Executor for async environments; runs synchronous tools in threads."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    @asynccontextmanager
    async def place(self, *, alone: bool) -> AsyncIterator[None]:
        yield

    async def play(self, chat: Chat, task: Any) -> Any:
        raise AssertionError("the environment is async")

    async def act(self, endpoint: Endpoint, task: Any) -> Any:
        raise AssertionError("the agent is async")

    async def execute(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        return await asyncio.to_thread(function, *args, **named)


def hosted(
    environment: Environment,
    says: Says,
    *,
    limits: EpisodeLimits = LIMITS,
    delay_s: float = 0.0,
    characters: str = CHARACTERS,
) -> tuple[EpisodeHost, Scripted]:
    codec = Codec(build_tokenizer(characters), chat_template="")
    sampler = Scripted(codec, says, delay_s)
    return EpisodeHost(environment, codec, sampler, limits=limits, executor=InThreads()), sampler


def request(index: int = 0, *, group_size: int = 1, task: Any = None) -> EpisodeRequest:
    return EpisodeRequest(
        request_id=f"0.{index}.0",
        task=task or {},
        sampling=SamplingParams(max_tokens=64),
        seed=index,
        group_id=0,
        index=index,
        group_size=group_size,
    )


async def played(host: EpisodeHost, requests: Sequence[EpisodeRequest]) -> list[Ended]:
    """Play episodes; return them in the order of the requests."""
    host.submit(requests)
    ended: list[Ended] = []
    while len(ended) < len(requests):
        ended += await host.collect()
    order = [one.request_id for one in requests]
    return sorted(ended, key=lambda one: order.index(one.request.request_id))
