"""Agents that use the endpoint, with a tiny model in the torch engine as policy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rlsys.config import RolloutConfig
from rlsys.engines.generation.torch.torch_engine import TorchEngine
from rlsys.environments.environment import Environment
from rlsys.environments.episode_host import Ended, EpisodeHost
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.tokens.codec import Codec
from rlsys.types import Generation, GenerationRequest
from tests.environments.playing import InThreads, played, request

# Tools are rendered, and written as Hermes does.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call | tojson }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
THINKING = TEMPLATE.replace(
    "{{ m.role + ': ' + m.content + '\n' }}",
    "{{ m.role + ': ' }}{% if m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content + '\n' }}",
)
LIMITS = EpisodeLimits(max_prompt_tokens=800, max_tokens=1200, max_context=2000)


class FromEngine:
    """A sampler for episodes."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self.asked: list[GenerationRequest] = []
        self.sampled: list[Generation] = []

    async def sample(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        done = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = done
        self._engine.submit([request])
        generation: Generation = await done
        self.sampled.append(generation)
        return generation

    async def run(self) -> None:
        while True:
            for generation in await self._engine.collect():
                self._waiting.pop(generation.request_id).set_result(generation)


def play_engine(
    path: Path, agent: Environment, *, template: str = TEMPLATE, **options: Any
) -> tuple[Ended, FromEngine]:
    """Play one episode."""

    async def run() -> tuple[Ended, FromEngine]:
        engine = TorchEngine(path, RolloutConfig(kv_cache_gib=0.1), dtype="float32")
        await engine.start()
        sampler = FromEngine(engine)
        answering = asyncio.create_task(sampler.run())
        host = EpisodeHost(
            agent,
            Codec(AutoTokenizer.from_pretrained(path), chat_template=template),
            sampler,
            limits=LIMITS,
            executor=InThreads(),
            template=template,
            **options,
        )
        await host.start()
        try:
            (ended,) = await asyncio.wait_for(played(host, [request()]), 300)
        finally:
            await host.close()
            answering.cancel()
            await engine.close()
        return ended, sampler

    return asyncio.run(run())
