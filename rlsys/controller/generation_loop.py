"""The generation side of the controller: prompts to replicas, rollouts to the store.

prompts ─► issue ──► ReplicaPool ──► collected ─► store
             ▲ gate                └► parts ─► PartialRollouts
             └── unassigned rollouts of a dead replica
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlsys.common.async_condition import first_of
from rlsys.common.random_streams import request_seed
from rlsys.common.supervision import DROPPED_GROUPS, REPLICAS, Policy, RestartPolicy, Supervisor
from rlsys.controller.borrowed_replicas import BorrowedReplicas
from rlsys.controller.device_sharing import DeviceSharing
from rlsys.controller.episode_rewards import PlayedOutcomes
from rlsys.controller.partials import PartialRollouts
from rlsys.controller.replicas import DeathOutcome, ReplicaBatch, ReplicaPool
from rlsys.controller.rollout_placement import RolloutPlacement
from rlsys.controller.state import OpenWork, RolloutNote, RunningGroup, RunState
from rlsys.controller.worker_protocols import (
    Collected,
    FinishedRollout,
    Fleet,
    Replica,
    RolloutText,
    StepPart,
    Withdrawn,
)
from rlsys.dataflow.graph.stages import PlayStage
from rlsys.dataflow.scheduling.curriculum import RETIRED
from rlsys.dataflow.scheduling.router import Router
from rlsys.dataflow.store.blocks import BlockRef
from rlsys.types import INJECTED, GenerationRequest, Prompt, Task, WeightManifest


class PromptQueue(Protocol):
    """The prompts of a run, by index over all epochs."""

    def row(self, index: int) -> int:
        """Return the dataset row of a prompt."""

    def at(self, index: int) -> Prompt:
        """Return a prompt."""


class GenerationSide:
    """The loops that issue groups, and cancel dropped ones.

    Args:
        stage: Name of the stage that writes the rollouts.
        greedy_baseline: Whether the last rollout of each group is a greedy baseline.
        play: The source stage if an environment plays the episodes and gives their rewards.
        carried: Unfinished work in the checkpoint of a resumed run.
        is_in_training: Whether the trainer has taken a group, whose rows must stay.
    """

    def __init__(
        self,
        state: RunState,
        devices: DeviceSharing,
        prompts: PromptQueue,
        *,
        stage: str,
        greedy_baseline: bool,
        play: PlayStage | None,
        fleet: Fleet,
        replicas: Mapping[int, Replica],
        newest: WeightManifest | None,
        carried: OpenWork,
        is_in_training: Callable[[int], bool],
    ) -> None:
        self._state = state
        self._prompts = prompts
        self._stage = stage
        self._greedy_baseline = greedy_baseline
        self._outcomes = PlayedOutcomes(state, play) if play else None
        self._sampling = state.config.sampling.params()
        self._attempts: Counter[int] = Counter()  # issues of each group
        self._supervisor = Supervisor[int](REPLICAS, clock=state.clock)  # of replicas and groups
        max_drops = DROPPED_GROUPS.restart.max_restarts * state.config.rollout.num_replicas
        self._drops = Supervisor[int](Policy(RestartPolicy(max_drops)), clock=state.clock)
        self._carried = _by_group([*carried.finished, *carried.parts])
        self._carried_nodes = carried.nodes
        self._borrowed: BorrowedReplicas | None = None
        self._partials = PartialRollouts(state.store)
        self._router = Router()
        self._placing = RolloutPlacement(
            state,
            self._router,
            is_in_training=is_in_training,
            whole_groups=play is not None and play.environment.group_reward is not None,
        )
        self.pool = ReplicaPool(
            state,
            devices,
            router=self._router,
            fleet=fleet,
            replicas=replicas,
            newest=newest,
            supervisor=self._supervisor,
            partials=self._partials,
            on_collected=self._store_collected,
            on_death=self._on_replica_death,
        )

    def borrow(self, replicas: Mapping[int, Replica]) -> BorrowedReplicas:
        """Return borrowed replicas, whose loops run with those of this side."""
        self._borrowed = BorrowedReplicas(
            self.pool, self._router, replicas, on_withdrawn=self.withdrawn
        )
        return self._borrowed

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the coroutines of all loops, by name."""
        borrowed = self._borrowed.loops() if self._borrowed is not None else {}
        return {"issue": self._issue(), "cancel": self._cancel(), **self.pool.loops(), **borrowed}

    def shard_lost(self, shard: str) -> None:
        """Forget partial rollouts in a shard of the store that died."""
        self._partials.shard_lost(shard)

    @contextlib.contextmanager
    def open_work(self) -> Iterator[OpenWork]:
        """Yield the sampled work that is not trained; keep its bytes until the block ends."""
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
        """Consume prompts and unassigned rollouts, and send them to replicas.

        The loop waits for the gate, for a replica and for room in the store. Weights that every
        replica has loaded and dropped groups open the gate. All requests that may start are sent at
        once, so that the batches of a replica do not depend on timing.
        """
        state = self._state
        await self.pool.wait_until_admitted()
        while True:
            with state.waiting(self._stage, "gate"):
                await state.may_issue.until(self._has_work)
            with state.waiting(self._stage, "replica"):
                await state.may_issue.until(lambda: bool(self._router.replicas))
            if batches := self._next_batches():
                await self.pool.submit(batches)
                state.progress.notify()
            elif self._has_work():
                with state.waiting(self._stage, "store"):
                    await first_of(state.may_issue, state.store.more_room)

    def _has_work(self) -> bool:
        return self._state.gate.num_open > 0 or self._placing.first_unassigned() is not None

    def _next_batches(self) -> list[ReplicaBatch]:
        """Return all batches that may start and have room: unassigned rollouts first."""
        state, placing = self._state, self._placing
        self._router.keep_only(state.groups)
        batches: list[ReplicaBatch] = []
        while (left := placing.first_unassigned()) is not None:
            if not (placed := placing.place_unassigned(left)):
                return batches
            batches += self._batches(left, placed)
        while state.gate.num_open and placing.has_room(self._next_id):
            group = self._next_group()
            if group.group_id in self._carried:
                self._restore(group)
                if group.group_id not in state.groups:  # the shard with its rows is lost
                    continue
            missing = [i for i, note in enumerate(group.rollouts) if note.finished is None]
            placed = placing.place(group, missing) if missing else {}
            if missing and not placed:  # restored rollouts have taken the room
                placing.mark_unassigned(group, missing)
            batches += self._batches(group, placed)
        return batches

    def _batches(
        self, group: RunningGroup, placed: Mapping[str, Sequence[int]]
    ) -> list[ReplicaBatch]:
        batches = []
        for replica, indices in placed.items():
            requests = [self._request(group, index) for index in indices]
            self._router.assign(
                replica,
                [request.request_id for request in requests],
                affinity=group.group_id,
                num_tokens=len(group.prompt.token_ids) + self._sampling.max_tokens,
            )
            batches.append(ReplicaBatch(replica=replica, requests=requests))
        return batches

    def _request(self, group: RunningGroup, index: int) -> GenerationRequest:
        completions = group.prompt.completions
        is_greedy = group.rollouts[index].is_greedy
        task = self._task(group, index) if self._outcomes else None
        return GenerationRequest(
            request_id=_request_id(group, index),
            prompt_token_ids=group.prompt.token_ids,
            sampling=self._sampling.greedy if is_greedy else self._sampling,
            seed=request_seed(self._state.config.seed, group.group_id, index),
            completion=completions[index] if completions else None,
            record=not completions and self._state.records(group.group_id),
            is_baseline=is_greedy,
            task=task,
            goes_on=task is not None,  # an episode has several turns
        )

    def _task(self, group: RunningGroup, index: int) -> Task:
        return Task(
            row=group.prompt.metadata,
            group_id=group.group_id,
            index=index,
            group_size=len(group.rollouts),
        )

    @property
    def _next_id(self) -> int:
        state = self._state
        return state.to_reissue[0].group_id if state.to_reissue else state.ledger.num_issued

    def _next_group(self) -> RunningGroup:
        """Issue and return the next group: a lost or unfinished one if any, else a new one."""
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
            while state.curriculum.has_retired(self._prompts.row(ledger.next_prompt)):
                ledger.skip(reason=RETIRED)
            group_id, prompt = ledger.num_issued, self._prompts.at(ledger.next_prompt)
            ledger.issue(group_id, prompt_index=prompt.index, version=version)
        state.gate.issue()
        group = RunningGroup(
            group_id=group_id,
            prompt=prompt,
            rows=state.store.add_group(group_id),
            rollouts=self._notes(),
            version=version,
            attempt=self._attempts[group_id],
        )
        self._attempts[group_id] += 1
        state.groups[group_id] = group
        return group

    def _notes(self) -> list[RolloutNote]:
        notes = [RolloutNote(index=index) for index in range(self._state.config.group_size)]
        notes[-1].is_greedy = self._greedy_baseline
        return notes

    def _restore(self, group: RunningGroup) -> None:
        """Restore the rollouts of a group from the checkpoint of a resumed run.

        Its finished rollouts are on one node. They are discarded if that node has no room.
        """
        carried = self._carried.pop(group.group_id)
        finished = [
            _index_of(one.request_id) for one in carried if isinstance(one, FinishedRollout)
        ]
        rows = [group.rows[index] for index in finished]
        has_room = not rows or self._placing.place_restored(
            rows, self._carried_nodes[group.group_id]
        )
        for one in carried:
            one = replace(one, request_id=_request_id(group, _index_of(one.request_id)))
            if isinstance(one, StepPart):
                self._partials.add(one)
            elif has_room:
                self._write([one])
            else:
                self._state.store.discard(one.cell[0], [one.cell[1]])

    def _on_replica_death(
        self, number: int, reason: str, request_ids: Sequence[str]
    ) -> DeathOutcome:
        """Mark the requests of a dead replica as unassigned, unless their groups have ended.

        The replica is given up if it keeps dying without a finished rollout, or groups are dropped
        without a complete one between.
        """
        state = self._state
        unassigned: defaultdict[int, list[int]] = defaultdict(list)
        for request_id in request_ids:
            if (group := self._group_of(request_id)) is not None:
                unassigned[group.group_id].append(_index_of(request_id))
        decision = self._supervisor.died(reason, unassigned, place=number)
        for group_id, indices in unassigned.items():
            group = state.groups[group_id]
            if group_id in decision.drop:
                state.drop(group_id, "replica died")
            else:
                state.store.withdraw([group.rows[index] for index in indices])
                self._placing.mark_unassigned(group, indices)
        state.may_issue.notify()
        gives_up = bool(decision.gives_up)
        if decision.drop:
            self._supervisor.progressed(place=number)  # the likely cause is gone
            gives_up = bool(self._drops.died(reason).gives_up)
        num_dropped = sum(len(unassigned[group_id]) for group_id in decision.drop)
        num_unfinished = sum(len(indices) for indices in unassigned.values())
        return DeathOutcome(
            gives_up=gives_up,
            num_continued=num_unfinished - num_dropped,
            num_dropped=num_dropped,
        )

    def withdrawn(self, replica: str, withdrawn: Withdrawn) -> None:
        """Let other replicas continue requests that a replica has given up.

        Keys and values that are computed anew from tokens differ from the former ones by rounding.
        So a run that must repeat its numbers samples these requests again from their prompts.
        """
        state, router = self._state, self._router
        if state.config.is_repeatable:
            for part in withdrawn.parts:
                self._partials.discard(part)
            for request_id in withdrawn.request_ids:
                self._partials.forget(request_id)
        else:
            self._store_collected(Collected(finished=[], parts=withdrawn.parts))
        groups: dict[int, RunningGroup] = {}
        indices: defaultdict[int, list[int]] = defaultdict(list)
        # If it has died meanwhile, its requests are unassigned already.
        names = withdrawn.request_ids if router.has(replica) else ()
        for request_id in names and router.outstanding(replica, names):
            if (group := self._group_of(request_id)) is not None:
                groups[group.group_id] = group
                indices[group.group_id].append(_index_of(request_id))
        router.take_away(replica, names, affinities=groups)
        for group_id, group in groups.items():
            state.store.withdraw([group.rows[index] for index in indices[group_id]])
            self._placing.mark_unassigned(group, indices[group_id])
        state.may_issue.notify()

    def _store_collected(self, collected: Collected) -> None:
        """Write the results of a replica to the store."""
        for part in collected.parts:
            if self._is_running(part.request_id):
                self._partials.add(part)
            else:
                self._partials.discard(part)
        for rollout in collected.finished:
            self._partials.forget(rollout.request_id)
        if collected.finished:
            self._state.observer.rollouts_sampled(
                len(collected.finished),
                num_tokens=sum(rollout.num_tokens for rollout in collected.finished),
            )
            self._write(collected.finished)

    def _group_of(self, request_id: str) -> RunningGroup | None:
        """Return the group of a request; None if it was dropped or issued again."""
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
                self._reissue_lost(rollouts)
            else:
                self._write_block(block, rollouts)

    def _write_block(self, block: BlockRef, rollouts: Sequence[FinishedRollout]) -> None:
        live: list[FinishedRollout] = []
        live_groups: dict[int, RunningGroup] = {}
        rows: list[int] = []
        if self._outcomes:
            # Check all before writing any: a failed episode drops its whole group.
            rollouts = [one for one in rollouts if self._record_outcome(block, one)]
        for rollout in rollouts:
            group = self._group_of(rollout.request_id)
            if group is None:  # dropped or issued again in the meantime
                self._state.store.discard(block, [rollout.cell[1]])
                continue
            index = _index_of(rollout.request_id)
            group.rollouts[index].finished = rollout
            if self._state.records(group.group_id):
                group.rollouts[index].text = _text(group, index, rollout)
            live.append(rollout)
            live_groups[group.group_id] = group
            rows.append(group.rows[index])
        if any(_is_complete(group) for group in live_groups.values()):
            self._drops.progressed()
        if live:
            self._state.store.write(
                self._stage,
                rows,
                block=block,
                places=[rollout.cell[1] for rollout in live],
                versions=[(rollout.min_version, rollout.max_version) for rollout in live],
                num_tokens=[r.num_prompt_tokens + r.num_tokens for r in live],
                scalars=self._outcomes.scalars(live) if self._outcomes else None,
            )
            if self._outcomes:
                self._outcomes.written(live_groups.values())

    def _record_outcome(self, block: BlockRef, rollout: FinishedRollout) -> bool:
        """Record the reward of an episode and return True.

        Discard an episode without a reward, or without a group, and return False.
        """
        assert self._outcomes is not None
        group = self._group_of(rollout.request_id)
        if group and self._outcomes.record(group, _index_of(rollout.request_id), rollout):
            return True
        self._state.store.discard(block, [rollout.cell[1]])
        return False

    def _reissue_lost(self, rollouts: Sequence[FinishedRollout]) -> None:
        """Issue the groups again of rollouts whose shard died before they were written."""
        for rollout in rollouts:
            if (group := self._group_of(rollout.request_id)) is not None:
                self._state.store.drop_group(group.group_id)
                self._state.reissue(group)

    async def _cancel(self) -> None:
        """Consume groups that were dropped or issued again; abort their running requests."""
        while True:
            group = await self._state.cancelled.get()
            request_ids = [_request_id(group, i) for i in range(len(group.rollouts))]
            for request_id in request_ids:
                self._partials.forget(request_id)
            await self.pool.abort(request_ids)


