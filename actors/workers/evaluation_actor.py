"""Evaluation during training: a separate worker evaluates exported models one after another.

    trainer ─► .evaluating/step_000050 ─► EvaluationActor ─► Found ─► EvaluationLog, console

Training continues meanwhile. It waits only when MAX_WAITING exported models are pending. A failed
evaluation is a warning and never ends a run.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import ray

from rlsys import metrics
from rlsys.common.async_condition import AsyncCondition
from rlsys.common.number_text import counted
from rlsys.common.supervision import EVALUATION, Decision
from rlsys.config import RunConfig
from rlsys.controller.step_hooks import BetweenSteps
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.environments.environment import Environment
from rlsys.environments.workers.loop_watchdog import Blocked
from rlsys.evaluation.held_out import evaluation_config, export_path, is_due, pending_exports
from rlsys.evaluation.held_out_loss import HeldOutLoss
from rlsys.evaluation.model_evaluation import Evaluation, evaluate_packed, evaluate_played
from rlsys.rewards import PackedRewards
from rlsys.runs.evaluation_log import EvaluationLog
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.runs.run_files import MAX_WAITING

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerError, as_future
from ..cluster.supervised_pool import SupervisedPool, WorkDropped
from ..store.store_actor import StoreAddress

# Longest time of one `wait`.
WAIT_S = 5.0

# Longest time of one `blocked`; the next one follows at once.
WATCH_S = 5.0

OnResult = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of the evaluation of one model."""

    metrics: Mapping[str, float]
    warning: str = ""

    @classmethod
    def of(cls, sampled: Evaluation) -> Found:
        """Return the result of sampled completions."""
        num_failed = sum(sampled.failed.values())
        warning = (
            f"the reward of {counted(num_failed, 'sample')} failed, which the scores leave "
            f"out. The first failure: {sampled.first_failure}"
        )
        return cls(metrics=sampled.as_metrics(), warning=warning if num_failed else "")


Progress = tuple[int, Found | None]


@dataclass(frozen=True, kw_only=True)
class EvaluationFactory:
    """Everything that the worker needs except the model.

    Attributes:
        rewards: Rewards of sampled completions, or None to sample none.
        environment: Environment that is played instead, pickled.
        loss: Loss of held-out completions.
        rows: Rows that replace the dataset.
    """

    config: RunConfig
    rewards: PackedRewards | None
    environment: bytes | None
    loss: HeldOutLoss | None
    rows: Sequence[Mapping[str, Any]] | None

    async def __call__(
        self,
        model: str,
        on_progress: Callable[[], None],
        on_blocked: Callable[[Blocked], None],
    ) -> Found:
        """Evaluate a model.

        `on_progress` is called after every scored sample and every micro-batch; see `Player.play`
        for `on_blocked`.
        """
        config = evaluation_config(self.config, model)
        sampled, loss_metrics = Found(metrics={}), {}
        if self.loss is not None:
            loss_metrics = await asyncio.to_thread(
                self.loss.metrics, config, rows=self.rows, on_pass=on_progress
            )
        if self.environment is not None:
            environment: Environment = cloudpickle.loads(self.environment)
            evaluation = await evaluate_played(
                config,
                environment,
                rows=self.rows,
                on_sample=lambda sample: on_progress(),
                on_blocked=on_blocked,
            )
            sampled = Found.of(evaluation)
        elif self.rewards is not None:
            evaluation = await evaluate_packed(
                config, self.rewards, rows=self.rows, on_sample=lambda sample: on_progress()
            )
            sampled = Found.of(evaluation)
        seconds = sum(
            part.get(metrics.TIME_EVALUATION_S, 0.0) for part in (loss_metrics, sampled.metrics)
        )
        all_metrics = {**sampled.metrics, **loss_metrics, metrics.TIME_EVALUATION_S: seconds}
        return replace(sampled, metrics=all_metrics)


