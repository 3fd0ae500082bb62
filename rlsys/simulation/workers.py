"""Workers that do nothing but take time; they can fail on demand.

In: latencies in seconds, drawn by functions. Out: the protocols of rlsys.workers, and a record of
what the controller did.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlsys.controller import Group, TrainedStep
from rlsys.dataflow.blocks import BlockRef, layout_of
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    Prompt,
    StepResult,
    WeightManifest,
)
from rlsys.workers import (
    Collected,
    FinishedRollout,
    ReplicaDied,
    Scored,
    ScoreTask,
    TellScores,
    TrainTask,
)

NUM_PROMPT_TOKENS = 4


class SimulatedPrompts:
    def at(self, index: int) -> Prompt:
        return Prompt(index=index, token_ids=(1,) * NUM_PROMPT_TOKENS, text="?", metadata={})


@dataclass(kw_only=True)
class SimulatedReplica:
    """Every rollout takes a time of its own, drawn from `latency_s`, in one of `num_slots`."""

    name: str
    latency_s: Callable[[], float]
    num_slots: int = 1 << 20
    load_s: float = 0.0
    version: int = 0
    num_submitted: int = 0
    num_collected: int = 0
    buried: bool = False
    dies_after: int | None = None  # rollouts
    shard: str = "shard"
    dead: bool = False
    continued: list[str] = field(default_factory=list)  # requests that came with prior tokens
    _slots: asyncio.Semaphore = field(init=False)
    _finished: asyncio.Queue[FinishedRollout] = field(default_factory=asyncio.Queue)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.num_slots)

    def _require_alive(self) -> None:
        if self.dead:
            raise ReplicaDied(f"{self.name} died")

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Generation]
    ) -> None:
        self._require_alive()
        self.continued += priors
        for request in requests:
            self.num_submitted += 1
            self._running[request.request_id] = asyncio.create_task(self._sample(request))

    async def _sample(self, request: GenerationRequest) -> None:
        first_version = self.version
        finish_reason = FinishReason.STOP
        try:
            async with self._slots:
                first_version = self.version
                await asyncio.sleep(self.latency_s())
        except asyncio.CancelledError:
            finish_reason = FinishReason.ABORTED
        del self._running[request.request_id]
        tokens = np.zeros(3, np.int32)
        layout = layout_of(
            {
                "prompt_token_ids": [np.zeros(NUM_PROMPT_TOKENS, np.int32)],
                "token_ids": [tokens],
                "sampler_logprobs": [tokens.astype(np.float32)],
                "policy_versions": [tokens],
            }
        )
        self._finished.put_nowait(
            FinishedRollout(
                request_id=request.request_id,
                cell=(BlockRef(self.shard, 0, 0, layout), 0),
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                num_tokens=len(tokens),
                min_version=first_version,
                max_version=self.version,
                finish_reason=finish_reason,
            )
        )

    async def collect(self) -> Collected:
        self._require_alive()
        finished = [await self._finished.get()]
        self.num_collected += 1
        if self.dies_after is not None and self.num_collected > self.dies_after:
            self.dead = True
            self._require_alive()
        partial = [
            Generation(
                request_id=request_id,
                token_ids=np.zeros(1, np.int32),
                sampler_logprobs=np.zeros(1, np.float32),
                policy_versions=np.zeros(1, np.int32),
                finish_reason=FinishReason.ABORTED,
            )
            for request_id in self._running
        ]
        return Collected(finished=finished, partial=partial)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._require_alive()
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].cancel()

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        self._require_alive()
        await asyncio.sleep(self.load_s)
        self.version = manifest.version
        return self.load_s

    async def bury(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        self.buried = True


@dataclass(kw_only=True)
class SimulatedScorer:
    latency_s: Callable[[], float] = lambda: 0.0
    outcome: Callable[[ScoreTask], RewardResult | RewardFailure] = lambda task: RewardResult(
        total=float(task.index), components={}
    )

    async def score(self, tasks: Sequence[ScoreTask], tell: TellScores) -> None:
        await asyncio.sleep(self.latency_s())
        tell({i: Scored(outcome=self.outcome(task), text=None) for i, task in enumerate(tasks)})


@dataclass(kw_only=True)
class SimulatedLearner:
    row_s: float = 0.0
    step_s: float = 0.0  # of the optimizer
    answer_s: float = 0.0  # how long an answer travels, while the next call is carried out
    version: int = 0
    trained: list[list[TrainTask]] = field(default_factory=lambda: [[]])
    idle_s: list[float] = field(default_factory=list)  # before each part, without a call to do
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _busy_until_s: float | None = None

    async def accumulate(self, shares: Sequence[Sequence[TrainTask]]) -> None:
        async with self._carrying_out() as idle_s:
            self.idle_s.append(idle_s)
            await asyncio.sleep(self.row_s * max(len(share) for share in shares))
            self.trained[-1] += [task for share in shares for task in share]
        await asyncio.sleep(self.answer_s)

    async def optimizer_step(self) -> StepResult:
        async with self._carrying_out():
            await asyncio.sleep(self.step_s)
            self.version += 1
            self.trained.append([])
            result = StepResult(policy_version=self.version, metrics={}, num_tokens=0)
        await asyncio.sleep(self.answer_s)
        return result

    async def publish(self) -> WeightManifest:
        async with self._carrying_out():
            manifest = WeightManifest(
                version=self.version, path="", num_bytes=0, entries={}, checksum=0
            )
        await asyncio.sleep(self.answer_s)
        return manifest

    @contextlib.asynccontextmanager
    async def _carrying_out(self) -> AsyncIterator[float]:
        """One call at a time, in order; yields for how long there was none."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            now = clock()
            yield now - (now if self._busy_until_s is None else self._busy_until_s)
            self._busy_until_s = clock()


@dataclass(kw_only=True)
class Record:
    steps: list[TrainedStep] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    failures: list[RewardFailure] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    waited_s: defaultdict[tuple[str, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )

    def step_trained(self, trained: TrainedStep) -> None:
        self.steps.append(trained)
        for group in trained.groups:
            self.staleness.append(_staleness(trained, group))

    def tokens_generated(self, num_tokens: int) -> None:
        pass

    def weights_loaded(self, manifest: WeightManifest, **_: Any) -> None:
        pass

    def reward_failed(self, failure: RewardFailure) -> None:
        self.failures.append(failure)

    def waited(self, stage: str, reason: str, seconds: float) -> None:
        self.waited_s[stage, reason] += seconds

    def replica_died(self, name: str, reason: str, *, num_requests: int) -> None:
        self.deaths.append(name)


def _staleness(trained: TrainedStep, group: Group) -> int:
    return trained.step - 1 - min(note.min_version for note in group.rollouts)


def exponential(rng: random.Random, mean_s: float) -> Callable[[], float]:
    return lambda: rng.expovariate(1 / mean_s)
