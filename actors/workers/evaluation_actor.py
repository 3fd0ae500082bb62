"""Evaluation beside training: a worker of its own, which takes exported models one after another.

    learner ─► .evaluating/step_000050 ─► EvaluationActor ─► Found ─► Scoreboard, console

Training goes on meanwhile. It waits only where as many models wait as the disk is to hold; and
nothing that fails here ends a run: it is told, and training goes on.
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
from rlsys.config import RunConfig
from rlsys.controller import BetweenSteps
from rlsys.engines.generation.generation_protocol import EngineError
from rlsys.environments.environment import Environment
from rlsys.environments.workers.loop_watchdog import Blocked
from rlsys.evaluation.held_out import evaluation_config, export_path, is_due, pending_exports
from rlsys.evaluation.held_out_loss import HeldOutLoss
from rlsys.evaluation.model_evaluation import Evaluation, evaluate_packed, evaluate_played
from rlsys.rewards import PackedRewards
from rlsys.runs.evaluation_log import EvaluationLog
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.runs.run_directory import MAX_WAITING

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerDied, WorkerError, as_future
from ..store.store_actor import StoreAddress

# One `wait` answers after this time at the latest.
WAIT_S = 5.0

# One `blocked` answers after this time at the latest; the next one follows at once.
WATCH_S = 5.0

# Deaths of the worker over one model, before it is left out.
MAX_DEATHS = 2

OnResult = Callable[[Mapping[str, float]], None]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the evaluation of one model came to."""

    metrics: Mapping[str, float]
    warning: str = ""

    @classmethod
    def of(cls, sampled: Evaluation) -> Found:
        num_failed = sum(sampled.failed.values())
        warning = (
            f"the reward of {num_failed} samples failed; they count nowhere. The first "
            f"failure: {sampled.first_failure}"
        )
        return cls(metrics=sampled.as_metrics(), warning=warning if num_failed else "")


Told = tuple[int, Found | None]