@ray.remote(concurrency_groups=HEARTBEAT_GROUP | {"watchdog": 1})
class EvaluationActor(Heartbeat):
    """Actor that evaluates one model at a time."""

    def __init__(self, evaluate: EvaluationFactory, store: StoreAddress, tracer: Tracer) -> None:
        self._evaluate = evaluate
        self._tracer = tracer
        self._num_done = 0
        self._work: asyncio.Task[Found] | None = None
        self._blocked: Blocked | None = None
        self._is_blocked = threading.Event()

    async def start_evaluation(self, model: str) -> None:
        """Start to evaluate a model."""
        self._num_done = 0
        self._work = asyncio.create_task(self._evaluated(model))

    async def wait(self) -> Progress:
        """Return the number of finished samples and micro-batches, and the result if any.

        Raises ValueError, EngineError and FloatingPointError of the evaluation.
        """
        assert self._work is not None, "no evaluation was started"
        await asyncio.wait([self._work], timeout=WAIT_S)
        return self._num_done, self._work.result() if self._work.done() else None

    @ray.method(concurrency_group="watchdog")
    def blocked(self) -> Blocked | None:
        """Return the episode that blocks the event loop, if one does, after a bounded wait.

        It runs in a separate thread.
        """
        self._is_blocked.wait(WATCH_S)
        return self._blocked

    async def drain_trace(self) -> TraceBatch:
        """Return the trace records since the last call."""
        return self._tracer.drain()

    async def close(self) -> None:
        """Cancel the evaluation."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])

    async def _evaluated(self, model: str) -> Found:
        def count() -> None:
            self._num_done += 1

        def block(blocked: Blocked) -> None:
            self._blocked = blocked
            self._is_blocked.set()

        with self._tracer.working("evaluation", "evaluate", model=Path(model).name):
            return await self._evaluate(model, count, block)


class Evaluator:
    """Queue of exported models and supervisor of the worker that evaluates them.

    `start_worker` starts the worker, `export` writes the current model, `warn` shows a warning,
    `on_progress` is called whenever the worker has answered, and `is_last` returns whether a step
    is the last one of a run that stops early. `on_samples` may be set to a function that gets the
    number of scored samples of the current evaluation, and of all of them if known.
    """

    def __init__(
        self,
        config: RunConfig,
        log: EvaluationLog,
        directory: Path,
        *,
        start_worker: Callable[[], Worker],
        export: Callable[[Path], Awaitable[None]],
        on_result: OnResult,
        on_progress: Callable[[], None],
        is_last: Callable[[int], bool],
        warn: Callable[[str], None],
        first_step: int,
    ) -> None:
        self._config = config
        self._log = log
        # absolute, because the worker has another working directory
        self._directory = directory.absolute()
        self._pool = SupervisedPool(
            lambda place: start_worker(),
            _is_ready,
            num_workers=1,
            policy=EVALUATION,
            on_death=self._report_death,
        )
        self._export = export
        self._on_result = on_result
        self._on_progress = on_progress
        self._warn = warn
        own = config.evaluation
        self._num_samples = own.num_prompts * own.num_samples if own.num_prompts else None
        self.on_samples: Callable[[int, int | None], None] = lambda done, total: None
        self._running: int | None = None  # step of the model in evaluation
        self._is_discarded = False  # the model in evaluation belongs to a discarded history
        self._is_adding = False  # a thread is adding to the evaluation log
        self._goes_back_to: int | None = None  # step to which the log goes back after that
        self._has_warned = False
        self._waiting: dict[int, Path] = {}
        self._changed = AsyncCondition()
        for step, path in pending_exports(self._directory).items():
            if step <= first_step and not log.has(step):
                self._waiting[step] = path
            else:  # belongs to a discarded history
                shutil.rmtree(path, ignore_errors=True)
        has_first = log.has(first_step) or first_step in self._waiting
        self.between_steps = BetweenSteps(
            name=metrics.EVALUATION,
            is_due=lambda step: is_due(config, step) or is_last(step),
            do=self._take,
            done=first_step if has_first else first_step - 1,
            undo=self._go_back,
        )

    async def run(self) -> None:
        """Evaluate exported models, forever."""
        while True:
            await self._changed.until(lambda: bool(self._waiting))
            step, path = min(self._waiting.items())
            del self._waiting[step]
            self._running, self._is_discarded = step, False
            self._changed.notify()
            try:
                await self._evaluate(step, path)
            finally:
                self._running = None
                self._changed.notify()

    async def finish(self) -> None:
        """Wait until no model is left to evaluate."""
        await self._changed.until(lambda: not self._waiting and self._running is None)

    async def _take(self, step: int) -> None:
        if len(self._waiting) >= MAX_WAITING and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"training waits for the evaluation of step {self._running}, which takes longer "
                f"than evaluation.every={self._config.evaluation.every} steps. Use fewer prompts "
                "or samples, a larger interval, or more evaluation.num_cpus or num_gpus."
            )
        await self._changed.until(lambda: len(self._waiting) < MAX_WAITING)
        path = export_path(self._directory, step)
        try:
            await self._export(path)
        except OSError as error:  # such as a full disk
            self._warn(f"the model of step {step} is not evaluated: {error}")
            return
        self._waiting[step] = path
        self._changed.notify()

    def _go_back(self, step: int) -> None:
        if not self._is_adding:
            self._log.go_back(step)
        elif self._goes_back_to is None or step < self._goes_back_to:
            self._goes_back_to = step
        if self._running is not None and self._running > step:
            self._is_discarded = True
        for later in [waiting for waiting in self._waiting if waiting > step]:
            shutil.rmtree(self._waiting.pop(later), ignore_errors=True)
        self._changed.notify()

    async def _evaluate(self, step: int, path: Path) -> None:
        reason, line = "", None
        try:
            found = await self._pool.run(lambda worker: self._found(worker, path))
            if not self._is_discarded:
                line = await self._added(step, found, path)
        except (
            WorkDropped,
            WorkerError,
            EngineError,
            FloatingPointError,
            ValueError,
            OSError,
        ) as error:
            reason = str(error)
        if line is not None:
            if found.warning:
                self._warn(f"evaluation of step {step}: {found.warning}")
            self._on_result(line)
            return
        if self._is_discarded:
            reason = "training went back to an earlier step and will reach it again"
        self._warn(f"the model of step {step} is not evaluated: {reason}")
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def _report_death(self, reason: str, decision: Decision[int]) -> None:
        ends_the_work = decision.drop or decision.gives_up
        if decision.retry or not ends_the_work:
            self._warn(f"{reason}; another worker replaces it")

    async def _added(self, step: int, found: Found, path: Path) -> Mapping[str, float] | None:
        """Add a line to the log; return None if training went back to an earlier step meanwhile.

        The log supports one operation at a time.
        """
        self._is_adding = True
        try:
            line = await asyncio.to_thread(self._log.add, step, found.metrics, path)
            return None if self._is_discarded else line
        finally:
            self._is_adding = False
            if self._goes_back_to is not None:
                self._log.go_back(self._goes_back_to)
                self._goes_back_to = None

    async def _found(self, worker: Worker, path: Path) -> Found:
        """Return the result of a worker.

        Raises:
            WorkerDied: The worker died, or made no progress for too long.
        """
        cluster = self._config.cluster
        await worker.call("start_evaluation", str(path), timeout_s=cluster.start_timeout_s)
        limit_s = max(cluster.start_timeout_s, cluster.call_timeout_s)
        watching = as_future(_end_when_blocked(worker))
        try:
            return await self._answer(worker, limit_s)
        finally:
            watching.cancel()

    async def _answer(self, worker: Worker, limit_s: float) -> Found:
        last, since = 0, time.monotonic()
        while True:
            answer: Progress = await worker.call("wait", timeout_s=WAIT_S + worker.timeout_s)
            num_done, found = answer
            self._on_progress()
            self.on_samples(num_done, self._num_samples)
            if found is not None:
                return found
            if num_done > last:
                last, since = num_done, time.monotonic()
            if time.monotonic() - since > limit_s:
                worker.end(f"it made no progress for {limit_s:g} s (cluster.call_timeout_s)")


async def _is_ready(worker: Worker) -> None:
    """Do nothing: the worker imports and loads with its first model."""


async def _end_when_blocked(worker: Worker) -> None:
    """End a worker as soon as an episode is seen to block its event loop."""
    blocked: Blocked | None = None
    while blocked is None:
        blocked = await worker.call("blocked", timeout_s=WATCH_S + worker.timeout_s)
    worker.end(f"an episode {blocked.message}")
