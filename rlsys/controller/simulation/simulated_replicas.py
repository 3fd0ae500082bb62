"""Simulated replicas: rollouts take a time and end without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlsys.common.async_condition import AsyncCondition
from rlsys.controller.simulation.simulated_workers import LEASES, NUM_PROMPT_TOKENS, SharedDevices
from rlsys.controller.worker_protocols import (
    Collected,
    FinishedRollout,
    ReplicaDied,
    RolloutText,
    StepPart,
    Withdrawn,
)
from rlsys.dataflow.graph.stages import (
    BRANCHES_COLUMN,
    SEATS_COLUMN,
    TURN_REWARDS_COLUMN,
    TURNS_COLUMN,
)
from rlsys.dataflow.store.blocks import BlockLayout, BlockRef, ColumnRef, layout_of
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import FinishReason, GenerationRequest, Sampled, WeightManifest

PLAYED_COLUMNS = (TURN_REWARDS_COLUMN, TURNS_COLUMN, SEATS_COLUMN, BRANCHES_COLUMN)

NUM_TOKENS = 3  # of each completion and episode

NONE_SAMPLED = Sampled.of(np.empty(0, np.int32))  # for rows that are not trained on


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
    num_by_seat: tuple[int, ...] = ()  # of an episode's NUM_TOKENS tokens
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
        layout = _layout(NUM_TOKENS, is_played=bool(self.plays))
        self._finished.put_nowait(
            FinishedRollout(
                request_id=request.request_id,
                cell=(BlockRef(self.shard, 0, 0, layout), 0),
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                num_tokens=0 if is_silent else NUM_TOKENS,
                outcome=self.plays(request) if self.plays and not is_aborted else None,
                min_version=NONE_SAMPLED.oldest if has_none else first_version,
                max_version=NONE_SAMPLED.newest if has_none else self.version,
                finish_reason=finish_reason,
                num_injected=NUM_TOKENS if is_baseline else 0,
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
            layout = _layout(NUM_TOKENS, is_played=bool(self.plays), num_rows=len(finished))
            block = BlockRef(self.shard, next(LEASES), 0, layout)
            finished = [
                dataclasses.replace(rollout, cell=(block, place))
                for place, rollout in enumerate(finished)
            ]
        parts = await self.progress()
        return Collected(finished=finished, parts=parts, num_sampled=NUM_TOKENS * len(ended))

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
