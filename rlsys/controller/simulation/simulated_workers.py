"""Simulated workers, which only take time and can fail on demand.

In: latencies in seconds, drawn by functions. Out: the protocols of
rlsys.controller.worker_protocols, and a record of the controller's actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rlsys.common.async_condition import AsyncCondition
from rlsys.controller import RunningGroup, TrainedStep
from rlsys.controller.worker_protocols import (
    Collected,
    FinishedRollout,
    ReplicaDied,
    ReportScores,
    RolloutMetadata,
    RolloutText,
    RowsLost,
    Scored,
    ScoreTask,
    StepPart,
    StepRowsRef,
    TrainerDied,
    Withdrawn,
    Written,
)
from rlsys.dataflow.graph.stages import (
    BRANCHES_COLUMN,
    SEATS_COLUMN,
    TURN_REWARDS_COLUMN,
    TURNS_COLUMN,
)
from rlsys.dataflow.store.blocks import BlockLayout, BlockRef, ColumnRef, layout_of
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import (
    FinishReason,
    GenerationRequest,
    Prompt,
    Sampled,
    StepResult,
    WeightManifest,
)

T = TypeVar("T")

PLAYED_COLUMNS = (TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN, BRANCHES_COLUMN)

NUM_PROMPT_TOKENS = 4
NONE_SAMPLED = Sampled.of(np.empty(0, np.int32))  # for rows that are not trained on

LEASES = itertools.count(1 << 20)  # ids for blocks of other writers than replicas


@dataclass(kw_only=True)
class SimulatedPrompts:
    """An endless queue of equal prompts, with `num_rows` in an epoch."""

    num_rows: int = 1 << 30

    def row(self, index: int) -> int:
        """Return the row of a prompt."""
        return index % self.num_rows

    def at(self, index: int) -> Prompt:
        """Return a prompt."""
        return Prompt(
            index=index,
            row=self.row(index),
            token_ids=(1,) * NUM_PROMPT_TOKENS,
            text="?",
            metadata={},
        )


@dataclass(kw_only=True)
class SharedDevices:
    """The users of shared devices; raises AssertionError if both sides use them at once."""

    replicas: set[str] = field(default_factory=set)
    trainers: set[str] = field(default_factory=set)
    num_turns: int = 0  # of training

    def generation_takes(self, name: str) -> None:
        """Record that a replica takes memory."""
        assert not self.trainers, f"{name} takes memory while {sorted(self.trainers)} train"
        self.replicas.add(name)

    def training_takes(self, name: str) -> None:
        """Record that a trainer takes memory."""
        assert not self.replicas, f"{name} takes memory while {sorted(self.replicas)} have some"
        self.num_turns += name not in self.trainers
        self.trainers.add(name)

    def release(self, name: str) -> None:
        """Record that a worker has released its memory."""
        self.replicas.discard(name)
        self.trainers.discard(name)


@dataclass(kw_only=True)
class SimulatedReplica:
    """A replica whose rollouts each take a time drawn from `latency_s`, in `num_slots` slots."""

    name: str
    latency_s: Callable[[], float]
    num_slots: int = 1 << 20
    load_s: float = 0.0
    gather_s: float = 0.0  # rollouts that finish within this time are returned together
    version: int = 0
    submitted: list[str] = field(default_factory=list)  # request ids
    greedy: list[str] = field(default_factory=list)  # ids of requests for greedy baselines
    num_collected: int = 0
    cleaned_up: bool = False
    dies_after: int | None = None  # rollouts
    shard: str = "shard"
    node: str = "node"
    dead: bool = False
    continued: list[str] = field(default_factory=list)  # requests that came with prior tokens
    devices: SharedDevices | None = None  # shared with the trainer
    plays: Callable[[GenerationRequest], RewardResult | RewardFailure] | None = None  # an episode
    num_by_seat: tuple[int, ...] = ()  # of the 3 tokens of an episode
    is_silent: Callable[[GenerationRequest], bool] = lambda request: False  # without a token
    num_releases: int = 0
    others: list[tuple[int, Mapping[str, int]]] = field(default_factory=list)
    """Loaded versions: that of the main model, and those of other models."""
    _slots: asyncio.Semaphore = field(init=False)
    _finished: asyncio.Queue[FinishedRollout | None] = field(default_factory=asyncio.Queue)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)  # running requests with a reported part
    _withdrawn: set[str] = field(default_factory=set)  # requests that end without a result
    _is_released: bool = False
    _release_changed: AsyncCondition = field(default_factory=AsyncCondition)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.num_slots)
        if self.devices is not None:
            self.devices.generation_takes(self.name)

    def die(self) -> None:
        """Fail every call from now on, including the running ones."""
        self.dead = True
        if self.devices is not None:
            self.devices.release(self.name)
        for task in self._running.values():
            task.cancel()
        self._finished.put_nowait(None)  # ends a running `collect` at once

    def _require_alive(self) -> None:
        if self.dead:
            raise ReplicaDied(f"{self.name} died")

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Sequence[ColumnRef]]
    ) -> None:
        """Start sampling requests."""
        self._require_alive()
        self.continued += priors
        self._reported.update(priors)
        for request in requests:
            self.submitted.append(request.request_id)
            if request.is_baseline and request.sampling == request.sampling.greedy:
                self.greedy.append(request.request_id)
            self._running[request.request_id] = asyncio.create_task(self._sample(request))

    async def _sample(self, request: GenerationRequest) -> None:
        first_version = self.version
        finish_reason = FinishReason.STOP
        try:
            async with self._slots:
                first_version = self.version
                await self._work(self.latency_s())
        except asyncio.CancelledError:
            finish_reason = FinishReason.ABORTED
        del self._running[request.request_id]
        if request.request_id in self._withdrawn:
            self._withdrawn.discard(request.request_id)
            return
        is_baseline = request.is_baseline
        is_aborted = finish_reason is FinishReason.ABORTED
        is_silent = bool(self.plays) and self.is_silent(request)
        has_none = is_baseline or is_silent
        self._finished.put_nowait(
            FinishedRollout(
                request_id=request.request_id,
                cell=(BlockRef(self.shard, 0, 0, _layout(3, is_played=bool(self.plays))), 0),
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                num_tokens=0 if is_silent else 3,
                outcome=self.plays(request) if self.plays and not is_aborted else None,
                min_version=NONE_SAMPLED.oldest if has_none else first_version,
                max_version=NONE_SAMPLED.newest if has_none else self.version,
                finish_reason=finish_reason,
                num_injected=3 if is_baseline else 0,
                num_by_seat=self.num_by_seat,
                text=_simulated_text(request, self.version) if request.record else None,
            )
        )

    async def _work(self, seconds: float) -> None:
        """Work for a time, which stops while the memory is released."""
        if self.devices is None:
            await asyncio.sleep(seconds)
            return
        clock = asyncio.get_running_loop().time
        while seconds > 0 or self._is_released:
            if self._is_released:
                await self._release_changed.until(lambda: not self._is_released)
            start = clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(seconds, 0.0)):
                    await self._release_changed.until(lambda: self._is_released)
            seconds = seconds - (clock() - start) if self._is_released else 0.0

    async def collect(self) -> Collected:
        """Return the rollouts that have finished; wait for the first."""
        self._require_alive()
        ended = [await self._finished.get()]
        if self.gather_s:
            await asyncio.sleep(self.gather_s)
        while self.gather_s and not self._finished.empty():
            ended.append(self._finished.get_nowait())
        self.num_collected += len(ended)
        if self.dies_after is not None and self.num_collected > self.dies_after:
            self.die()
        self._require_alive()
        finished = [rollout for rollout in ended if rollout is not None]
        assert len(finished) == len(ended)
        if len(finished) > 1:
            layout = _layout(3, is_played=bool(self.plays), num_rows=len(finished))
            block = BlockRef(self.shard, next(LEASES), 0, layout)
            finished = [
                dataclasses.replace(rollout, cell=(block, place))
                for place, rollout in enumerate(finished)
            ]
        return Collected(finished=finished, parts=await self.progress(), has_sampled=True)

    async def progress(self) -> list[StepPart]:
        """Return a part of each running request that has none yet."""
        self._require_alive()
        parts = [
            StepPart(
                request_id=request_id,
                start=0,
                cell=(BlockRef(self.shard, 0, 0, _layout(1)), 0),
                num_tokens=1,
                min_version=self.version,
            )
            for request_id in self._running
            if request_id not in self._reported
        ]
        self._reported.update(part.request_id for part in parts)
        return parts

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop sampling these requests."""
        self._require_alive()
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].cancel()

    async def withdraw(self, request_ids: Sequence[str]) -> Withdrawn:
        """Stop sampling these requests without a result."""
        parts = [part for part in await self.progress() if part.request_id in request_ids]
        tasks = {name: self._running[name] for name in request_ids if name in self._running}
        for name, task in tasks.items():
            self._withdrawn.add(name)
            self._reported.discard(name)
            task.cancel()
        if tasks:
            await asyncio.wait(tasks.values())
        self._require_alive()
        return Withdrawn(request_ids=[*tasks], parts=parts)

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        """Load a version in `load_s`."""
        self._require_alive()
        if self.devices is not None:
            self.devices.generation_takes(self.name)
        await asyncio.sleep(self.load_s)
        self._require_alive()
        self.version = manifest.version
        others = {model: of_other.version for model, of_other in manifest.others}
        self.others.append((manifest.version, others))
        self._is_released = False
        self._release_changed.notify()
        return self.load_s

    async def release(self) -> None:
        """Release the shared devices."""
        self._require_alive()
        assert self.devices is not None
        self._is_released = True
        self._release_changed.notify()
        await asyncio.sleep(self.load_s)
        self._require_alive()
        self.num_releases += 1
        self.devices.release(self.name)

    async def clean_up(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """Record the call."""
        self.cleaned_up = True


@dataclass(kw_only=True)
class SimulatedFleet:
    """A fleet whose replicas start in `start_s`; the first `num_duds` die while they start."""

    latency_s: Callable[[], float] = lambda: 1.0
    start_s: float = 10.0
    num_duds: int = 0
    node: Callable[[int], str] = lambda number: "node"
    started_workers: list[SimulatedReplica] = field(default_factory=list)
    prepare: Callable[[SimulatedReplica], None] = lambda replica: None
    devices: SharedDevices | None = None

    async def start_worker(self, number: int) -> SimulatedReplica:
        """Start the replica of a number."""
        starting = f"the start of rollout-{number}"
        if self.devices is not None:
            self.devices.generation_takes(starting)
        try:
            await asyncio.sleep(self.start_s)
        finally:
            if self.devices is not None:
                self.devices.release(starting)
        if self.num_duds > 0:
            self.num_duds -= 1
            raise ReplicaDied(f"rollout-{number} died during start")
        name = f"rollout-{number}.{len(self.started_workers) + 1}"
        replica = SimulatedReplica(
            name=name,
            latency_s=self.latency_s,
            load_s=0.01,
            node=self.node(number),
            devices=self.devices,
        )
        self.prepare(replica)
        self.started_workers.append(replica)
        return replica


@dataclass(kw_only=True)
class SimulatedScorer:
    """A scorer that rewards each rollout by `outcome`, after `latency_s`."""

    latency_s: Callable[[], float] = lambda: 0.0
    outcome: Callable[[ScoreTask], RewardResult | RewardFailure] = lambda task: RewardResult(
        total=float(task.index), components={}
    )

    async def score(self, tasks: Sequence[ScoreTask], report: ReportScores) -> None:
        """Score all tasks and report them together."""
        await asyncio.sleep(self.latency_s())
        report({i: Scored(outcome=self.outcome(task)) for i, task in enumerate(tasks)})


@dataclass(kw_only=True)
class SimulatedPool:
    """A frozen model that writes one score per row."""

    writes: str
    latency_s: Callable[[], float] = lambda: 0.0
    num_workers: int = 1
    losing: Callable[[], bool] = lambda: False  # whether rows cannot be read this time
    failure: Callable[[RolloutMetadata], RewardFailure | None] = lambda origin: None  # of a judge
    num_rows: int = 0

    async def run(self, rows: StepRowsRef) -> Written:
        """Write a score for each row: its group id."""
        await asyncio.sleep(self.latency_s())
        if self.losing():
            raise RowsLost("their shard is gone")
        self.num_rows += len(rows)
        failures = {
            place: failure
            for place, origin in enumerate(rows.origins)
            if (failure := self.failure(origin)) is not None
        }
        scores = [
            math.nan if place in failures else float(group_id)
            for place, group_id in enumerate(rows.group_ids)
        ]
        return Written(scalars={self.writes: scores}, failures=failures)


@dataclass(kw_only=True)
class SimulatedTrainer:
    """A trainer that counts steps and records the rows of each."""

    row_s: float = 0.0
    step_s: float = 0.0  # time of an optimizer step
    publish_s: float = 0.0
    busy_s: float = 0.0  # so far
    answer_s: float = 0.0  # travel time of an answer, during which the next call runs
    restart_s: float = 5.0
    loses: int = 0  # optimizer steps that a restart cannot restore
    version: int = 0
    held: int | None = None  # the version of the newest copy
    deaths: int = 0
    num_data: int = 1
    num_stages: int = 1
    attention_tokens: float = 4096.0
    trained: list[list[StepRowsRef]] = field(default_factory=lambda: [[]])  # by step, and the next
    updates: int = 0  # number of updates; several may make a version
    inferred: list[tuple[str, int, list[int]]] = field(default_factory=list)
    """Columns that were inferred, with the version and the group ids."""
    idle_s: list[float] = field(default_factory=list)  # idle time before each part
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    devices: SharedDevices | None = None  # shared with the replicas
    name: str = "trainer-0"
    _busy_until_s: float | None = None
    _died: asyncio.Event = field(default_factory=asyncio.Event)

    def die(self) -> None:
        """Fail all running calls, and later ones until a restart."""
        self.deaths += 1
        self._died.set()
        if self.devices is not None:
            self.devices.release(self.name)

    def infer_s(self, share: StepRowsRef) -> float:
        """Return the time of a forward pass over the rows of one rank."""
        return self.row_s * len(share)

    def train_s(self, share: StepRowsRef) -> float:
        """Return the time of the forward and backward passes over the rows of one rank."""
        return self.row_s * len(share)

    async def take(self, seconds: float) -> None:
        """Take a time for computing."""
        await asyncio.sleep(seconds)

    async def infer(
        self, writes: str, shares: Sequence[StepRowsRef], *, adapters: bool = True
    ) -> Sequence[Written]:
        """Write the column of each share."""

        async def work() -> list[Written]:
            async with self._carrying_out():
                await self.take(max(map(self.infer_s, shares)))
                return [self._write(writes, share) for share in shares]

        return await self._answer(work())

    async def compute(self, stage: str, rows: StepRowsRef) -> Written:
        """Write the columns in the name of the stage."""
        return (await self.infer(stage, [rows]))[0]

    def _write(self, writes: str, rows: StepRowsRef) -> Written:
        """Write one token for each row."""
        if not len(rows):
            return Written()
        self.inferred.append((writes, self.version, list(rows.group_ids)))
        values = [np.zeros(1, np.float32) for _ in range(len(rows))]
        columns = dict.fromkeys(writes.split(" and "), values)
        return Written(block=BlockRef("shard", next(LEASES), 0, layout_of(columns)))

    async def accumulate(self, micro_batches: Sequence[Sequence[StepRowsRef]]) -> None:
        """Record the rows of micro-batches."""

        async def work() -> None:
            async with self._carrying_out() as idle_s:
                self.idle_s.append(idle_s)
                for shares in micro_batches:
                    await self.take(max(map(self.train_s, shares)))
                    self.trained[-1] += shares

        await self._answer(work())

    async def optimizer_step(self, *, last: bool = True) -> StepResult:
        """Count an update, and a version if it is the last one."""

        async def work() -> StepResult:
            async with self._carrying_out():
                await self.take(self.step_s)
                self.updates += 1
                if last:
                    self.version += 1
                    self.trained.append([])
                return StepResult(policy_version=self.version, metrics={}, num_tokens=0)

        return await self._answer(work())

    async def publish(self) -> WeightManifest:
        """Return the manifest of the current version."""

        async def work() -> WeightManifest:
            async with self._carrying_out():
                await self.take(self.publish_s)
                return WeightManifest(version=self.version)

        return await self._answer(work())

    async def watch(self) -> None:
        """Wait until the trainer dies; then raise TrainerDied."""
        await self._died.wait()
        raise TrainerDied("trainer-0 died")

    async def hold(self) -> None:
        """Record the current version as the held one."""

        async def work() -> None:
            async with self._carrying_out():
                self.held = self.version

        await self._answer(work())

    async def release(self) -> None:
        """Release the shared devices."""

        async def work() -> None:
            async with self._carrying_out():
                assert self.devices is not None
                self.devices.release(self.name)

        await self._answer(work())

    async def restart(self, step: int) -> int:
        """Restore the newest state of at most `step` steps."""
        self._died.set()  # after lost rows no rank has died: forget running calls too
        if self.devices is not None:
            self.devices.training_takes(self.name)
        await asyncio.sleep(self.restart_s)
        self._died = asyncio.Event()
        self._lock = asyncio.Lock()
        self.version = max(0, min(step, self.version) - self.loses)
        self.loses = 0
        self.trained = [*self.trained[: self.version], []]
        return self.version

    async def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        died = asyncio.create_task(self._died.wait())
        task = asyncio.create_task(self._answered(work))
        await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            task.cancel()
            await asyncio.wait({task})
            raise TrainerDied("trainer-0 died")
        died.cancel()
        return task.result()

    async def _answered(self, work: Coroutine[Any, Any, T]) -> T:
        answer = await work
        await asyncio.sleep(self.answer_s)
        return answer

    @contextlib.asynccontextmanager
    async def _carrying_out(self) -> AsyncIterator[float]:
        """Run one call at a time, in order; yield the idle time before it."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if self.devices is not None:
                self.devices.training_takes(self.name)
            now = clock()
            yield now - (now if self._busy_until_s is None else self._busy_until_s)
            self._busy_until_s = clock()
            self.busy_s += self._busy_until_s - now


@dataclass(kw_only=True)
class SimulatedDisk:
    """A slow disk for checkpoints, which needs the trainer with the copy until the write ends."""

    trainer_proxy: SimulatedTrainer
    write_s: float = 0.0
    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    async def write(self, step: int) -> None:
        """Write the checkpoint of a step."""
        assert len(self.begun) == len(self.ended), "two checkpoints are written at once"
        assert self.trainer_proxy.held == step, "the copy belongs to another step"
        self.begun.append(step)
        died = asyncio.ensure_future(self.trainer_proxy._died.wait())
        try:
            await asyncio.wait([died], timeout=self.write_s)
            if died.done():
                raise TrainerDied("trainer-0 died during write")
        finally:
            died.cancel()
            self.ended.append(step)


@dataclass(kw_only=True)
class Record:
    """An observer that keeps all events."""

    first_step: int = 0
    steps: list[TrainedStep] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    failures: list[RewardFailure] = field(default_factory=list)
    refused: list[Mapping[str, Sequence[float]]] = field(default_factory=list)
    missing: list[tuple[tuple[str, ...], tuple[str, ...], int]] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    unfinished: list[tuple[int, int]] = field(default_factory=list)  # continued, dropped
    joined: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    waited_s: defaultdict[tuple[str, str], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    lent: list[tuple[float, int]] = field(default_factory=list)
    """Times for which the trainer's devices were lent, with the rollouts that finished there."""
    reasons: list[str] = field(default_factory=list)
    """Reasons of steps without lending."""

    def devices_lent(self, seconds: float, *, num_rollouts: int) -> None:
        """Keep a time of lending."""
        self.lent.append((seconds, num_rollouts))

    def not_lent(self, reason: str) -> None:
        """Keep the reason."""
        self.reasons.append(reason)

    def step_trained(self, trained: TrainedStep) -> None:
        """Keep a step and the staleness of its groups."""
        after = self.steps[-1].step if self.steps else self.first_step
        assert trained.step == after + 1, "a step is reported twice or out of order"
        self.steps.append(trained)
        for group in trained.groups:
            self.staleness.append(_staleness(trained, group))

    def rollouts_sampled(self, num_rollouts: int, *, num_tokens: int) -> None:
        """Ignore the event."""
        pass

    def weights_loaded(self, manifest: WeightManifest, **_: Any) -> None:
        """Ignore the event."""
        pass

    def reward_failed(self, failure: RewardFailure) -> None:
        """Keep a failure."""
        self.failures.append(failure)

    def parts_missing(self, parts: Sequence[str], given: Sequence[str], num_episodes: int) -> None:
        """Keep the missing parts."""
        self.missing.append((tuple(parts), tuple(given), num_episodes))

    def group_refused(self, function: str, columns: Mapping[str, Sequence[float]]) -> None:
        """Keep the columns of a refused group."""
        self.refused.append(columns)

    def waited(self, stage: str, reason: str, seconds: float) -> None:
        """Add up waiting times."""
        self.waited_s[stage, reason] += seconds

    def replica_died(self, name: str, reason: str, *, num_continued: int, num_dropped: int) -> None:
        """Keep the name of a replica, and its unfinished rollouts."""
        self.deaths.append(name)
        self.unfinished.append((num_continued, num_dropped))

    def replica_joined(self, name: str, *, version: int) -> None:
        """Keep the name of a replica."""
        self.joined.append(name)

    def trainer_restarted(self, reason: str, *, step: int, lost_steps: int, **_: Any) -> None:
        """Keep the reason and forget the lost steps."""
        self.restarts.append(reason)
        if lost_steps:
            del self.steps[step:]


def _simulated_text(request: GenerationRequest, version: int) -> RolloutText:
    return RolloutText(
        prompt="", completion=request.request_id, token_ids=[7] * 3, policy_versions=[version] * 3
    )


def _layout(num_tokens: int, *, is_played: bool = False, num_rows: int = 1) -> BlockLayout:
    tokens = np.zeros(num_tokens, np.int32)
    played = dict.fromkeys(PLAYED_COLUMNS, tokens) if is_played else {}
    columns = {
        **played,
        "prompt_token_ids": np.zeros(NUM_PROMPT_TOKENS, np.int32),
        "token_ids": tokens,
        "sampler_logprobs": tokens.astype(np.float32),
        "policy_versions": tokens,
    }
    return layout_of({name: [column] * num_rows for name, column in columns.items()})


def _staleness(trained: TrainedStep, group: RunningGroup) -> int:
    return trained.step - 1 - min(note.min_version for note in group.rollouts)


def exponential(rng: random.Random, mean_s: float) -> Callable[[], float]:
    """Return a function that draws exponentially distributed times."""
    return lambda: rng.expovariate(1 / mean_s)
