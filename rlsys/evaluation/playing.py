"""Plays an environment with a model, without a cluster: to see, or to measure, what it has learnt.

    tasks ─► EpisodeHost ──turns──► generation engine, one of each model
                  └──► Ended: what each episode was and what it was worth, or why there is nothing

Everything runs in this process, plain functions in one of their own. Replies are sampled as in
training, from seeds that depend on the episode alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlsys.common.random_streams import request_seed
from rlsys.common.run_sync import run_to_end
from rlsys.config import (
    FrozenModelConfig,
    Precision,
    RewardConfig,
    RoleConfig,
    RolloutConfig,
    SamplingConfig,
    check_quantized,
    require,
)
from rlsys.data.hub import offline_where_unreachable
from rlsys.data.prompts import load_policy_tokenizer, load_tokenizer
from rlsys.data.vocabulary_check import check_vocabularies
from rlsys.engines.generation.engine_choice import build_engine
from rlsys.engines.generation.generation_protocol import EngineError, GenerationEngine
from rlsys.engines.models.model_shape import model_shape
from rlsys.environments.environment import Environment, as_environment
from rlsys.environments.episode import Partner, Played
from rlsys.environments.episode_host import Ended, EpisodeHost, EpisodeRequest, codec_of, make_host
from rlsys.environments.token_budget import EpisodeLimits
from rlsys.environments.workers.loop_watchdog import Blocked, watched
from rlsys.errors import RunFailed
from rlsys.evaluation.seats import SeatModel, check_seats, seat_models, tell_others
from rlsys.types import Generation, GenerationRequest

Tasks = Sequence[Mapping[str, Any]]

START_TIMEOUT_S = 300.0  # for plain functions to be loaded

# Episodes that are played at a time, in multiples of the requests that the engine runs at a time.
OPEN = 2


log = logging.getLogger(__name__)


def tell_blocked(blocked: Blocked) -> None:
    """Nothing else can be done where the episodes run in the user's own process."""
    log.warning(
        "an episode has %s, and nothing else goes on meanwhile: what takes so long is awaited, or "
        "belongs in a plain function (def)",
        blocked.message,
    )


@dataclass(frozen=True, kw_only=True)
class EpisodePlayer:
    """How a model plays: `num_episodes` of each task, which are a group. `seats`: who plays in its
    place, by the environment's names.
    """

    model: FrozenModelConfig
    seats: Mapping[str, SeatModel] = field(default_factory=dict)
    sampling: SamplingConfig
    num_episodes: int = 1
    greedy: bool = False  # the likeliest token each time
    max_prompt_tokens: int = 1024  # of an episode's first prompt
    template_options: Sequence[str] = ()  # of the model's chat template, as NAME=VALUE
    seed: int = 0
    rollout: RolloutConfig
    reward: RewardConfig

    async def play(
        self,
        environment: Environment,
        tasks: Tasks,
        on_ended: Callable[[EpisodeHost, Ended], None],
        on_blocked: Callable[[Blocked], None] = tell_blocked,
    ) -> float:
        """`on_ended` is given each episode, in no order, and the host that played it. `on_blocked`
        is called, in another thread, when one blocks the event loop for 30 s. Returns the seconds
        that it took, without the start. Raises ValueError for a mistake in model or
        environment that shows before anything is played; EngineError if the engine dies; what
        `on_ended` raises.
        """
        check_quantized(self.rollout, self.model.dtype)
        check_seats(environment, self.seats, self.rollout)
        tell_others(environment, self.seats, Path(self.model.path))
        longest = self.max_prompt_tokens + self.sampling.max_tokens
        async with contextlib.AsyncExitStack() as stack:
            paths = [self.model.path, *(seat.model.path for seat in self.seats.values())]
            stack.enter_context(offline_where_unreachable(*paths))
            for path in paths:
                self._check_context(path, longest)
            tokenizer = load_policy_tokenizer(self.model.path, self.template_options)
            others = {
                f"seats[{name!r}]": seat.model.path
                for name, seat in self.seats.items()
                if not seat.is_frozen
            }
            check_vocabularies(tokenizer, others)
            limits = EpisodeLimits(
                max_prompt_tokens=self.max_prompt_tokens,
                max_tokens=self.sampling.max_tokens,
                max_context=longest,
            )
            samplers: dict[FrozenModelConfig, _Sampler] = {}
            for model in (self.model, *(seat.model for seat in self.seats.values())):
                if model not in samplers:
                    engine = build_engine(model, self.rollout, self.sampling, max_context=longest)
                    stack.push_async_callback(engine.close)
                    await engine.start()
                    samplers[model] = _Sampler(engine)
            host = make_host(
                environment,
                tokenizer,
                samplers[self.model],
                limits=limits,
                memory_gib=self.reward.memory_gib,
                start_timeout_s=START_TIMEOUT_S,
                partners={
                    environment.seats.index(name): Partner(
                        sampler=samplers[seat.model],
                        codec=codec_of(environment, load_tokenizer(seat.model.path))
                        if seat.is_frozen
                        else None,
                    )
                    for name, seat in self.seats.items()
                },
            )
            stack.push_async_callback(host.close)
            await host.start()
            began = time.monotonic()
            with watched(on_blocked):
                await self._play(host, [*samplers.values()], tasks, on_ended)
            return time.monotonic() - began

    def _check_context(self, path: str, longest: int) -> None:
        max_context = model_shape(path).max_context
        require(
            longest <= max_context,
            f"max_prompt_tokens={self.max_prompt_tokens} and sampling.max_tokens="
            f"{self.sampling.max_tokens}, of a whole episode, are more than the context of "
            f"{max_context} tokens that {path} has; lower one of them.",
        )

    async def _play(
        self,
        host: EpisodeHost,
        samplers: Sequence[_Sampler],
        tasks: Tasks,
        on_ended: Callable[[EpisodeHost, Ended], None],
    ) -> None:
        groups = (self._group(place, task) for place, task in enumerate(tasks))
        num_open = 0
        sampling = [asyncio.create_task(sampler.run()) for sampler in samplers]
        collecting: asyncio.Task[list[Ended]] | None = None
        try:
            while True:
                while num_open < OPEN * self.rollout.max_running and (group := next(groups, [])):
                    host.submit(group)
                    num_open += len(group)
                if not num_open:
                    return
                collecting = asyncio.create_task(host.collect())
                await asyncio.wait({collecting, *sampling}, return_when=asyncio.FIRST_COMPLETED)
                for one in sampling:
                    if one.done():
                        one.result()  # raises
                for ended in collecting.result():
                    num_open -= 1
                    on_ended(host, ended)
        finally:
            tasks_left = [*sampling, *([] if collecting is None else [collecting])]
            for task in tasks_left:
                task.cancel()
            await asyncio.gather(*tasks_left, return_exceptions=True)

    def _group(self, place: int, task: Mapping[str, Any]) -> list[EpisodeRequest]:
        params = self.sampling.params()
        return [
            EpisodeRequest(
                request_id=f"{place}.{index}",
                task=task,
                sampling=params.greedy if self.greedy else params,
                seed=request_seed(self.seed, place, index),
                group_id=place,
                index=index,
                group_size=self.num_episodes,
            )
            for index in range(self.num_episodes)
        ]


