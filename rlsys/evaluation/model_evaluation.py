"""Evaluation of a model on held-out prompts or on tasks of an environment, without a cluster.

    prompts ─► generation engine ─► completions ─► reward functions ─► scores ─► pass_at_k.py
    tasks ─► playing.py ─► episodes ────────────────────────────────────┘

In: a configuration, and reward functions or an environment. Out: pass@k, mean@n and further
metrics. Samples are scored while others are generated. Reward functions run in a supervised process
with the same limits as in training, so that a function that hangs only fails its own sample.
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
    check_whole_weights,
)
from rlsys.config.fields import Section, conform
from rlsys.config.speculation import check_untrained
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
from rlsys.errors import require
from rlsys.evaluation.pass_at_k import Estimate, as_metrics, bootstrap, common_maximum, evaluate
from rlsys.evaluation.playing import EpisodePlayer, warn_blocked
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

START_TIMEOUT_S = 300.0  # for loading reward functions

Rows = Sequence[Mapping[str, Any]]

# Requests in the engine, as a multiple of those that it runs at a time.
QUEUED = 2


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """The evaluation."""

    rewards: tuple[str, ...] = ()
    """Reward functions whose weighted sum is the score of a sample: numeric_answer, exact_match or
    math_answer (with the column "answer", or another one as numeric_answer:COLUMN),
    module:function, or file.py:function."""
    tasks: tuple[str, ...] = ()
    """Benchmarks of lm-eval instead of own data and rewards, such as gsm8k,mmlu, or YAML files of
    tasks. num_prompts limits the examples of each; other options of sampling are those of the task.
    """
    environment: str = ""
    """Environment to play instead of rewards, as module:function or file.py:function. Its tasks are
    the rows of the data."""
    seats: tuple[str, ...] = ()
    """Other policies that play seats of the environment, as SEAT=MODEL, such as
    second=runs/mine/hf-rival. The model plays the other seats."""
    frozen_seats: tuple[str, ...] = ()
    """Like seats, for models that were not trained and have their own tokens."""
    num_samples: int = 1
    """Completions of each prompt, or episodes of each task."""
    k: tuple[int, ...] = (1,)
    """Each k of pass@k, the probability that at least one of k completions is right."""
    right_at: float = 1.0
    """Lowest score of a right completion. The score of an episode is its reward."""
    greedy: bool = False
    """Take the most likely token instead of sampling; needs num_samples=1."""
    num_prompts: int | None = None
    """Number of prompts or tasks, from the first one, or random ones with data.shuffle. Unset: all.
    """
    seed: int = 0
    """Random seed of sampling and of the order of prompts."""
    out: str | None = None
    """File for the samples, as JSON lines."""
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
            "model.path",
            self.model.path,
            rule="must not be empty",
            fix="Give a Hugging Face model directory or hub name.",
        )
        check_quantized(self.rollout, self.model.dtype)
        check_untrained(self.rollout.speculation, "an evaluation")
        check_whole_weights(self.rollout)
        require(
            not self.tasks or not (self.rewards or self.environment),
            "tasks",
            self.tasks,
            rule="bring their own scores",
            fix="Leave out rewards and environment, or tasks.",
        )
        require(
            bool(self.environment) or not (self.seats or self.frozen_seats),
            "seats",
            self.seats or self.frozen_seats,
            rule="needs an environment",
            fix="Give environment, or leave seats and frozen_seats out.",
        )
        self.seat_models()

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of each request."""
        sampled = self.sampling.params()
        return sampled.greedy if self.greedy else sampled

    def seat_models(self) -> dict[str, SeatModel]:
        """Return the models by seat.

        Raises:
            InvalidValue: An item is not SEAT=MODEL, or a seat is given twice.
        """
        models: dict[str, SeatModel] = {}
        for option, items in (("seats", self.seats), ("frozen_seats", self.frozen_seats)):
            for one in items:
                name, _, path = one.partition("=")
                require(
                    bool(name and path),
                    option,
                    one,
                    rule="must be SEAT=MODEL",
                    fix="Write such as second=runs/mine/hf-rival.",
                )
                require(
                    name not in models,
                    option,
                    one,
                    rule=f"seat {name!r} is given twice",
                    fix="Leave one out.",
                )
                model = FrozenModelConfig(path=path, dtype=self.model.dtype)
                models[name] = SeatModel(model=model, is_frozen=option == "frozen_seats")
        return models


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A scored completion of a prompt, or an episode of a task with its transcript.

    If the environment failed, the rollout is empty and its finish reason ABORTED.
    """

    rollout: Rollout
    outcome: RewardResult | RewardFailure
    transcript: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        estimates: Estimates by metric, such as "eval/pass@1". Several rewards, or parts of one,
            have their own, such as "eval/found/mean".
        num_prompts: Number of prompts or tasks in the estimates.
        num_left_out: Number of prompts with fewer scored samples than the largest k.
        common_maximum: Highest score, if it is below right_at and many samples have it.
        failed: Number of samples whose reward failed, by reason. They are in no estimate.
        first_failure: Message of the first failure.
        tokens_mean: Mean length of completions.
        truncated_frac: Fraction of completions that reached the limit on tokens.
        seconds: Duration of sampling and scoring, without the start.
    """

    estimates: Mapping[str, Estimate]
    num_prompts: int
    num_left_out: int
    common_maximum: float | None = None
    failed: Mapping[str, int]
    first_failure: str | None
    tokens_mean: float
    truncated_frac: float
    seconds: float

    def as_metrics(self) -> dict[str, float]:
        """Return the metrics of a line of evaluations.jsonl."""
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
    """Sample completions of held-out prompts, score them, and return the result.

    Args:
        config: Model, data and sampling.
        functions: Reward functions.
        rows: Rows that replace the dataset of config.data.
        on_sample: Called with each sample after it was scored, in no particular order.

    Raises:
        ValueError: A mistake in the model, the data or the rewards, if possible before sampling; or
            too few rewards could be computed.
        EngineError: The engine died.
        FloatingPointError: The model gives no finite probabilities.
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
    """Evaluate like `evaluate_model`. The data needs the columns of the rewards in `checked`."""
    with offline_where_unreachable(*_hub_names(config, rows)):
        tokenizer, prompts, engine = _prepared(config, checked, rows)
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


def _prepared(
    config: EvaluationConfig, rewards: Sequence[Reward], rows: Rows | None
) -> tuple[Any, list[Prompt], GenerationEngine]:
    """Return the tokenizer, the prompts and the engine, which is not started yet."""
    max_context = model_shape(config.model.path).max_context
    tokenizer = load_policy_tokenizer(config.model.path, config.data.template_options)
    prompts = held_out_prompts(config, tokenizer, max_context, rewards, rows)
    engine = build_engine(
        config.model,
        config.rollout,
        config.sampling,
        max_context=config.data.max_prompt_tokens + config.sampling.max_tokens,
    )
    return tokenizer, prompts, engine


def check_model(config: EvaluationConfig, functions: Sequence[Reward]) -> list[Prompt]:
    """Return the prompts of `evaluate_model` after all its checks that need no weights.

    Raises:
        ValueError: A mistake in the model, the data or the rewards.
    """
    with offline_where_unreachable(*_hub_names(config, None)):
        return _prepared(config, as_rewards(functions), None)[1]


def check_played(config: EvaluationConfig, environment: Environment) -> list[Mapping[str, Any]]:
    """Return the tasks of `evaluate_played` after all its checks that need no weights.

    Raises:
        ValueError: A mistake in the models, the data or the environment.
    """
    player = _player(config)
    models = [seat.model.path for seat in config.seat_models().values()]
    with offline_where_unreachable(*_hub_names(config, None), *models):
        tasks = held_out_tasks(config, environment)
        player.check(environment)
    return tasks


async def evaluate_played(
    config: EvaluationConfig,
    environment: Environment,
    *,
    rows: Rows | None = None,
    on_sample: Callable[[Sample], None] = lambda sample: None,
    on_blocked: Callable[[Blocked], None] = warn_blocked,
) -> Evaluation:
    """Evaluate like `evaluate_model`, with episodes of an environment that returns their rewards.

    The rows of the data are tasks. An episode that fails in all attempts is a sample whose reward
    failed. `on_blocked` is that of `EpisodePlayer.play`.
    """
    with offline_where_unreachable(*_hub_names(config, rows)):
        tasks = held_out_tasks(config, environment, rows)
        samples: list[Sample] = []

        def on_ended(host: EpisodeHost, ended: Ended) -> None:
            samples.append(_sample(host, ended))
            on_sample(samples[-1])

        seconds = await _player(config).play(environment, tasks, on_ended, on_blocked)
    return _evaluation(config, samples, seconds)


def _player(config: EvaluationConfig) -> EpisodePlayer:
    return EpisodePlayer(
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


def _sample(host: EpisodeHost, ended: Ended) -> Sample:
    played, request = ended.played, ended.request
    if played is not None:
        outcome = RewardResult(total=played.total, components=played.components)
        return Sample(rollout=host.rollout(ended), outcome=outcome, transcript=played.transcript)
    assert ended.failure is not None, "episodes are not aborted here"
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
    """Return the names of models and data that may be on the hub."""
    names = [config.model.path]
    return names + (hub_names(config.data.source) if rows is None else [])


def held_out_tasks(
    config: EvaluationConfig,
    environment: Environment,
    rows: Rows | None = None,
    *,
    of_a_run: bool = False,
) -> list[Mapping[str, Any]]:
    """Return the tasks of an evaluation; errors are those of `held_out_prompts`."""
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
    """Return the prompts of an evaluation.

    `completions` and `preferences` are those of PromptSource. With `of_a_run`, errors name the
    options of a run.

    Raises:
        ValueError: The data cannot be used, or has too few rows.
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
    config: EvaluationConfig, source: RowSource, kind: str, *, of_a_run: bool
) -> list[Prompt]:
    """Return the first prompts or tasks, as many as are evaluated.

    Raises:
        InvalidValue: The source has fewer, or fewer than 2.
    """
    num = len(source) if config.num_prompts is None else config.num_prompts
    require(
        2 <= num <= len(source),
        f"{'evaluation.' if of_a_run else ''}num_prompts",
        num,
        rule=f"must be between 2, which an interval needs, and the {len(source)} usable {kind} of "
        f"{source.where}",
        fix="Use a number in this range, or more data.",
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
            for one in ended:
                one.raise_failure()
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
    # The order is that of prompts and samples, so that sums do not depend on timing.
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
        "number of prompts",
        len(enough),
        rule=f"of {len(scored)} prompts too few have {max(config.k)} samples whose reward did not "
        f"fail. The first failure is {first_failure}",
        fix="Correct the reward.",
    )
    totals = [[one.total for one in of_prompt] for of_prompt in enough]
    reasons = [one.rollout.finish_reason for one in samples]
    num_played = sum(reason != FinishReason.ABORTED for reason in reasons)
    return Evaluation(
        estimates={
            **evaluate(totals, ks=config.k, right_at=config.right_at, seed=config.seed),
            **_component_means(enough, seed=config.seed),
        },
        num_prompts=len(enough),
        num_left_out=len(scored) - len(enough),
        common_maximum=common_maximum(totals, right_at=config.right_at),
        failed=dict(Counter(one.kind for one in failures)),
        first_failure=first_failure,
        tokens_mean=sum(len(one.rollout.token_ids) for one in samples) / num_played,
        truncated_frac=sum(reason == FinishReason.LENGTH for reason in reasons) / num_played,
        seconds=seconds,
    )


def _component_means(scored: Sequence[Sequence[RewardResult]], *, seed: int) -> dict[str, Estimate]:
    """Return the means of the scores' components, if there are several.

    These are the unweighted rewards, or the metrics that an environment returns. A component that a
    sample does not have counts as 0.
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
