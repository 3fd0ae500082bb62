"""Simulated workers whose times follow from the work: tokens, context, cache, bytes.

    TimedReplica ── BatchingEngine ── DecodeCosts ┐
    TimedTrainer ── TrainingCosts                 ├ SharedCores, on CPUs
    TimedScorer, TimedController                  ┘

The real controller calls them in virtual time, like the workers of simulated_workers.py. Completion
lengths are drawn by a function of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.simulation.batching_engine import (
    BatchingEngine,
    DecodeCosts,
    SampledSequence,
)
from rlsys.controller.simulation.shared_cores import SharedCores, WorkTimer
from rlsys.controller.simulation.simulated_replicas import PLAYED_COLUMNS
from rlsys.controller.simulation.simulated_workers import SimulatedTrainer
from rlsys.controller.worker_protocols import (
    Collected,
    FinishedRollout,
    ReportScores,
    Scored,
    ScoreTask,
    StepPart,
    StepRowsRef,
    Withdrawn,
    Written,
)
from rlsys.dataflow.scheduling.microbatch_plan import GroupLengths
from rlsys.dataflow.store.blocks import BlockLayout, BlockRef, ColumnRef, layout_of
from rlsys.rewards import RewardResult
from rlsys.types import FinishReason, GenerationRequest, WeightManifest

LEASES = itertools.count(1 << 30)

COLUMNS = ("prompt_token_ids", "token_ids", "sampler_logprobs", "policy_versions")
DTYPES = ("int32", "int32", "float32", "int32")
PLAYED_DTYPES = ("float32", "int32", "int32", "int32")
PART_COLUMNS, PART_DTYPES = COLUMNS[1:], DTYPES[1:]


class ReplicaCosts(DecodeCosts, Protocol):
    """Seconds that a replica takes."""

    @property
    def load_s(self) -> float:
        """Pause of generation while new weights are loaded."""


class TrainingCosts(Protocol):
    """Seconds that the ranks of a trainer take. The groups are those of one rank's micro-batch."""

    def train_s(self, groups: Sequence[GroupLengths]) -> float:
        """Return the time of the forward and backward passes."""

    def infer_s(self, groups: Sequence[GroupLengths]) -> float:
        """Return the time of a forward pass."""

    @property
    def optimizer_s(self) -> float:
        """Time of an optimizer step."""

    @property
    def publish_s(self) -> float:
        """Time to publish the weights."""

    @property
    def release_s(self) -> float:
        """Time to release and to restore the devices' memory, when generation shares them."""


# Number of tokens of the completion of a request.
DrawLength = Callable[[GenerationRequest], int]

# Seconds of the tool after each turn of an episode but the last. A completion has no turns.
DrawTools = Callable[[GenerationRequest], Sequence[float]]


def no_tools(request: GenerationRequest) -> Sequence[float]:
    """Return the tool calls of a completion: none."""
    return ()


@dataclass(kw_only=True)
class TimedController:
    """The process of the controller: it takes a time for each rollout, one after the other.

    `other_s` is the time per rollout in which other threads of the run use a core. Nothing waits
    for them.
    """

    seconds: float = 0.0
    other_s: float = 0.0
    cores: SharedCores = field(default_factory=SharedCores)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _others: set[asyncio.Future[None]] = field(default_factory=set)  # a loop has weak references

    async def receive(self, num_rollouts: int) -> None:
        """Let the process work on rollouts that have arrived."""
        if self.other_s:
            task = asyncio.ensure_future(self.cores.work(num_rollouts * self.other_s))
            self._others.add(task)
            task.add_done_callback(self._others.discard)
        if self.seconds:
            async with self._turn:
                await self.cores.work(num_rollouts * self.seconds)


