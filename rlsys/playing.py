"""Plays an environment with a trained model, without a cluster: to measure what it has learnt.

    tasks ─► EpisodeHost ──turns──► TurnDesk ─► generation engine
                  └──► Played: what each episode was, and what it was worth

Everything runs in this process, plain functions in one of their own. Replies are sampled as in
training; a task's episodes differ by their seeds, which depend on nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsys.config import (
    FrozenModelConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    require,
)
from rlsys.data.prompts import load_tokenizer
from rlsys.engines.generation.choice import build_engine
from rlsys.engines.generation.sampling import request_seed
from rlsys.engines.generation.weight_switch import WeightSwitch
from rlsys.environments.codec import Codec
from rlsys.environments.environment import as_environment
from rlsys.environments.episode import EpisodeLimits, Played
from rlsys.environments.host import EpisodeHost, EpisodeRequest
from rlsys.environments.plain import PlainFunctions
from rlsys.environments.turn_desk import Ask, TurnDesk
from rlsys.errors import RunFailed
from rlsys.types import Generation, GenerationRequest

START_TIMEOUT_S = 300.0  # for plain functions to be loaded

# A replica's answers are waited for this long, and then again.
POLL_S = 5.0

# The desk knows one asker here.
ASKER = "play"


def play(
    model: str | Path,
    environment: Any,
    tasks: Sequence[Mapping[str, Any]],
    *,
    sampling: SamplingConfig,
    num_episodes: int = 1,
    greedy: bool = False,
    max_prompt_tokens: int = 1024,
    seed: int = 0,
    rollout: RolloutConfig | None = None,
) -> list[Played]:
    """`num_episodes` of each task, one task after the other, with a model in a directory.

    `played.total` is an episode's reward, `played.components` its parts by name. `greedy`: the most
    likely token each time. Not to be called where an event loop runs.

    Raises ValueError for a mistake in model, environment or tasks; RunFailed for an environment
    that raised or took too long, with what it said.
    """
    require(bool(tasks), "tasks=[] has nothing to play; give at least one.")
    require(num_episodes >= 1, f"num_episodes={num_episodes} plays nothing; use at least 1.")
    rollout = RolloutConfig() if rollout is None else rollout
    return asyncio.run(
        _play(
            str(model),
            environment,
            tasks,
            sampling,
            num_episodes,
            greedy,
            max_prompt_tokens,
            seed,
            rollout,
        )
    )


async def _play(
    model: str,
    environment: Any,
    tasks: Sequence[Mapping[str, Any]],
    sampling: SamplingConfig,
    num_episodes: int,
    greedy: bool,
    max_prompt_tokens: int,
    seed: int,
    rollout: RolloutConfig,
) -> list[Played]:
    environment = as_environment(environment)
    tokenizer = load_tokenizer(model)
    template = None if environment.plain_text else tokenizer.chat_template or None
    max_context = max_prompt_tokens + sampling.max_tokens
    engine = build_engine(
        FrozenModelConfig(path=model), rollout, sampling, max_context=max_context
    )
    limits = EpisodeLimits(
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=sampling.max_tokens,
        max_context=max_context,
    )
    plain = PlainFunctions(
        environment,
        memory_gib=RewardConfig().memory_gib,
        start_timeout_s=START_TIMEOUT_S,
    )
    async with contextlib.AsyncExitStack() as stack:
        await engine.start()
        stack.push_async_callback(engine.close)
        asker = _Asker(TurnDesk(WeightSwitch(engine)))
        stack.push_async_callback(asker.close)
        codec = Codec(tokenizer, chat_template=template or "")
        host = EpisodeHost(
            environment, codec, asker, limits=limits, plain=plain, template=template
        )
        stack.push_async_callback(host.close)
        await host.start()
        params = sampling.params().greedy if greedy else sampling.params()
        requests = [
            EpisodeRequest(
                request_id=f"{place}-{index}",
                task=tasks[place],
                sampling=params,
                seed=request_seed(seed, place, index),
                group_id=place,
                index=index,
                group_size=num_episodes,
            )
            for place, index in itertools.product(range(len(tasks)), range(num_episodes))
        ]
        host.submit(requests)
        played: dict[str, Played] = {}
        while len(played) < len(requests):
            for ended in await host.collect():
                if ended.played is None:
                    said = ended.failure.message if ended.failure else "it was aborted"
                    raise RunFailed(f"{environment.name} failed: {said}")
                played[ended.request.request_id] = ended.played
        return [played[request.request_id] for request in requests]


class _Asker:
    """A `Sampler` before a desk of this process."""

    def __init__(self, desk: TurnDesk) -> None:
        self._desk = desk
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._tasks = [asyncio.create_task(one) for one in (desk.run(), self._listen())]

    async def sample(self, request: GenerationRequest) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        episode, _, turn = request.request_id.rpartition(".")
        self._desk.ask(ASKER, [Ask(episode=episode, turn=int(turn), request=request)])
        try:
            return await answer
        finally:
            self._waiting.pop(request.request_id, None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                for generation in await self._desk.answers(ASKER, POLL_S):
                    answer = self._waiting.get(generation.request_id)
                    if answer is not None and not answer.done():
                        answer.set_result(generation)
        # Whatever it is, nobody answers any more: all who wait are told.
        except Exception as error:  # noqa: BLE001
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)