class _Sampler:
    """Has an engine sample the turns of this process's episodes; `run` must be running."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._names = itertools.count()
        self._waiting: dict[str, asyncio.Future[Generation]] = {}

    async def run(self) -> None:
        """Hands out what the engine has sampled. Raises EngineError."""
        while True:
            for generation in await self._engine.collect():
                # Nobody waits for what was aborted.
                if (answer := self._waiting.pop(generation.request_id, None)) is not None:
                    answer.set_result(generation)

    async def sample(self, request: GenerationRequest) -> Generation:
        # An episode that is played again asks under the same name.
        name = f"{request.request_id}#{next(self._names)}"
        self._engine.submit([replace(request, request_id=name)])
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[name] = answer
        try:
            return replace(await answer, request_id=request.request_id)
        finally:
            if self._waiting.pop(name, None) is not None:  # cancelled
                await self._engine.abort([name])


def play(
    model: str | Path,
    environment: Any,
    tasks: Tasks,
    *,
    sampling: SamplingConfig,
    seats: Mapping[str, str | Path | RoleConfig] | None = None,
    num_episodes: int = 1,
    greedy: bool = False,
    max_prompt_tokens: int = 1024,
    seed: int = 0,
    dtype: Precision = "float32",
    rollout: RolloutConfig | None = None,
) -> list[Played]:
    """Have a trained model play an environment: `num_episodes` of each task, one task's behind the
    other's.

    `model` is a directory, such as a run's hf/, or a hub name. `played.total` is an episode's
    reward, `played.components` its parts by name, `played.transcript` who said what. With `greedy`
    the models say what is likeliest, token by token. `dtype` is the precision, a run's model.dtype.
    Ends on Ctrl-C, and works in a notebook.

    `seats`: who plays in the model's place, by the environment's names: the directory of another
    policy, such as a run's hf-NAME, or an rlsys.RoleConfig for a frozen model. Each has an engine
    of its own, as `rollout` says.

    Raises ValueError for a mistake in model, environment or tasks; RunFailed for an environment
    that raised or took too long in all its tries, with what it said, and for an engine that died.
    """
    require(len(tasks) > 0, "tasks=[] has nothing to play; give at least one.")
    require(num_episodes >= 1, f"num_episodes={num_episodes} plays nothing; use at least 1.")
    require(
        num_episodes == 1 or not greedy,
        f"num_episodes={num_episodes} of greedy=True are all the same; use 1, or sample.",
    )
    player = EpisodePlayer(
        model=FrozenModelConfig(path=str(model), dtype=dtype),
        seats=seat_models(seats, dtype),
        sampling=sampling,
        num_episodes=num_episodes,
        greedy=greedy,
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
        rollout=RolloutConfig() if rollout is None else rollout,
        reward=RewardConfig(),
    )
    environment = as_environment(environment)
    played: dict[tuple[int, int], Played] = {}

    def keep(host: EpisodeHost, ended: Ended) -> None:
        if ended.played is None:
            assert ended.failure is not None, "nobody aborts"
            raise RunFailed(f"{ended.failure.kind}: {ended.failure.message}")
        request = ended.request
        played[request.group_id, request.index] = ended.played

    try:
        run_to_end(lambda: player.play(environment, tasks, keep))
    except EngineError as error:
        raise RunFailed(str(error)) from error
    return [played[place] for place in sorted(played)]
