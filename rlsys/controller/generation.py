"""The generation side of the controller: prompts to replicas, rollouts to the store, weights back.

prompts ─► issue ──submit──► replica ──► collect ─► store
             ▲ gate             ▲ sync ◄── published weights
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from rlsys.controller.state import Group, RolloutNote, RunState
from rlsys.dataflow.blocks import BlockRef
from rlsys.dataflow.router import Router
from rlsys.dataflow.signal import Signal
from rlsys.types import Generation, GenerationRequest, Prompt, WeightManifest
from rlsys.workers import FinishedRollout, Replica, ReplicaDied


class Prompts(Protocol):
    def at(self, index: int) -> Prompt: ...


class GenerationSide:
    def __init__(self, state: RunState, prompts: Prompts, replicas: Sequence[Replica]) -> None:
        self._state = state
        self._prompts = prompts
        self._replicas = {replica.name: replica for replica in replicas}
        self._sampling = state.config.sampling.params()
        self._router = Router(list(self._replicas))
        self._attempts: Counter[int] = Counter()  # issues of each group
        self._partial: dict[str, Generation] = {}  # what unfinished requests had, when last told
        self._published: WeightManifest | None = None
        self._weights_published = Signal()

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "issue": self._issue(),
            **{f"collect {name}": self._collect(r) for name, r in self._replicas.items()},
            "sync": self._sync(),
            "cancel": self._cancel(),
        }

    def publish(self, manifest: WeightManifest) -> None:
        """New weights are there for the replicas."""
        self._published = manifest
        self._weights_published.notify()

    def describe(self) -> str:
        loads = {name: self._router.load(name) for name in self._router.replicas}
        return f"outstanding tokens by replica: {loads}"

    async def _issue(self) -> None:
        """Consumes prompts. Waits until the gate is open; weights that every replica has loaded,
        and dropped groups, open it. All groups that may go are issued at once, so that what a
        replica gets together does not depend on timing."""
        state = self._state
        while True:
            with state.waiting("generate", "gate"):
                await state.gate_moved.until(lambda: self._num_to_issue > 0)
            with state.waiting("generate", "store"):
                await state.store.wait_for_room(timeout_s=state.config.cluster.call_timeout_s)
            requests: list[GenerationRequest] = []
            while self._num_to_issue and state.store.has_room():
                requests += self._requests(self._next_group())
            await self._submit(requests)
            state.progress.notify()

    @property
    def _num_to_issue(self) -> int:
        return len(self._state.to_reissue) or self._state.gate.num_open

    def _next_group(self) -> Group:
        """The next group to issue: one that was lost, or that a crash left open, else a new one."""
        state = self._state
        if state.to_reissue:
            opened = state.to_reissue.popleft()
            group_id, prompt = opened.group_id, self._prompts.at(opened.prompt_index)
            state.ledger.reissue(group_id, version=state.gate.version)
        else:
            group_id, prompt = state.ledger.num_issued, self._prompts.at(state.ledger.next_prompt)
            state.ledger.issue(group_id, prompt_index=prompt.index, version=state.gate.version)
            state.gate.issue()
        group = Group(
            group_id=group_id,
            prompt=prompt,
            rows=state.store.add_group(group_id),
            rollouts=[RolloutNote() for _ in range(state.config.group_size)],
            version=state.gate.version,
            attempt=self._attempts[group_id],
        )
        self._attempts[group_id] += 1
        state.groups[group_id] = group
        return group

    def _requests(self, group: Group) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=_request_id(group, index),
                prompt_token_ids=group.prompt.token_ids,
                sampling=self._sampling,
                seed=(self._state.config.seed << 40) + group.group_id * len(group.rollouts) + index,
            )
            for index in range(len(group.rollouts))
        ]

    async def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Send requests, whole groups each, to the replicas that have the least to do."""
        by_group: defaultdict[int, list[GenerationRequest]] = defaultdict(list)
        for request in requests:
            by_group[_parse_request_id(request.request_id)[0]].append(request)
        by_replica: defaultdict[str, list[GenerationRequest]] = defaultdict(list)
        self._router.keep_only(self._state.groups)
        for group_id, members in by_group.items():
            group = self._state.groups[group_id]
            group.replica = self._router.route(
                [request.request_id for request in members],
                affinity=group_id,
                num_tokens=len(group.prompt.token_ids) + self._sampling.max_tokens,
            )
            by_replica[group.replica] += members
        await asyncio.gather(*(self._send(*item) for item in by_replica.items()))

    async def _send(self, name: str, requests: Sequence[GenerationRequest]) -> None:
        priors = {
            request.request_id: self._partial[request.request_id]
            for request in requests
            if request.request_id in self._partial
        }
        # Whoever collects from a dead replica sends on what it had.
        with contextlib.suppress(ReplicaDied):
            await self._replicas[name].submit(requests, priors)

    async def _collect(self, replica: Replica) -> None:
        """Consumes rollouts of one replica as they end; a long poll, answered when one has. When
        the replica dies, what it had goes on elsewhere."""
        while True:
            try:
                collected = await replica.collect()
            except ReplicaDied as death:
                await self._replace(replica, death)
                return
            for generation in collected.partial:
                if self._group_of(generation.request_id) is not None:
                    self._partial[generation.request_id] = generation
            for rollout in collected.finished:
                self._router.finished(replica.name, rollout.request_id)
                self._partial.pop(rollout.request_id, None)
            if collected.finished:
                self._state.observer.tokens_generated(
                    sum(rollout.num_tokens for rollout in collected.finished)
                )
                self._write(collected.finished)
                self._state.progress.notify()

    async def _replace(self, replica: Replica, death: ReplicaDied) -> None:
        """Send the requests of a dead replica to the others, with what had been sampled of them."""
        request_ids = self._router.remove(replica.name)
        if not self._router.replicas:
            raise death
        self._state.observer.replica_died(replica.name, str(death), num_requests=len(request_ids))
        wanted = set(request_ids)
        groups = {_parse_request_id(request_id)[0] for request_id in request_ids}
        await self._submit(
            [
                request
                for group_id in sorted(groups & self._state.groups.keys())
                for request in self._requests(self._state.groups[group_id])
                if request.request_id in wanted
            ]
        )
        await replica.bury(self._state.store.live_rows)

    def _group_of(self, request_id: str) -> Group | None:
        """The group that a request belongs to, if it is still wanted."""
        group_id, _, attempt = _parse_request_id(request_id)
        group = self._state.groups.get(group_id)
        return group if group is not None and group.attempt == attempt else None

    def _write(self, finished: Sequence[FinishedRollout]) -> None:
        by_block: defaultdict[BlockRef, list[FinishedRollout]] = defaultdict(list)
        for rollout in finished:
            by_block[rollout.cell[0]].append(rollout)
        for block, rollouts in by_block.items():
            if self._state.store.is_lost(block.shard):
                self._lost_in_transit(rollouts)
            else:
                self._write_block(block, rollouts)

    def _write_block(self, block: BlockRef, rollouts: Sequence[FinishedRollout]) -> None:
        live: list[FinishedRollout] = []
        rows: list[int] = []
        for rollout in rollouts:
            group = self._group_of(rollout.request_id)
            if group is None:  # dropped, or issued again, in the meantime
                self._state.store.discard(block, [rollout.cell[1]])
                continue
            index = _parse_request_id(rollout.request_id)[1]
            note = group.rollouts[index]
            note.num_prompt_tokens = rollout.num_prompt_tokens
            note.num_tokens = rollout.num_tokens
            note.finish_reason = rollout.finish_reason
            note.min_version = rollout.min_version
            live.append(rollout)
            rows.append(group.rows[index])
        if live:
            self._state.store.write(
                "generate",
                rows,
                block=block,
                places=[rollout.cell[1] for rollout in live],
                versions=[(rollout.min_version, rollout.max_version) for rollout in live],
                num_tokens=[r.num_prompt_tokens + r.num_tokens for r in live],
            )

    def _lost_in_transit(self, rollouts: Sequence[FinishedRollout]) -> None:
        """Their shard died before the store knew of them."""
        for rollout in rollouts:
            if (group := self._group_of(rollout.request_id)) is not None:
                self._state.store.drop_group(group.group_id)
                self._state.issue_again(group)

    async def _sync(self) -> None:
        """Consumes published weights. Waits for a new version; loads the newest into all replicas,
        and opens the gate when the last has it."""
        state = self._state
        while True:
            with state.waiting("sync", "weights"):
                await self._weights_published.until(lambda: self._published is not None)
            manifest, self._published = self._published, None
            assert manifest is not None
            start = state.clock()
            pauses = await self._load(manifest)
            if not pauses:  # the last replica has died; whoever collects from it says so
                return
            state.gate.samplers_at(manifest.version)
            state.observer.weights_loaded(manifest, sync_s=state.clock() - start, pauses_s=pauses)
            state.gate_moved.notify()
            state.progress.notify()

    async def _load(self, manifest: WeightManifest) -> list[float]:
        """Into every replica, all at once or one after the other; the pause of each, in seconds."""
        delayed = self._state.config.asynchrony.weight_update == "delayed"
        pauses: list[float] = []

        async def load(replica: Replica) -> None:
            with contextlib.suppress(ReplicaDied):
                pauses.append(await replica.update_weights(manifest, delayed=delayed))

        alive = [self._replicas[name] for name in self._router.replicas]
        if delayed:
            for replica in alive:
                await load(replica)
        else:
            await asyncio.gather(*(load(replica) for replica in alive))
        return pauses

    async def _cancel(self) -> None:
        """Consumes groups that were dropped or issued again; ends what still runs of them."""
        while True:
            group = await self._state.cancelled.get()
            request_ids = [_request_id(group, i) for i in range(len(group.rollouts))]
            for request_id in request_ids:
                self._partial.pop(request_id, None)
            with contextlib.suppress(ReplicaDied):
                await self._replicas[group.replica].abort(request_ids)


def _request_id(group: Group, index: int) -> str:
    return f"{group.group_id}.{index}.{group.attempt}"


def _parse_request_id(request_id: str) -> tuple[int, int, int]:
    """Group, index within it, attempt."""
    group_id, index, attempt = request_id.split(".")
    return int(group_id), int(index), int(attempt)