@dataclass(frozen=True, kw_only=True)
class EvaluationFactory:
    """What the worker needs: all but the model. `rewards`: of samples, None for no samples;
    `environment`: that is played instead, pickled; `loss`: of held-out completions. `rows` replace
    the dataset.
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
        """`on_progress` is called for every sample that is scored, and every pass; `on_blocked` as
        of `Player.play`.
        """
        config = evaluation_config(self.config, model)
        sampled, of_loss = Found(metrics={}), {}
        if self.loss is not None:
            of_loss = await asyncio.to_thread(
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
            part.get(metrics.TIME_EVALUATION_S, 0.0) for part in (of_loss, sampled.metrics)
        )
        told = {**sampled.metrics, **of_loss, metrics.TIME_EVALUATION_S: seconds}
        return replace(sampled, metrics=told)


@ray.remote(concurrency_groups=HEARTBEAT_GROUP | {"witness": 1})
class EvaluationActor(Heartbeat):
    def __init__(self, evaluate: EvaluationFactory, store: StoreAddress, tracer: Tracer) -> None:
        self._evaluate = evaluate
        self._tracer = tracer
        self._num_done = 0
        self._work: asyncio.Task[Found] | None = None
        self._blocked: Blocked | None = None
        self._is_blocked = threading.Event()

    async def begin(self, model: str) -> None:
        self._num_done = 0
        self._work = asyncio.create_task(self._evaluated(model))

    async def wait(self) -> Told:
        """How many samples and passes are done, and what it came to. Raises ValueError and
        EngineError.
        """
        assert self._work is not None, "nothing was begun"
        await asyncio.wait([self._work], timeout=WAIT_S)
        return self._num_done, self._work.result() if self._work.done() else None

    @ray.method(concurrency_group="witness")
    def blocked(self) -> Blocked | None:
        """In a thread of its own: whether an episode blocks the event loop, so that nothing else
        answers; waits a bounded time.
        """
        self._is_blocked.wait(WATCH_S)
        return self._blocked

    async def drain_trace(self) -> TraceBatch:
        return self._tracer.drain()

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])

    async def _evaluated(self, model: str) -> Found:
        def count() -> None:
            self._num_done += 1

        def block(blocked: Blocked) -> None:
            self._blocked = blocked
            self._is_blocked.set()

        with self._tracer.span("evaluation", "evaluate", model=Path(model).name):
            return await self._evaluate(model, count, block)


class Evaluator:
    """`start_worker` starts the worker; `export` writes the trained model as it is; `warn` tells
    people; `on_progress` is told of every sign of life.
    """

    def __init__(
        self,
        config: RunConfig,
        scoreboard: EvaluationLog,
        directory: Path,
        *,
        start_worker: Callable[[], Worker],
        export: Callable[[Path], Awaitable[None]],
        on_result: OnResult,
        on_progress: Callable[[], None],
        warn: Callable[[str], None],
        first_step: int,
    ) -> None:
        self._config = config
        self._scoreboard = scoreboard
        self._directory = directory.absolute()  # as it holds in the worker too
        self._hire = start_worker
        self._export = export
        self._on_result = on_result
        self._on_progress = on_progress
        self._warn = warn
        self._worker: Worker | None = None
        self._running: int | None = None  # the step whose model is evaluated now
        self._is_given_up = False  # the model that is evaluated is of a lost history
        self._is_adding = False  # to the scoreboard, in a thread
        self._goes_back_to: int | None = None  # the scoreboard, when that is done
        self._has_warned = False
        self._waiting: dict[int, Path] = {}
        self._changed = AsyncCondition()
        for step, path in pending_exports(self._directory).items():
            if step <= first_step and not scoreboard.has(step):
                self._waiting[step] = path
            else:  # of a history that is given up
                shutil.rmtree(path, ignore_errors=True)
        has_first = scoreboard.has(first_step) or first_step in self._waiting
        self.between_steps = BetweenSteps(
            name=metrics.EVALUATION,
            is_due=lambda step: is_due(config, step),
            do=self._take,
            done=first_step if has_first else first_step - 1,
            undo=self._go_back,
        )

    async def run(self) -> None:
        """Evaluates what is exported, for ever."""
        while True:
            await self._changed.until(lambda: bool(self._waiting))
            step, path = min(self._waiting.items())
            del self._waiting[step]
            self._running, self._is_given_up = step, False
            self._changed.notify()
            try:
                await self._evaluate(step, path)
            finally:
                self._running = None
                self._changed.notify()

    async def finish(self) -> None:
        """Returns when nothing is left to evaluate."""
        await self._changed.until(lambda: not self._waiting and self._running is None)

    async def _take(self, step: int) -> None:
        if len(self._waiting) >= MAX_WAITING and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"training waits for the evaluation of step {self._running}, which takes longer "
                f"than evaluation.every={self._config.evaluation.every} steps; use fewer prompts "
                "or samples, a larger interval, or give it more (evaluation.num_cpus, num_gpus)."
            )
        await self._changed.until(lambda: len(self._waiting) < MAX_WAITING)
        path = export_path(self._directory, step)
        try:
            await self._export(path)
        except OSError as error:  # a full disk, for one
            self._warn(f"the model of step {step} is not evaluated: {error}")
            return
        self._waiting[step] = path
        self._changed.notify()

    def _go_back(self, step: int) -> None:
        if not self._is_adding:
            self._scoreboard.go_back(step)
        elif self._goes_back_to is None or step < self._goes_back_to:
            self._goes_back_to = step
        if self._running is not None and self._running > step:
            self._is_given_up = True
        for later in [waiting for waiting in self._waiting if waiting > step]:
            shutil.rmtree(self._waiting.pop(later), ignore_errors=True)
        self._changed.notify()

    async def _evaluate(self, step: int, path: Path) -> None:
        reason = ""
        for attempt in range(1, MAX_DEATHS + 1):
            try:
                found = await self._found(path)
                if self._is_given_up:
                    break
                if (line := await self._added(step, found, path)) is None:
                    break
            except WorkerDied as death:
                reason, self._worker = str(death), None
                if attempt < MAX_DEATHS:
                    self._warn(f"{reason}; another takes its place")
            except (WorkerError, EngineError, ValueError, OSError) as error:
                reason = str(error)
                break
            else:
                if found.warning:
                    self._warn(f"evaluation of step {step}: {found.warning}")
                self._on_result(line)
                return
        if self._is_given_up:
            reason = "training went back to an earlier one, and comes to it again"
        self._warn(f"the model of step {step} is not evaluated: {reason}")
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def _added(self, step: int, found: Found, path: Path) -> Mapping[str, float] | None:
        """The line on the scoreboard, which does one thing at a time; None where training went back
        to an earlier one meanwhile.
        """
        self._is_adding = True
        try:
            line = await asyncio.to_thread(self._scoreboard.add, step, found.metrics, path)
            return None if self._is_given_up else line
        finally:
            self._is_adding = False
            if self._goes_back_to is not None:
                self._scoreboard.go_back(self._goes_back_to)
                self._goes_back_to = None

    async def _found(self, path: Path) -> Found:
        """Raises WorkerDied, also for a worker that gets nothing done for too long."""
        if self._worker is None or self._worker.is_dead:
            self._worker = self._hire()
        cluster, worker = self._config.cluster, self._worker
        await worker.call("begin", str(path), timeout_s=cluster.start_timeout_s)
        limit_s = max(cluster.start_timeout_s, cluster.call_timeout_s)
        looking = as_future(_end_blocked(worker))
        try:
            return await self._answer(worker, limit_s)
        finally:
            looking.cancel()

    async def _answer(self, worker: Worker, limit_s: float) -> Found:
        last, since = 0, time.monotonic()
        while True:
            told: Told = await worker.call("wait", timeout_s=WAIT_S + worker.timeout_s)
            num_done, found = told
            self._on_progress()
            if found is not None:
                return found
            if num_done > last:
                last, since = num_done, time.monotonic()
            if time.monotonic() - since > limit_s:
                worker.end(f"it has got nothing done for {limit_s:g} s (cluster.call_timeout_s)")


async def _end_blocked(worker: Worker) -> None:
    """Ends it when an episode blocks its event loop, as soon as that shows."""
    blocked: Blocked | None = None
    while blocked is None:
        blocked = await worker.call("blocked", timeout_s=WATCH_S + worker.timeout_s)
    worker.end(f"an episode {blocked.message}")
