"""Evaluates a model on held-out prompts, or on tasks of an environment, without a cluster.

    prompts ─► generation engine ─► completions ─► reward functions ─► scores ─► pass_at_k.py
    tasks ─► playing.py ─► episodes ────────────────────────────────────┘

In: a configuration and reward functions, or an environment. Out: pass@k, mean@n and what they come
from. Samples are scored while others are still being drawn. Reward functions run in the supervised
process that they have in training too, under the same limits, so that one that hangs fails its own
sample only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlsys import metrics
from rlsys.common.random_streams import request_seed
from rlsys.config import (
    DataConfig,
    FrozenModelConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    check_quantized,
    check_samples,
    require,
)
from rlsys.config.fields import Section, conform
from rlsys.data.hub import offline_where_unreachable
from rlsys.data.prompts import PromptSource, TaskSource, load_policy_tokenizer
from rlsys.data.row_source import RowSource
from rlsys.data.source_names import hub_names
from rlsys.engines.generation.engine_choice import build_engine
from rlsys.engines.generation.generation_protocol import GenerationEngine
from rlsys.engines.models.model_shape import model_shape
from rlsys.environments.environment import Environment
from rlsys.environments.episode_host import Ended, EpisodeHost
from rlsys.environments.workers.loop_watchdog import Blocked
from rlsys.evaluation.pass_at_k import Estimate, as_metrics, bootstrap, evaluate
from rlsys.evaluation.playing import EpisodePlayer, tell_blocked
from rlsys.evaluation.seats import SeatModel
from rlsys.rewards import (
    PackedRewards,
    Reward,
    RewardFailure,
    RewardResult,
    RewardRunner,
    as_rewards,
    pack_rewards,
)
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import FinishReason, Generation, GenerationRequest, Prompt, Rollout, SamplingParams

START_TIMEOUT_S = 300.0  # for reward functions to be loaded

Rows = Sequence[Mapping[str, Any]]

# Requests that the engine has, in multiples of those that it runs at a time.
QUEUED = 2


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """One evaluation."""

    rewards: tuple[str, ...] = ()
    """Reward functions, whose weighted sum is a sample's score: numeric_answer, exact_match or
    math_answer (which read the column "answer", or another as numeric_answer:COLUMN),
    module:function, or file.py:function."""
    environment: str = ""
    """In place of rewards, an environment that is played, whose tasks are the data's rows:
    module:function or file.py:function."""
    seats: tuple[str, ...] = ()
    """Other policies, as SEAT=MODEL, such as second=runs/mine/hf-rival: they play these seats of
    the environment; the model plays the others."""
    frozen_seats: tuple[str, ...] = ()
    """As seats, of models that stayed as they are in training, with tokens of their own."""
    num_samples: int = 1
    """Completions for each prompt, or episodes of each task."""
    k: tuple[int, ...] = (1,)
    """Each k of pass@k: the probability that one of k completions is right."""
    right_at: float = 1.0
    """Score from which on a completion counts as right; an episode's score is its reward."""
    greedy: bool = False
    """The most likely token each time, instead of samples; needs num_samples=1."""
    num_prompts: int | None = None
    """Prompts or tasks to evaluate on, the first ones, or with data.shuffle any; unset: all."""
    seed: int = 0
    """Of sampling and of the order of prompts."""
    out: str | None = None
    """File to write the samples to, a JSON line each."""
    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(split="test", shuffle=False))
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        conform(self, "")
        check_samples(self.num_samples, self.k, self.greedy, self.num_prompts)
        require(
            self.model.path != "",
            "no model is given; give a Hugging Face model directory or hub name.",
        )
        check_quantized(self.rollout, self.model.dtype)
        require(
            bool(self.environment) or not (self.seats or self.frozen_seats),
            "seats are those of an environment; give one, or leave seats and frozen_seats out.",
        )
        self.seat_models()

    @property
    def params(self) -> SamplingParams:
        sampled = self.sampling.params()
        return sampled.greedy if self.greedy else sampled

    def seat_models(self) -> dict[str, SeatModel]:
        """By the seat's name. Raises ValueError for what is no SEAT=MODEL, or is there twice."""
        models: dict[str, SeatModel] = {}
        for option, given in (("seats", self.seats), ("frozen_seats", self.frozen_seats)):
            for one in given:
                name, _, path = one.partition("=")
                require(
                    bool(name and path),
                    f"{option}: {one!r} is no SEAT=MODEL; write such as second=runs/mine/hf-rival.",
                )
                require(
                    name not in models, f"{option}: seat {name!r} is given twice; leave one out."
                )
                model = FrozenModelConfig(path=path, dtype=self.model.dtype)
                models[name] = SeatModel(model=model, is_frozen=option == "frozen_seats")
        return models


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion of one prompt, scored; or an episode of a task, with who said what. Of an
    episode whose environment failed there is nothing: its rollout is empty, and ABORTED.
    """

    rollout: Rollout
    outcome: RewardResult | RewardFailure
    transcript: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    estimates: Mapping[str, Estimate]
    """By metric, such as "eval/pass@1"; also of each of several rewards, or parts of one, as
    "eval/found/mean"."""
    num_prompts: int
    """That the estimates are of; or tasks."""
    num_left_out: int
    """Prompts without as many scored samples as the largest k."""
    failed: Mapping[str, int]
    """Samples whose reward failed, by reason; they are in no estimate."""
    first_failure: str | None
    """What the first of them says."""
    tokens_mean: float
    """Of completions."""
    truncated_frac: float
    """Completions that the limit on tokens ended."""
    seconds: float
    """Of sampling and scoring, without the start."""

    def as_metrics(self) -> dict[str, float]:
        """For a line of evaluations.jsonl."""
        return {
            **as_metrics(self.estimates),
            metrics.EVAL_PROMPTS: self.num_prompts,
            metrics.EVAL_TOKENS_MEAN: self.tokens_mean,
            metrics.EVAL_TRUNCATED_FRAC: self.truncated_frac,
            metrics.EVAL_FAILED: sum(self.failed.values()),
            metrics.TIME_EVALUATION_S: self.seconds,
        }


async def evaluate_model(
    config: EvaluationConfig,
    functions: Sequence[Reward],
    *,
    rows: Rows | None = None,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> Evaluation:
    """`rows` replace the dataset of config.data; `on_sample` gets each sample when it is scored, in
    no order.

    Raises ValueError for a mistake in model, data or rewards, before anything is sampled where it
    can be told by then, and where no reward could be computed; EngineError if the engine dies.
    """
    rewards = as_rewards(functions)
    return await evaluate_packed(
        config, pack_rewards(rewards), checked=rewards, rows=rows, on_sample=on_sample
    )


async def evaluate_packed(
    config: EvaluationConfig,
    rewards: PackedRewards,
    *,
    checked: Sequence[Reward] = (),
    rows: Rows | None = None,
    on_sample: Callable[[Sample], None],
) -> Evaluation:
    """As `evaluate_model`. The data is searched for what the rewards in `checked` read."""
    with offline_where_unreachable(*_hub_names(config, rows)):
        max_context = model_shape(config.model.path).max_context
        tokenizer = load_policy_tokenizer(config.model.path, config.data.template_options)
        prompts = held_out_prompts(config, tokenizer, max_context, checked, rows)
        engine = build_engine(
            config.model,
            config.rollout,
            config.sampling,
            max_context=config.data.max_prompt_tokens + config.sampling.max_tokens,
        )
        runner = RewardRunner(
            rewards,
            concurrency=config.reward.concurrency,
            timeout_s=config.reward.timeout_s,
            memory_gib=config.reward.memory_gib,
            start_timeout_s=START_TIMEOUT_S,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(runner.close)
            await runner.start()
            stack.push_async_callback(engine.close)
            await engine.start()
            began = time.monotonic()
            samples = await _samples(config, engine, runner, tokenizer, prompts, on_sample)
            seconds = time.monotonic() - began
    return _evaluation(config, samples, seconds)


async def evaluate_played(
    config: EvaluationConfig,
    environment: Environment,
    *,
    rows: Rows | None = None,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    on_blocked: Callable[[Blocked], None] = tell_blocked,
) -> Evaluation:
    """As `evaluate_model`, of episodes: the data's rows are tasks, and the environment says what
    one is worth. An episode that fails in all its tries is a sample whose reward failed.
    `on_blocked`: as of `EpisodePlayer.play`.
    """
    with offline_where_unreachable(*_hub_names(config, rows)):
        tasks = held_out_tasks(config, environment, rows)
        player = EpisodePlayer(
            model=config.model,
            seats=config.seat_models(),
            sampling=config.sampling,
            num_episodes=config.num_samples,
            greedy=config.greedy,
            max_prompt_tokens=config.data.max_prompt_tokens,
            template_options=config.data.template_options,
            seed=config.seed,
            rollout=config.rollout,
            reward=config.reward,
        )
        samples: list[Sample] = []

        def on_ended(host: EpisodeHost, ended: Ended) -> None:
            samples.append(_sample(host, ended))
            on_sample(samples[-1])

        seconds = await player.play(environment, tasks, on_ended, on_blocked)
    return _evaluation(config, samples, seconds)


def _sample(host: EpisodeHost, ended: Ended) -> Sample:
    played, request = ended.played, ended.request
    if played is not None:
        outcome = RewardResult(total=played.total, components=played.components)
        return Sample(rollout=host.rollout(ended), outcome=outcome, transcript=played.transcript)
    assert ended.failure is not None, "nobody aborts"
    nothing = np.empty(0, np.int32)
    rollout = Rollout(
        group_id=request.group_id,
        index=request.index,
        prompt_text="",
        completion_text="",
        prompt_token_ids=nothing,
        token_ids=nothing,
        finish_reason=FinishReason.ABORTED,
        metadata=request.task,
    )
    return Sample(rollout=rollout, outcome=ended.failure)


def _hub_names(config: EvaluationConfig, rows: Rows | None) -> list[str]:
    """What may have to come from the hub."""
    names = [config.model.path]
    return names + (hub_names(config.data.source) if rows is None else [])


def held_out_tasks(
    config: EvaluationConfig,
    environment: Environment,
    rows: Rows | None = None,
    *,
    of_a_run: bool = False,
) -> list[Mapping[str, Any]]:
    """As `held_out_prompts`: what an environment plays."""
    source = TaskSource(config.data, seed=config.seed, rows=rows, held_out=of_a_run, evaluated=True)
    source.check_required(environment.required_columns, f"environment {environment.name!r}")
    return [one.metadata for one in _first(config, source, "tasks", of_a_run=of_a_run)]


def held_out_prompts(
    config: EvaluationConfig,
    tokenizer: Any,
    max_context: int,
    rewards: Sequence[Reward],
    rows: Rows | None = None,
    completions: tuple[str, int] | None = None,
    *,
    preferences: bool = False,
    of_a_run: bool = False,
) -> list[Prompt]:
    """Return the prompts of an evaluation; `completions` and `preferences` as in PromptSource. With
    `of_a_run`, errors name a run's settings. Raises ValueError for data that cannot be used, or is
    too little.
    """
    source = PromptSource(
        config.data,
        tokenizer,
        seed=config.seed,
        max_tokens=config.sampling.max_tokens,
        max_context=max_context,
        rows=rows,
        completions=completions,
        preferences=preferences,
        held_out=of_a_run,
        evaluated=True,
    )
    source.check_rewards(rewards)
    return _first(config, source, "prompts", of_a_run=of_a_run)


def _first(
    config: EvaluationConfig, source: RowSource, what: str, *, of_a_run: bool
) -> list[Prompt]:
    """As many as are evaluated on. Raises ValueError where there are too few."""
    num = len(source) if config.num_prompts is None else config.num_prompts
    prefix = "evaluation." if of_a_run else ""
    require(
        2 <= num <= len(source),
        f"{prefix}num_prompts={num}, but {source.where} has {len(source)} {what} that can be "
        "used, and an interval needs 2; use 2 to that many, or more data.",
    )
    return [source.at(index) for index in range(num)]


async def _samples(
    config: EvaluationConfig,
    engine: GenerationEngine,
    runner: RewardRunner,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    on_sample: Callable[[Sample], None],
) -> list[Sample]:
    requests = _requests(config, prompts)
    read, stop = TokenizerBoundary(tokenizer).completion_text, config.sampling.stop
    places = {f"{p.index}-{i}": (p, i) for p in prompts for i in range(config.num_samples)}
    samples: list[Sample] = []

    async def score(generations: Sequence[Generation]) -> None:
        rollouts = [
            _rollout(*places[g.request_id], g, read(g.token_ids.tolist(), g.finish_reason, stop))
            for g in generations
        ]
        for rollout, outcome in zip(rollouts, await runner.score(rollouts), strict=True):
            samples.append(Sample(rollout=rollout, outcome=outcome))
            on_sample(samples[-1])

    scoring: list[asyncio.Task[None]] = []
    try:
        num_open = num_ended = 0
        while num_ended < len(places):
            room = QUEUED * config.rollout.max_running - num_open
            batch = [request for _, request in zip(range(room), requests, strict=False)]
            engine.submit(batch)
            ended = await engine.collect()
            scoring.append(asyncio.create_task(score(ended)))
            num_open += len(batch) - len(ended)
            num_ended += len(ended)
        await asyncio.gather(*scoring)
    finally:
        for task in scoring:
            task.cancel()
    return samples


def _requests(config: EvaluationConfig, prompts: Sequence[Prompt]) -> Iterator[GenerationRequest]:
    for prompt in prompts:
        for i in range(config.num_samples):
            yield GenerationRequest(
                request_id=f"{prompt.index}-{i}",
                prompt_token_ids=prompt.token_ids,
                sampling=config.params,
                seed=request_seed(config.seed, prompt.index, i),
                goes_on=False,
            )


def _rollout(prompt: Prompt, index: int, generation: Generation, text: str) -> Rollout:
    return Rollout(
        group_id=prompt.index,
        index=index,
        prompt_text=prompt.text,
        completion_text=text,
        prompt_token_ids=np.array(prompt.token_ids, np.int32),
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason,
        metadata=prompt.metadata,
    )


def _evaluation(config: EvaluationConfig, samples: Iterable[Sample], seconds: float) -> Evaluation:
    # In the order of prompts and samples: sums do not depend on which was scored first.
    samples = sorted(samples, key=lambda one: (one.rollout.group_id, one.rollout.index))
    scored: dict[int, list[RewardResult]] = {one.rollout.group_id: [] for one in samples}
    failures: list[RewardFailure] = []
    for one in samples:
        if isinstance(one.outcome, RewardFailure):
            failures.append(one.outcome)
        else:
            scored[one.rollout.group_id].append(one.outcome)
    enough = [of_prompt for of_prompt in scored.values() if len(of_prompt) >= max(config.k)]
    first_failure = f"{failures[0].kind}: {failures[0].message}" if failures else None
    require(
        len(enough) >= 2,
        f"only {len(enough)} of {len(scored)} prompts have {max(config.k)} samples whose reward "
        f"did not fail; mend the reward. The first failure: {first_failure}",
    )
    totals = [[one.total for one in of_prompt] for of_prompt in enough]
    reasons = [one.rollout.finish_reason for one in samples]
    num_whole = sum(reason != FinishReason.ABORTED for reason in reasons)
    return Evaluation(
        estimates={
            **evaluate(totals, ks=config.k, right_at=config.right_at, seed=config.seed),
            **_parts(enough, seed=config.seed),
        },
        num_prompts=len(enough),
        num_left_out=len(scored) - len(enough),
        failed=dict(Counter(one.kind for one in failures)),
        first_failure=first_failure,
        tokens_mean=sum(len(one.rollout.token_ids) for one in samples) / num_whole,
        truncated_frac=sum(reason == FinishReason.LENGTH for reason in reasons) / num_whole,
        seconds=seconds,
    )


def _parts(scored: Sequence[Sequence[RewardResult]], *, seed: int) -> dict[str, Estimate]:
    """Means of what the scores are made of, where that is more than one number: of each reward
    before its weight, of each name that an environment gives. What a sample does not have is 0.
    """
    names = sorted({name for of_prompt in scored for one in of_prompt for name in one.components})
    means = {
        name: [
            math.fsum(one.components.get(name, 0.0) for one in of_prompt) / len(of_prompt)
            for of_prompt in scored
        ]
        for name in names
    }
    return {
        metrics.of_held_out(metrics.column_mean(name)): bootstrap(values, seed=seed)
        for name, values in means.items()
        if len(names) > 1
    }