def _text(group: RunningGroup, index: int, rollout: FinishedRollout) -> RolloutText | None:
    """Return the text of a recorded rollout; None for a rollout of an old checkpoint.

    The text is the dataset's completion, or that of the replica with the prompt added.
    """
    if not group.prompt.completions:
        text = rollout.text
        return text and replace(text, prompt=text.prompt or group.prompt.text)
    completion = group.prompt.completions[index]
    mask = completion.loss_mask or (True,) * rollout.num_tokens
    return RolloutText(
        prompt=group.prompt.text,
        completion=completion.text,
        token_ids=completion.token_ids,
        policy_versions=[rollout.min_version if trained else INJECTED for trained in mask],
    )


def _is_complete(group: RunningGroup) -> bool:
    return all(note.finished is not None for note in group.rollouts)


def _request_id(group: RunningGroup, index: int) -> str:
    return f"{group.group_id}.{index}.{group.attempt}"


def _parse_request_id(request_id: str) -> tuple[int, int, int]:
    """Return the group id, the index within the group and the attempt."""
    group_id, index, attempt = request_id.split(".")
    return int(group_id), int(index), int(attempt)


def _index_of(request_id: str) -> int:
    return _parse_request_id(request_id)[1]


def _by_group(
    rollouts: Sequence[FinishedRollout | StepPart],
) -> defaultdict[int, list[FinishedRollout | StepPart]]:
    by_group: defaultdict[int, list[FinishedRollout | StepPart]] = defaultdict(list)
    for one in rollouts:
        by_group[_parse_request_id(one.request_id)[0]].append(one)
    return by_group
