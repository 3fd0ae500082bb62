"""Playing an environment with a trained model, without a cluster.

    tasks ─► EpisodeHost ──turns──► generation engine, one for each model
                  └──► Ended: transcript and reward of an episode, or the reason of its failure

Everything runs in this process, except synchronous functions, which have a subprocess. Replies are
sampled as in training, from seeds that depend only on the episode.
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
    check_whole_weights,
)
from rlsys.config.checks import check_at_least
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
from rlsys.errors import RunFailed, require
from rlsys.evaluation.seats import SeatModel, seat_models, warn_other_policies
from rlsys.types import Generation, GenerationRequest

Tasks = Sequence[Mapping[str, Any]]

START_TIMEOUT_S = 300.0  # for loading synchronous functions

# Episodes in progress, as a multiple of the requests that the engine runs at a time.
EPISODES_PER_REQUEST = 2

log = logging.getLogger(__name__)


def warn_blocked(blocked: Blocked) -> None:
    """Log that an episode blocks the event loop, which this process cannot interrupt."""
    log.warning(
        "an episode has %s, and everything waits for it. Await slow calls, or move them to a plain "
        "function (def)",
        blocked.message,
    )


@dataclass(frozen=True, kw_only=True)
class EpisodePlayer:
    """Settings of the episodes that a model plays.

    Attributes:
        model: The main model.
        seats: Models that play seats instead of the main model, by the environment's names.
        sampling: Sampling of replies.
        num_episodes: Episodes of each task, which form a group.
        greedy: Whether to take the most likely token each time.
        max_prompt_tokens: Maximum number of tokens of an episode's first prompt.
        template_options: Options of the model's chat template, as NAME=VALUE.
        seed: Seed of sampling.
        rollout: Engine of each model.
        reward: Limits of synchronous functions.
    """

    model: FrozenModelConfig
    seats: Mapping[str, SeatModel] = field(default_factory=dict)
    sampling: SamplingConfig
    num_episodes: int = 1
    greedy: bool = False
    max_prompt_tokens: int = 1024
    template_options: Sequence[str] = ()
    seed: int = 0
    rollout: RolloutConfig
    reward: RewardConfig

    async def play(
        self,
        environment: Environment,
        tasks: Tasks,
        on_ended: Callable[[EpisodeHost, Ended], None],
        on_blocked: Callable[[Blocked], None] = warn_blocked,
    ) -> float:
        """Play all tasks and return the seconds that it took, without the start.

        Args:
            environment: The environment.
            tasks: Rows to play.
            on_ended: Called with the host and each episode, in no particular order. Its exceptions
                are raised.
            on_blocked: Called in another thread when an episode blocks the event loop for 30 s.

        Raises:
            ValueError: A mistake in the models or the environment, found before playing.
            EngineError: An engine died.
            FloatingPointError: A model gives no finite probabilities.
        """
        longest = self.max_prompt_tokens + self.sampling.max_tokens
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(offline_where_unreachable(*self._paths))
            tokenizer = self.check(environment)
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

    @property
    def _paths(self) -> list[str]:
        return [self.model.path, *(seat.model.path for seat in self.seats.values())]

    def check(self, environment: Environment) -> Any:
        """Check models and seats without loading weights; return the main model's tokenizer.

        Raises:
            ValueError: A model cannot be read, or does not fit the environment or the limits.
        """
        environment.check_seats("seats", self.seats)
        models = {"": self.model} | {f"seats[{n!r}].": seat.model for n, seat in self.seats.items()}
        check_whole_weights(self.rollout)
        for prefix, model in models.items():
            check_quantized(self.rollout, model.dtype, f"{prefix}model.dtype")
        warn_other_policies(environment, self.seats, Path(self.model.path))
        for path in self._paths:
            self._check_context(path, self.max_prompt_tokens + self.sampling.max_tokens)
        tokenizer = load_policy_tokenizer(self.model.path, self.template_options)
        others = {
            f"seats[{name!r}]": seat.model.path
            for name, seat in self.seats.items()
            if not seat.is_frozen
        }
        check_vocabularies(tokenizer, others)
        return tokenizer

    def _check_context(self, path: str, longest: int) -> None:
        max_context = model_shape(path).max_context
        require(
            longest <= max_context,
            "max_prompt_tokens",
            self.max_prompt_tokens,
            rule=f"with sampling.max_tokens={self.sampling.max_tokens} a whole episode exceeds the "
            f"context of {max_context} tokens of {path}",
            fix="Lower one of them.",
        )

    async def _play(
        self,
        host: EpisodeHost,
        samplers: Sequence[_Sampler],
        tasks: Tasks,
        on_ended: Callable[[EpisodeHost, Ended], None],
    ) -> None:
        groups = (self._group(place, task) for place, task in enumerate(tasks))
        num_open, most_open = 0, EPISODES_PER_REQUEST * self.rollout.max_running
        sampling = [asyncio.create_task(sampler.run()) for sampler in samplers]
        collecting: asyncio.Task[list[Ended]] | None = None
        try:
            while True:
                while num_open < most_open and (group := next(groups, [])):
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
    """Client of an engine for the turns of episodes. `run` must run meanwhile."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._names = itertools.count()
        self._waiting: dict[str, asyncio.Future[Generation]] = {}

    async def run(self) -> None:
        """Pass the engine's completions to the callers of `sample`.

        Raises:
            EngineError: The engine died.
            FloatingPointError: The model gives no finite probabilities.
        """
        while True:
            for generation in await self._engine.collect():
                generation.raise_failure()
                # Aborted requests have no waiting caller.
                if (answer := self._waiting.pop(generation.request_id, None)) is not None:
                    answer.set_result(generation)

    async def sample(self, request: GenerationRequest) -> Generation:
        """Return the completion of a request."""
        # A repeated episode uses the same request id.
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
    """Play an environment with a trained model and return the episodes.

    The function works in notebooks and ends on Ctrl-C.

    Args:
        model: Directory, such as the hf/ of a run, or hub name.
        environment: The environment.
        tasks: Rows to play.
        sampling: Sampling of replies.
        seats: Models that play seats instead of `model`, by the environment's names: the directory
            of another policy, such as the hf-NAME of a run, or an rlsys.RoleConfig for a frozen
            model. Each model has its own engine.
        num_episodes: Episodes of each task.
        greedy: Take the most likely token each time instead of sampling.
        max_prompt_tokens: Maximum number of tokens of an episode's first prompt.
        seed: Seed of sampling.
        dtype: Precision of the models, such as the model.dtype of a run.
        rollout: Settings of each engine, by default those of RolloutConfig.

    Returns:
        The episodes, task by task. `total` is the reward, `components` its parts by name and
        `transcript` the messages.

    Raises:
        ValueError: A mistake in the models, the environment or the tasks.
        RunFailed: The environment raised or timed out in all attempts, or an engine died.
    """
    require(len(tasks) > 0, "tasks", tasks, rule="must not be empty", fix="Give at least one task.")
    check_at_least("num_episodes", num_episodes, 1)
    require(
        num_episodes == 1 or not greedy,
        "num_episodes",
        num_episodes,
        rule="episodes with greedy=True are all the same",
        fix="Use 1, or sample.",
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
            assert ended.failure is not None, "episodes are not aborted here"
            raise RunFailed(f"{ended.failure.kind}: {ended.failure.message}")
        request = ended.request
        played[request.group_id, request.index] = ended.played

    try:
        run_to_end(lambda: player.play(environment, tasks, keep))
    except (EngineError, FloatingPointError) as error:
        raise RunFailed(str(error)) from error
    return [played[place] for place in sorted(played)]
