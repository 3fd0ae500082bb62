"""Environment workers as Ray actors: event loops with thousands of episodes each.

Finished episodes are written to the store; the caller of `collect` gets their metadata.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from rlsys.controller.worker_protocols import Collected, FinishedRollout, RolloutText
from rlsys.dataflow.graph.stages import (
    BRANCHES_COLUMN,
    SEATS_COLUMN,
    TURN_REWARDS_COLUMN,
    TURNS_COLUMN,
)
from rlsys.dataflow.store.blocks import ColumnRef
from rlsys.environments.episode import Played
from rlsys.environments.episode_host import Ended, EpisodeHost, EpisodeRequest
from rlsys.environments.turn_columns import num_by_seat, seats_of, turns_of
from rlsys.environments.workers.loop_watchdog import BLOCKED_S, Blocked, LoopWatchdog
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.types import FinishReason, GenerationRequest, Sampled

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat
from ..cluster.long_poll import COLLECT_WAIT_S, LongPoll
from ..store.store_actor import StoreAddress
from ..store.store_writer import StoreWriter
from .generation_client import GenerationClient

# How long an ended episode waits for others before it is reported.
GATHER_S = 0.02

# takes the sampler of the policy and those of partners
MakeHost = Callable[[Any, Mapping[str, Any]], EpisodeHost]


@ray.remote(concurrency_groups=HEARTBEAT_GROUP | {"watchdog": 1})
class EnvironmentActor(Heartbeat):
    """Actor that plays episodes, writes them to the store, and reports metadata and rewards.

    `replica` samples for the policy, `partners` for other models by name.
    """

    def __init__(
        self,
        name: str,
        make_host: MakeHost,
        replica: Any,
        partners: Mapping[str, Any],
        store: StoreAddress,
        tracer: Tracer,
        *,
        blocked_s: float = BLOCKED_S,
    ) -> None:
        self._tracer = tracer
        self._blocked_s = blocked_s
        self._watchdog: LoopWatchdog | None = None
        self._turns = GenerationClient(name, replica)
        self._partners = {model: GenerationClient(name, actor) for model, actor in partners.items()}
        self._make_host = make_host
        self._host: EpisodeHost | None = None
        self._store = StoreWriter(store)
        self._ended = LongPoll(lambda: self._require_host().collect())
        self._records: set[str] = set()
        self._num_sampled = 0

    async def start(self) -> None:
        """Load the tokenizer and the environment.

        Raises:
            ValueError: One of them cannot be loaded.
        """
        host = self._make_host(self._turns, self._partners)
        await host.start()
        self._host = host
        self._watchdog = LoopWatchdog(limit_s=self._blocked_s)

    @ray.method(concurrency_group="watchdog")
    def watch(self, seconds: float) -> Blocked | None:
        """Watch for `seconds` whether an episode blocks the event loop, in a separate thread."""
        assert self._watchdog is not None, "used while it starts"
        return self._watchdog.watch(seconds)

    async def place(self) -> tuple[str, str, int]:
        """Return the ids of the node, of the actor, and of its process."""
        context = ray.get_runtime_context()
        return str(context.get_node_id()), str(context.get_actor_id()), os.getpid()

    async def drain_trace(self) -> TraceBatch:
        """Return the trace records since the last call."""
        return self._tracer.drain()

    async def use_store(self, address: StoreAddress) -> None:
        """Use another address of the store after this actor's shard died."""
        self._store.use(address)

    async def submit(self, requests: list[GenerationRequest]) -> None:
        """Start to play the tasks of requests."""
        host = self._require_host()
        for request in requests:
            assert request.task is not None, "an environment plays tasks"
            if request.record:
                self._records.add(request.request_id)
            self._tracer.job_begins()
        host.submit([as_episode(request) for request in requests])
        self._tracer.counter("episodes", host.num_running)

    async def report_unplayed(
        self, verdicts: list[tuple[GenerationRequest, RewardFailure | None]]
    ) -> None:
        """Report episodes that failed or were cancelled elsewhere, like those played here."""
        for request, failure in verdicts:
            self._tracer.job_begins()
            self._require_host().end_unplayed(as_episode(request), failure)

    async def abort(self, request_ids: list[str]) -> None:
        """Abort episodes."""
        self._require_host().abort(request_ids)

    async def collect(self) -> Collected:
        """Return the episodes that ended since the last call, after a bounded wait."""
        ended = await self._ended.within(COLLECT_WAIT_S)
        if ended:
            await asyncio.sleep(GATHER_S)
            ended += await self._ended.within(0.0)
        num_before = self._num_sampled
        self._num_sampled = sum(turns.num_sampled for turns in self._all_turns)
        num_new = self._num_sampled - num_before
        if not ended:
            return Collected(finished=[], num_sampled=num_new)
        for turns in self._all_turns:
            turns.ended([one.request.request_id for one in ended])
        for _ in ended:
            self._tracer.job_ends()
        self._tracer.counter("episodes", self._require_host().num_running)
        finished = await self._write(ended)
        return Collected(finished=finished, num_sampled=num_new)

    async def close(self) -> None:
        """Close the environment."""
        if self._host is not None:
            await self._host.close()

    @property
    def _all_turns(self) -> list[GenerationClient]:
        return [self._turns, *self._partners.values()]

    def _require_host(self) -> EpisodeHost:
        assert self._host is not None, "used while it starts"
        return self._host

    async def _write(self, ended: Sequence[Ended]) -> list[FinishedRollout]:
        none_i, none_f = np.empty(0, np.int32), np.empty(0, np.float32)
        made = [None if one.played is None else one.played.trajectory for one in ended]
        block = await self._store.put(
            {
                "prompt_token_ids": [t.prompt_token_ids if t else none_i for t in made],
                "token_ids": [t.token_ids if t else none_i for t in made],
                "sampler_logprobs": [t.sampler_logprobs if t else none_f for t in made],
                "policy_versions": [t.policy_versions if t else none_i for t in made],
                TURN_REWARDS_COLUMN: [t.turn_rewards if t else none_f for t in made],
                TURNS_COLUMN: [turns_of(t) if t else none_i for t in made],
                SEATS_COLUMN: [seats_of(t) if t else none_i for t in made],
                BRANCHES_COLUMN: [t.branches if t else none_i for t in made],
            }
        )
        return [self._finished(one, (block, place)) for place, one in enumerate(ended)]

    def _finished(self, ended: Ended, cell: ColumnRef) -> FinishedRollout:
        request, played = ended.request, ended.played
        is_recorded = request.request_id in self._records
        self._records.discard(request.request_id)
        if played is None:
            return FinishedRollout(
                request_id=request.request_id,
                cell=cell,
                num_prompt_tokens=0,
                num_tokens=0,
                min_version=0,
                max_version=0,
                finish_reason=FinishReason.ABORTED,
                outcome=ended.failure,
            )
        trajectory = played.trajectory
        sampled = Sampled.of(trajectory.policy_versions)
        return FinishedRollout(
            request_id=request.request_id,
            cell=cell,
            num_prompt_tokens=len(trajectory.prompt_token_ids),
            num_tokens=len(trajectory.token_ids),
            min_version=sampled.oldest,
            max_version=sampled.newest,
            finish_reason=played.finish_reason,
            num_injected=sampled.num_injected,
            num_by_seat=num_by_seat(trajectory.policy_versions, seats_of(trajectory)),
            outcome=RewardResult(total=played.total, components=played.components),
            text=_text(self._require_host(), request, played) if is_recorded else None,
        )


def _text(host: EpisodeHost, request: EpisodeRequest, played: Played) -> RolloutText:
    trajectory = played.trajectory
    return RolloutText(
        prompt=host.prompt_text(trajectory),
        completion=host.completion_text(request, played),
        token_ids=trajectory.token_ids.tolist(),
        policy_versions=trajectory.policy_versions.tolist(),
        turns=played.transcript,
    )


def as_episode(request: GenerationRequest) -> EpisodeRequest:
    """Return the episode that a request asks for."""
    task = request.task
    assert task is not None
    return EpisodeRequest(
        request_id=request.request_id,
        task=task.row,
        sampling=request.sampling,
        seed=request.seed,
        group_id=task.group_id,
        index=task.index,
        group_size=task.group_size,
    )
