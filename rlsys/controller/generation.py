"""The generation side of the controller: prompts to replicas, rollouts to the store.

prompts ─► issue ──► ReplicaPool ──► collected ─► store
             ▲ gate                └► parts ─► PartialRollouts
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlsys.controller.partials import PartialRollouts
from rlsys.controller.replicas import Batch, ReplicaPool
from rlsys.controller.state import Group, OpenWork, RolloutNote, RunState
from rlsys.dataflow.blocks import BlockRef
from rlsys.types import GenerationRequest, Prompt, WeightManifest
from rlsys.workers import Collected, FinishedRollout, Fleet, Part, Replica

# A group that was being sampled at so many deaths of replicas may be what they died of.
MAX_DEATHS = 3


class Prompts(Protocol):
    def at(self, index: int) -> Prompt: ...


class GenerationSide:
    """`carried`: what a resumed run's checkpoint has of groups that had not ended."""

    def __init__(
        self,
        state: RunState,
        prompts: Prompts,
        *,
        fleet: Fleet,
        replicas: Mapping[int, Replica],
        newest: WeightManifest | None,
        carried: OpenWork,
    ) -> None:
        self._state = state
        self._prompts = prompts
        self._sampling = state.config.sampling.params()
        self._attempts: Counter[int] = Counter()  # issues of each group
        self._deaths: Counter[int] = Counter()  # of replicas, while they sampled this group
        self._carried = _by_group([*carried.finished, *carried.parts])
        self._partials = PartialRollouts(state.store)
        self.pool = ReplicaPool(
            state,
            fleet=fleet,
            replicas=replicas,
            newest=newest,
            partials=self._partials,
            on_collected=self._collected,
            on_death=self._left_behind,
        )

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"issue": self._issue(), "cancel": self._cancel(), **self.pool.loops()}

    def shard_lost(self, shard: str) -> None:
        self._partials.shard_lost(shard)

    @contextlib.contextmanager
    def open_work(self) -> Iterator[OpenWork]:
        """What has been sampled and not been trained; its bytes stay until the block ends."""
        state = self._state
        notes = [
            (row, note.finished)
            for group in state.groups.values()
            for row, note in zip(group.rows, group.rollouts, strict=True)
            if note.finished is not None
        ]
        rows = [row for row, _ in notes]
        state.store.pin(rows)
        try:
            with self._partials.reading() as parts:
                yield OpenWork(finished=[finished for _, finished in notes], parts=parts)
        finally:
            state.store.unpin(rows)

    async def _issue(self) -> None:
        """Consumes prompts. Waits until the gate is open and a replica is there; weights that every
        replica has loaded, and dropped groups, open the gate. All groups that may go are issued at
        once, so that what a replica gets together does not depend on timing."""
        state = self._state
        while True:
            with state.waiting("generate", "gate"):
                await state.gate_moved.until(lambda: self._state.gate.num_open > 0)
            with state.waiting("generate", "replica"):
                await self.pool.wait_for_one()
            with state.waiting("generate", "store"):
                await state.store.wait_for_room(timeout_s=state.config.cluster.call_timeout_s)
            batches: list[Batch] = []
            while state.gate.num_open and state.store.has_room():
                group = self._next_group()
                self._restore(group)
                if group.group_id in state.groups:  # else the shard with its rows is lost
                    batches += self._batches([group])
            await self.pool.submit(batches, keep_only=state.groups)
            state.progress.notify()

    def _next_group(self) -> Group:
        """The next group to issue: one that was lost, or that a crash left open, else a new one."""
        state, ledger = self._state, self._state.ledger
        version = state.gate.version
        if state.to_reissue:
            opened = state.to_reissue.popleft()
            group_id, prompt = opened.group_id, self._prompts.at(opened.prompt_index)
            if group_id in self._carried:
                version = opened.version
            else:
                ledger.reissue(group_id, version=version)
        else:
            group_id, prompt = ledger.num_issued, self._prompts.at(ledger.next_prompt)
            ledger.issue(group_id, prompt_index=prompt.index, version=version)
        state.gate.issue()
        group = Group(
            group_id=group_id,
            prompt=prompt,
            rows=state.store.add_group(group_id),
            rollouts=[RolloutNote() for _ in range(state.config.group_size)],
            version=version,
            attempt=self._attempts[group_id],
        )
        self._attempts[group_id] += 1
        state.groups[group_id] = group
        return group

    def _restore(self, group: Group) -> None:
        """Give a group of a resumed run what its checkpoint has of it."""
        for told in self._carried.pop(group.group_id, []):
            index = _index_of(told.request_id)
            told = replace(told, request_id=_request_id(group, index))
            if isinstance(told, Part):
                self._partials.add(told)
            else:
                self._write([told])

    def _batches(self, groups: Sequence[Group]) -> list[Batch]:
        """The requests of what these groups lack."""
        seed, size = self._state.config.seed << 40, self._state.config.group_size
        return [
            Batch(
                group_id=group.group_id,
                num_tokens=len(group.prompt.token_ids) + self._sampling.max_tokens,
                requests=[
                    GenerationRequest(
                        request_id=_request_id(group, index),
                        prompt_token_ids=group.prompt.token_ids,
                        sampling=self._sampling,
                        seed=seed + group.group_id * size + index,
                    )
                    for index, note in enumerate(group.rollouts)
                    if note.finished is None
                ],
            )
            for group in groups
            if any(note.finished is None for note in group.rollouts)
        ]

    def _left_behind(self, request_ids: Sequence[str]) -> list[Batch]:
        """A replica died with these requests: those that are to go on elsewhere."""
        groups = {group.group_id: group for r in request_ids if (group := self._group_of(r))}
        self._deaths.update(groups.keys())
        for group_id in [g for g in groups if self._deaths[g] == MAX_DEATHS]:
            del groups[group_id]
            self._state.drop(group_id, "replica died")
        return self._batches([groups[group_id] for group_id in sorted(groups)])

    def _collected(self, collected: Collected) -> None:
        """What a replica has told, into the store."""
        for part in collected.parts:
            if self._is_running(part.request_id):
                self._partials.add(part)
            else:
                self._partials.refuse(part)
        for rollout in collected.finished:
            self._partials.forget(rollout.request_id)
        if collected.finished:
            self._state.observer.tokens_generated(
                sum(rollout.num_tokens for rollout in collected.finished)
            )
            self._write(collected.finished)

    def _group_of(self, request_id: str) -> Group | None:
        """The group that a request belongs to, if it is still wanted."""
        group_id, _, attempt = _parse_request_id(request_id)
        group = self._state.groups.get(group_id)
        return group if group is not None and group.attempt == attempt else None

    def _is_running(self, request_id: str) -> bool:
        group = self._group_of(request_id)
        return group is not None and group.rollouts[_index_of(request_id)].finished is None

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
            index = _index_of(rollout.request_id)
            group.rollouts[index].finished = rollout
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

    async def _cancel(self) -> None:
        """Consumes groups that were dropped or issued again; ends what still runs of them."""
        while True:
            group = await self._state.cancelled.get()
            request_ids = [_request_id(group, i) for i in range(len(group.rollouts))]
            for request_id in request_ids:
                self._partials.forget(request_id)
            await self.pool.abort(group.replica, request_ids)


def _request_id(group: Group, index: int) -> str:
    return f"{group.group_id}.{index}.{group.attempt}"


def _parse_request_id(request_id: str) -> tuple[int, int, int]:
    """Group, index within it, attempt."""
    group_id, index, attempt = request_id.split(".")
    return int(group_id), int(index), int(attempt)


def _index_of(request_id: str) -> int:
    return _parse_request_id(request_id)[1]


def _by_group(
    told: Sequence[FinishedRollout | Part],
) -> defaultdict[int, list[FinishedRollout | Part]]:
    by_group: defaultdict[int, list[FinishedRollout | Part]] = defaultdict(list)
    for one in told:
        by_group[_parse_request_id(one.request_id)[0]].append(one)
    return by_group