@dataclass(kw_only=True, eq=False)
class TimedReplica:
    """A replica whose engine takes the time that its costs say.

    An episode samples an equal part of its tokens in each turn. Between two turns it waits for its
    tool outside the engine, and its keys and values stay cached.

    With `forgets`, an update of the weights drops the keys and values of running requests.
    `gather_s` is the time between two answers to a long poll, and `report_s` the longest time until
    one. `parts` are the parts of an episode's reward, or None for completions.
    """

    name: str
    costs: ReplicaCosts
    draw_length: DrawLength
    draw_tools: DrawTools = no_tools
    parts: Sequence[str] | None = None
    controller: TimedController = field(default_factory=TimedController)
    cores: SharedCores = field(default_factory=SharedCores)
    num_processes: int = 1
    cache_tokens: int
    max_running: int = 1 << 30
    forgets: bool = False
    gather_s: float = 0.0
    report_s: float | None = None
    node: str = "node"
    version: int = 0
    num_loads: int = 0
    paused_s: float = 0.0
    _engine: BatchingEngine = field(init=False)
    _requests: dict[str, _Running] = field(default_factory=dict)
    _finished: list[FinishedRollout] = field(default_factory=list)
    _changed: AsyncCondition = field(default_factory=AsyncCondition)
    _timer: WorkTimer | None = None
    _is_busy: bool = False
    _num_sampled: int = 0  # tokens at the last report

    def __post_init__(self) -> None:
        self._engine = BatchingEngine(
            self.costs, cache_tokens=self.cache_tokens, max_running=self.max_running
        )

    @property
    def engine(self) -> BatchingEngine:
        """Return the engine's model, with its counters."""
        return self._engine

    async def submit(
        self, requests: Sequence[GenerationRequest], priors: Mapping[str, Sequence[ColumnRef]]
    ) -> None:
        """Queue requests; those with priors continue after them."""
        for request in requests:
            num_prior = sum(
                int(block.layout.lengths[0, place])
                for block, place in priors.get(request.request_id, ())
            )
            num_tokens = max(num_prior + 1, self.draw_length(request))
            running = _Running(
                sequence=SampledSequence(
                    name=request.request_id,
                    prompt=int(request.request_id.partition(".")[0]),  # the group
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_tokens=num_tokens,
                    num_done=num_prior,
                ),
                num_tokens=num_tokens,
                tools=self.draw_tools(request),
                min_version=self.version,
                num_reported=num_prior,
            )
            running.start_turn()
            self._requests[request.request_id] = running
            self._engine.add(running.sequence, self._now_s)
        self._schedule()

    async def collect(self) -> Collected:
        """Return the rollouts that have finished; wait for the first, but at most `report_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.report_s):
                await self._changed.until(lambda: bool(self._finished))
        if self.gather_s:
            await asyncio.sleep(self.gather_s)
        self._engine.advance(self._now_s)
        finished, self._finished = self._finished, []
        await self.controller.receive(len(finished))
        num_before, self._num_sampled = self._num_sampled, self._engine.num_sampled
        return Collected(finished=finished, num_sampled=self._num_sampled - num_before)

    async def progress(self) -> list[StepPart]:
        """Return the unreported tokens of running requests."""
        self._engine.advance(self._now_s)
        self._take_finished()
        parts = []
        for name, running in self._requests.items():
            num_done = self._engine.num_done(running.sequence)
            if (num_new := num_done - running.num_reported) > 0:
                layout = _layout(PART_COLUMNS, PART_DTYPES, [num_new] * 3)
                parts.append(
                    StepPart(
                        request_id=name,
                        start=running.num_reported,
                        cell=(BlockRef(self.node, next(LEASES), 0, layout), 0),
                        num_tokens=num_new,
                        min_version=running.min_version,
                    )
                )
                running.num_reported = num_done
        return parts

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop sampling these requests."""
        for name in request_ids:
            if (running := self._requests.get(name)) is None:
                continue
            if running.tool is not None:  # it is outside the engine
                running.tool.cancel()
                self._end(running.sequence, FinishReason.ABORTED)
            elif sequence := self._engine.abort(name, self._now_s):
                self._end(sequence, FinishReason.ABORTED)
        self._take_finished()
        self._schedule()

    async def withdraw(self, request_ids: Sequence[str]) -> Withdrawn:
        """Stop sampling these requests and return their tokens."""
        reported = await self.progress()
        names = [name for name in request_ids if name in self._requests]
        self._engine.is_admitting = False
        for name in names:
            self._engine.abort(name, self._now_s)
            del self._requests[name]
        self._engine.admit_again(self._now_s)
        self._take_finished()
        self._schedule()
        others = [part for part in reported if part.request_id not in names]
        for part in others:  # their tokens are reported later
            self._requests[part.request_id].num_reported = part.start
        parts = [part for part in reported if part.request_id in names]
        return Withdrawn(request_ids=names, parts=parts)

    async def update_weights(self, manifest: WeightManifest, *, delayed: bool) -> float:
        """Load a version: at once, or after all running requests have ended."""
        if delayed:
            self._engine.is_admitting = False
            await self._changed.until(lambda: self._engine.num_running == 0)
        self._engine.pause(self._now_s)
        self._take_finished()
        self._schedule()
        if self.forgets:
            self._engine.forget()
        await self.cores.work(self.costs.load_s, self.num_processes)
        self.version = manifest.version
        self.num_loads += 1
        self.paused_s += self.costs.load_s
        for running in self._requests.values():
            if self._engine.num_done(running.sequence) == 0:
                running.min_version = self.version
        self._engine.resume(self._now_s)
        self._engine.admit_again(self._now_s)
        self._schedule()
        return self.costs.load_s

    async def release(self) -> None:
        """Stop until new weights arrive."""
        self._engine.pause(self._now_s)
        self._take_finished()
        self._schedule()

    async def clean_up(self, live_rows: Callable[[str], Mapping[int, int]]) -> None:
        """Stop for good."""
        if self._timer is not None:
            self._timer.cancel()
        for running in self._requests.values():
            if running.tool is not None:
                running.tool.cancel()

    @property
    def _now_s(self) -> float:
        return self.cores.now_s

    def _schedule(self) -> None:
        """Wake at the engine's next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self._engine.next_event_s()
        if self._is_busy != (at_s is not None):
            self._is_busy = not self._is_busy
            self.cores.set_busy(self.num_processes if self._is_busy else -self.num_processes)
        if at_s is not None:
            self._timer = self.cores.call_at(at_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._engine.advance(self._now_s)
        self._take_finished()
        self._schedule()

    def _take_finished(self) -> None:
        for sequence in self._engine.take_finished():
            running = self._requests[sequence.name]
            if sequence.num_done < running.num_tokens:
                self._call_tool(running)
            else:
                self._end(sequence, FinishReason.STOP)

    def _call_tool(self, running: _Running) -> None:
        """Continue an episode after its tool."""

        def answered() -> None:
            running.tool = None
            running.sequence.num_uncached = 0
            running.start_turn()
            self._engine.add(running.sequence, self._now_s)
            self._take_finished()
            self._schedule()

        loop = asyncio.get_running_loop()
        running.tool = loop.call_later(running.tool_s, answered)

    def _end(self, sequence: SampledSequence, reason: FinishReason) -> None:
        running = self._requests.pop(sequence.name)
        num_prompt, num_tokens = sequence.num_prompt_tokens, sequence.num_done
        columns: tuple[str, ...] = COLUMNS
        dtypes: tuple[str, ...] = DTYPES
        outcome = None
        if self.parts is not None:
            columns, dtypes = (*COLUMNS, *PLAYED_COLUMNS), (*DTYPES, *PLAYED_DTYPES)
            if reason is not FinishReason.ABORTED:
                outcome = RewardResult(total=0.0, components=dict.fromkeys(self.parts, 0.0))
        layout = _layout(columns, dtypes, [num_prompt, *[num_tokens] * (len(columns) - 1)])
        self._finished.append(
            FinishedRollout(
                request_id=sequence.name,
                cell=(BlockRef(self.node, next(LEASES), 0, layout), 0),
                num_prompt_tokens=num_prompt,
                num_tokens=num_tokens,
                min_version=running.min_version,
                max_version=self.version,
                finish_reason=reason,
                outcome=outcome,
            )
        )
        self._changed.notify()


@dataclass(kw_only=True)
class _Running:
    sequence: SampledSequence
    num_tokens: int  # of all turns
    tools: Sequence[float]  # seconds of the tool after each turn but the last
    min_version: int
    num_reported: int
    tool: asyncio.TimerHandle | None = None  # the running one

    @property
    def _turn(self) -> int:
        """Number of turns that are complete."""
        num_turns = len(self.tools) + 1
        return min(self.sequence.num_done * num_turns // self.num_tokens, len(self.tools))

    @property
    def tool_s(self) -> float:
        """Seconds of the tool after the turn that has ended."""
        return self.tools[max(self._turn - 1, 0)]

    def start_turn(self) -> None:
        """Let the sequence end with its next turn."""
        end = -(-(self._turn + 1) * self.num_tokens // (len(self.tools) + 1))
        self.sequence.num_tokens = max(self.sequence.num_done + 1, end)


@dataclass(kw_only=True)
class TimedTrainer(SimulatedTrainer):
    """A trainer whose passes take the time that its costs say."""

    costs: TrainingCosts
    cores: SharedCores = field(default_factory=SharedCores)
    num_ranks: int = 1

    def __post_init__(self) -> None:
        self.step_s, self.publish_s = self.costs.optimizer_s, self.costs.publish_s

    async def take(self, seconds: float) -> None:
        """Let all ranks compute."""
        await self.cores.work(seconds, self.num_ranks)

    def infer_s(self, share: StepRowsRef) -> float:
        """Return the time of a forward pass; functions of a step without tokens take none."""
        has_tokens = COLUMNS[1] in share.cells
        return self.costs.infer_s(group_lengths(share)) if has_tokens else 0.0

    def train_s(self, share: StepRowsRef) -> float:
        """Return the time of the forward and backward passes over the rows of one rank."""
        return self.costs.train_s(group_lengths(share)) if len(share) else 0.0

    async def release(self) -> None:
        """Release the shared devices."""
        await asyncio.sleep(self.costs.release_s)


@dataclass(kw_only=True)
class TimedPool:
    """A frozen model whose forward passes take the time that its costs say.

    Its columns have a value per token or a value per row.
    """

    costs: TrainingCosts
    token_columns: Sequence[str] = ()
    row_columns: Sequence[str] = ()
    num_workers: int = 1
    cores: SharedCores = field(default_factory=SharedCores)
    node: str = "node"
    busy_s: float = 0.0
    _free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.num_workers)

    async def run(self, rows: StepRowsRef) -> Written:
        """Write the columns after a forward pass over the rows."""
        async with self._free:
            seconds = self.costs.infer_s(group_lengths(rows))
            self.busy_s += seconds
            await self.cores.work(seconds)
        scalars = {name: [0.0] * len(rows) for name in self.row_columns}
        if not self.token_columns:
            return Written(scalars=scalars)
        values = [np.zeros(1, np.float32)] * len(rows)
        layout = layout_of(dict.fromkeys(self.token_columns, values))
        return Written(block=BlockRef(self.node, next(LEASES), 0, layout), scalars=scalars)


@dataclass(kw_only=True)
class TimedScorer:
    """Reward processes that need a time for each rollout."""

    seconds: Callable[[], float]
    num_workers: int = 1
    cores: SharedCores = field(default_factory=SharedCores)
    _free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.num_workers)

    async def score(self, tasks: Sequence[ScoreTask], report: ReportScores) -> None:
        """Score all tasks and report them together."""
        async with self._free:
            await self.cores.work(sum(self.seconds() for _ in tasks))
        result = RewardResult(total=0.0, components={})
        report({place: Scored(outcome=result) for place in range(len(tasks))})


def group_lengths(rows: StepRowsRef) -> list[GroupLengths]:
    """Return the lengths of rows, by group: their shared prompt and their completions."""
    prompts: dict[int, int] = {}
    completions: dict[int, list[int]] = {}
    cells = rows.cells[COLUMNS[1]]
    for group_id, (block, place) in zip(rows.group_ids, cells, strict=True):
        columns, lengths = block.layout.columns, block.layout.lengths
        prompts[group_id] = int(lengths[columns.index(COLUMNS[0]), place])
        completions.setdefault(group_id, []).append(int(lengths[columns.index(COLUMNS[1]), place]))
    return [
        GroupLengths(prompt=prompt, completions=completions[group_id])
        for group_id, prompt in prompts.items()
    ]


def _layout(
    columns: tuple[str, ...], dtypes: tuple[str, ...], lengths: Sequence[int]
) -> BlockLayout:
    return BlockLayout(columns, dtypes, np.array(lengths, np.int32).tobytes())
