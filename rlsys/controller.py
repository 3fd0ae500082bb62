"""The controller: asynchronous loops over the stages of a dataflow.

                         ┌─────────────── gate opens ◄── sync ◄── weights, version v+1 ──┐
                         ▼                                                               │
    prompts ─► issue ─► replica ─► collect ─► score ─► advantage ─► train ─► optimizer step
                                      │          │          │          ▲
                                      └──────────┴── store ─┴──────────┘

Each loop takes from the store the rows whose columns its stage reads, and writes the columns of its
stage; the store wakes the next. The controller sees metadata only. It drives the workers through
the protocols of rlsys.workers, so that Ray actors and a simulation run under the same code. An
error in any loop ends all of them and is raised from `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rlsys.config import RunConfig
from rlsys.dataflow.admission import AdmissionGate
from rlsys.dataflow.batching import ReadyGroup, StepAssembler
from rlsys.dataflow.blocks import BlockRef, Cell
from rlsys.dataflow.graph import Dataflow, PerGroupStage
from rlsys.dataflow.ledger import Ledger, OpenGroup
from rlsys.dataflow.router import Router
from rlsys.dataflow.selection import FIRST_COMPLETE, IN_ORDER, whole_groups
from rlsys.dataflow.signal import Signal
from rlsys.dataflow.store import RowBatch, StreamStore
from rlsys.engines.training.protocol import StepResult
from rlsys.errors import first_error
from rlsys.rewards import RewardFailure, RewardResult
from rlsys.types import FinishReason, Generation, GenerationRequest, Prompt, WeightManifest
from rlsys.workers import (
    FinishedRollout,
    Learner,
    Replica,
    ReplicaDied,
    RolloutText,
    RowsLost,
    Scorer,
    ScoreTask,
    TrainTask,
)

# Calls to the scorer under way at a time: enough that a slow rollout holds up no other batch.
MAX_SCORE_CALLS = 64

# Steps' worth of groups that may fail, with none between them that does not, before the run ends.
MAX_FAILED_STEPS = 2

# Parts of a step handed to the trainer at a time: one that runs, and the next that waits for it.
MAX_PARTS_IN_FLIGHT = 2


class StallError(RuntimeError):
    """Nothing has happened for too long; the message says what everybody waits for."""


class RewardsFailed(RuntimeError):
    """Too many groups in a row had no reward: the reward function is broken."""


class Prompts(Protocol):
    def at(self, index: int) -> Prompt: ...


@dataclass(kw_only=True)
class RolloutNote:
    """What is remembered of a rollout until its group is trained."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0
    finish_reason: FinishReason = FinishReason.ABORTED
    min_version: int = 0
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    advantage: float = 0.0
    text: RolloutText | None = None


@dataclass(kw_only=True)
class Group:
    """One prompt and its rollouts, from issue to the end."""

    group_id: int
    prompt: Prompt
    rows: Sequence[int]  # ids in the store
    rollouts: list[RolloutNote]
    version: int = 0  # the oldest that its samplers may have had when it was issued
    attempt: int = 0  # counts issues of the same group: what an earlier one sampled is not used
    replica: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(note.num_prompt_tokens + note.num_tokens for note in self.rollouts)

    @property
    def num_completion_tokens(self) -> int:
        return sum(note.num_tokens for note in self.rollouts)


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One optimizer step, for the observer."""

    step: int
    result: StepResult
    groups: Sequence[Group]
    publish_s: float


class Observer(Protocol):
    """Told what happens; never changes it."""

    def step_trained(self, trained: TrainedStep) -> None: ...

    def tokens_generated(self, num_tokens: int) -> None: ...

    def weights_loaded(
        self, manifest: WeightManifest, *, sync_s: float, pauses_s: Sequence[float]
    ) -> None: ...

    def reward_failed(self, failure: RewardFailure) -> None: ...

    def replica_died(self, name: str, reason: str, *, num_requests: int) -> None: ...


class Controller:
    """Runs a dataflow to its last optimizer step.

    `first_step` is the number of steps that the learner has behind it, `ledger` the run's history
    so far: open groups in it are issued again under their own ids.
    """

    def __init__(
        self,
        *,
        flow: Dataflow,
        config: RunConfig,
        prompts: Prompts,
        store: StreamStore,
        ledger: Ledger,
        replicas: Sequence[Replica],
        scorer: Scorer,
        learner: Learner,
        observer: Observer,
        checkpoint: Callable[[int], Awaitable[None]],
        first_step: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._store = store
        self._ledger = ledger
        self._replicas = {replica.name: replica for replica in replicas}
        self._scorer = scorer
        self._learner = learner
        self._observer = observer
        self._checkpoint = checkpoint
        self._clock = clock
        self._step = first_step
        self._advantage = flow.stage(PerGroupStage)
        self._sampling = config.sampling.params()
        self._router = Router(list(self._replicas))
        self._gate = AdmissionGate(
            groups_per_step=config.prompts_per_step,
            max_staleness=config.asynchrony.max_staleness,
            num_steps=config.num_steps,
            over_issue=config.asynchrony.over_issue,
        )
        self._gate.restore(
            num_issued=ledger.num_issued, num_dropped=ledger.num_dropped, version=first_step
        )
        self._assembler = StepAssembler(
            groups_per_step=config.prompts_per_step,
            num_ranks=config.trainer.num_ranks,
            micro_batch_tokens=config.trainer.micro_batch_tokens,
            stream=config.asynchrony.stream,
        )
        self._groups: dict[int, Group] = {}
        self._to_reissue = deque(ledger.open_groups)
        self._published: WeightManifest | None = None
        size, step_rows = config.group_size, config.rollouts_per_step
        self._to_score = store.subscribe("score", at_most=step_rows)
        self._to_advantage = store.subscribe(
            self._advantage.name, at_most=step_rows, selection=whole_groups(FIRST_COMPLETE)
        )
        order = IN_ORDER if config.asynchrony.order == "issued" else FIRST_COMPLETE
        self._to_train = store.subscribe("train", at_most=size, selection=whole_groups(order))
        self._num_failed_in_a_row = 0
        self._dropped: asyncio.Queue[Group] = asyncio.Queue()
        self._partial: dict[
            str, Generation
        ] = {}  # what unfinished requests had, when last heard of
        self._attempts: Counter[int] = Counter()  # issues of each group
        self._cells: dict[int, Cell] = {}  # of rows that wait for their micro-batch
        self._gate_moved = Signal()
        self._weights_published = Signal()
        self._progress = Signal()

    async def run(self) -> None:
        """Train until config.num_steps. Raises the first error of any loop, after ending all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(loop, name=name)
                    for name, loop in (
                        ("issue", self._issue()),
                        *((f"collect {r.name}", self._collect(r)) for r in self._replicas.values()),
                        ("score", self._score()),
                        ("advantage", self._advantages()),
                        ("sync", self._sync()),
                        ("abort", self._abort()),
                        ("watch", self._watch()),
                    )
                ]
                await self._train()
                for loop in loops:
                    loop.cancel()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    # Issue: prompts -> replicas

    async def _issue(self) -> None:
        """Consumes prompts. Waits until the gate is open; weights that every replica has loaded,
        and dropped groups, open it. All groups that may go are issued at once, so that what a
        replica gets together does not depend on timing."""
        while True:
            await self._gate_moved.until(lambda: self._num_to_issue > 0)
            await self._store.wait_for_room(timeout_s=self._config.cluster.call_timeout_s)
            requests: list[GenerationRequest] = []
            while self._num_to_issue and self._store.has_room():
                requests += self._requests(self._next_group())
            await self._submit(requests)
            self._progress.notify()

    @property
    def _num_to_issue(self) -> int:
        return len(self._to_reissue) or self._gate.num_open

    def _next_group(self) -> Group:
        """The next group to issue: one that a crash left open, else a new one."""
        if self._to_reissue:
            opened = self._to_reissue.popleft()
            group_id, prompt = opened.group_id, self._prompts.at(opened.prompt_index)
        else:
            group_id, prompt = self._ledger.num_issued, self._prompts.at(self._ledger.next_prompt)
            self._ledger.issue(group_id, prompt_index=prompt.index, version=self._gate.version)
            self._gate.issue()
        group = Group(
            group_id=group_id,
            prompt=prompt,
            rows=self._store.add_group(group_id),
            rollouts=[RolloutNote() for _ in range(self._config.group_size)],
            version=self._gate.version,
            attempt=self._attempts[group_id],
        )
        self._attempts[group_id] += 1
        self._groups[group_id] = group
        return group

    async def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Send requests, whole groups each, to the replicas that have the least to do."""
        by_group: defaultdict[int, list[GenerationRequest]] = defaultdict(list)
        for request in requests:
            by_group[_parse_request_id(request.request_id)[0]].append(request)
        by_replica: defaultdict[str, list[GenerationRequest]] = defaultdict(list)
        for group_id, members in by_group.items():
            group = self._groups[group_id]
            group.replica = self._router.route(
                [request.request_id for request in members],
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

    def _requests(self, group: Group) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=_request_id(group, index),
                prompt_token_ids=group.prompt.token_ids,
                sampling=self._sampling,
                seed=(self._config.seed << 40) + group.group_id * len(group.rollouts) + index,
            )
            for index in range(len(group.rollouts))
        ]

    # Collect: replicas -> store

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
                self._observer.tokens_generated(sum(r.num_tokens for r in collected.finished))
                self._write_rollouts(collected.finished)
                self._progress.notify()

    async def _replace(self, replica: Replica, death: ReplicaDied) -> None:
        """Send the requests of a dead replica to the others, with what had been sampled of them."""
        request_ids = self._router.remove(replica.name)
        if not self._router.replicas:
            raise death
        self._observer.replica_died(replica.name, str(death), num_requests=len(request_ids))
        wanted = set(request_ids)
        groups = {_parse_request_id(request_id)[0] for request_id in request_ids}
        requests = [
            request
            for group_id in sorted(groups)
            if (group := self._groups.get(group_id)) is not None
            for request in self._requests(group)
            if request.request_id in wanted
        ]
        await self._submit(requests)
        await replica.bury(self._store.live_rows)

    def _group_of(self, request_id: str) -> Group | None:
        """The group that a request belongs to, if it is still wanted."""
        group_id, _, attempt = _parse_request_id(request_id)
        group = self._groups.get(group_id)
        return group if group is not None and group.attempt == attempt else None

    def _write_rollouts(self, finished: Sequence[FinishedRollout]) -> None:
        by_block: defaultdict[BlockRef, list[FinishedRollout]] = defaultdict(list)
        for rollout in finished:
            by_block[rollout.cell[0]].append(rollout)
        for block, rollouts in by_block.items():
            if self._store.is_lost(block.shard):
                self._lost_in_transit(rollouts)
                continue
            live: list[FinishedRollout] = []
            rows: list[int] = []
            for rollout in rollouts:
                group = self._group_of(rollout.request_id)
                if group is None:  # dropped, or issued again, in the meantime
                    self._store.discard(block, [rollout.cell[1]])
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
                self._store.write(
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
                self._store.drop_group(group.group_id)
                self._issue_again(group)

    # Score: store -> reward workers -> store

    async def _score(self) -> None:
        """Consumes rollouts that have ended. Waits for one; takes all there are, and does not wait
        for their scores before it takes the next, so that a slow one holds up no other."""
        async with asyncio.TaskGroup() as calls:
            slots = asyncio.Semaphore(MAX_SCORE_CALLS)
            while True:
                await slots.acquire()
                batch = await self._to_score.take(timeout_s=None)
                tasks = [self._score_task(batch, i) for i in range(len(batch))]
                call = calls.create_task(self._score_batch(batch.rows, tasks))
                call.add_done_callback(lambda _: slots.release())

    async def _score_batch(self, rows: Sequence[int], tasks: Sequence[ScoreTask]) -> None:
        try:
            scored = await self._scorer.score(tasks)
        except RowsLost:  # shard_lost issues their groups again
            self._store.release("score", rows)
            return
        for row, task, result in zip(rows, tasks, scored, strict=True):
            if isinstance(result.outcome, RewardFailure):
                self._reward_failed(row, task.group_id, result.outcome)
        live_rows: list[int] = []
        rewards: list[float] = []
        for row, task, result in zip(rows, tasks, scored, strict=True):
            group = self._groups.get(task.group_id)
            # Issued again in the meantime, the group has other rows.
            if group and row in group.rows and isinstance(result.outcome, RewardResult):
                note = group.rollouts[task.index]
                note.reward = result.outcome.total
                note.components = result.outcome.components
                note.text = result.text
                live_rows.append(row)
                rewards.append(note.reward)
        if live_rows:
            self._store.write("score", live_rows, scalars={"reward": rewards})
        self._store.release("score", rows)
        self._progress.notify()

    def _score_task(self, batch: RowBatch, i: int) -> ScoreTask:
        group = self._groups[batch.group_ids[i]]
        return ScoreTask(
            group_id=group.group_id,
            index=batch.indices[i],
            cell=batch.cells["token_ids"][i],
            prompt_text=group.prompt.text,
            metadata=group.prompt.metadata,
            finish_reason=group.rollouts[batch.indices[i]].finish_reason,
            record=group.group_id % self._config.prompts_per_step
            < self._config.observe.record_groups,
        )

    def _reward_failed(self, row: int, group_id: int, failure: RewardFailure) -> None:
        """One failed rollout drops its group, whose baseline would be wrong without it."""
        self._observer.reward_failed(failure)
        if group_id not in self._groups or row not in self._groups[group_id].rows:
            return
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS * self._config.prompts_per_step:
            raise RewardsFailed(
                f"{self._num_failed_in_a_row} groups in a row were dropped because of reward "
                f"{failure.reward!r}: {failure.message}\nNo step can be filled; mend the reward "
                "function and run again."
            )
        self._drop(group_id, f"reward {failure.kind}")

    # Advantage: store -> function over a group -> store

    async def _advantages(self) -> None:
        """Consumes groups whose rewards are all there. Waits for one; computes at once."""
        stage = self._advantage
        while True:
            batch = await self._to_advantage.take(timeout_s=None)
            self._num_failed_in_a_row = 0
            size = self._config.group_size
            advantages: list[float] = []
            for start in range(0, len(batch), size):
                columns = [
                    torch.tensor(batch.scalars[column.name][start : start + size])
                    for column in stage.reads
                ]
                values = stage.function(*columns).tolist()
                for index, value in zip(batch.indices[start : start + size], values, strict=True):
                    self._groups[batch.group_ids[start]].rollouts[index].advantage = value
                advantages += values
            self._store.write(stage.name, batch.rows, scalars={stage.writes[0].name: advantages})
            self._store.release(stage.name, batch.rows)

    # Train: store -> micro-batches -> optimizer step -> weights

    async def _train(self) -> None:
        """Consumes groups with advantages, in the order of asynchrony.order. Waits for the next
        group of the step; a group's last reward unblocks it."""
        while self._step < self._config.num_steps:
            in_flight: deque[asyncio.Task[None]] = deque()
            while not self._assembler.is_finished:
                if self._assembler.num_wanted:
                    batch = await self._to_train.take(timeout_s=None)
                    self._assembler.add(self._fresh_groups(batch))
                while (part := self._assembler.next_part()) is not None:
                    if len(in_flight) == MAX_PARTS_IN_FLIGHT:
                        await in_flight.popleft()
                    in_flight.append(asyncio.create_task(self._train_part(part)))
            await asyncio.gather(*in_flight)
            await self._finish_step()

    def _fresh_groups(self, batch: RowBatch) -> list[ReadyGroup]:
        """Drops groups with a token older than the bound: none may enter a gradient."""
        oldest_allowed = self._step - self._config.asynchrony.max_staleness
        ready = []
        size = self._config.group_size
        for start in range(0, len(batch), size):
            group = self._groups[batch.group_ids[start]]
            if min(note.min_version for note in group.rollouts) < oldest_allowed:
                self._drop(group.group_id, "stale")
                self._store.release("train", batch.rows[start : start + size])
                continue
            ready.append(
                ReadyGroup(
                    group_id=group.group_id,
                    row_ids=tuple(batch.rows[start : start + size]),
                    num_tokens=group.num_tokens,
                )
            )
            for i in range(start, start + size):
                self._cells[batch.rows[i]] = batch.cells["token_ids"][i]
        return ready

    async def _train_part(self, shares: list[list[ReadyGroup]]) -> None:
        await self._learner.accumulate(
            [[task for ready in share for task in self._train_tasks(ready)] for share in shares]
        )
        self._store.release("train", [row for share in shares for g in share for row in g.row_ids])
        self._progress.notify()

    def _train_tasks(self, ready: ReadyGroup) -> list[TrainTask]:
        group = self._groups[ready.group_id]
        return [
            TrainTask(
                cell=self._cells.pop(row),
                advantage=note.advantage,
                group_id=group.group_id,
                group_size=len(group.rollouts),
                group_num_tokens=group.num_completion_tokens,
            )
            for row, note in zip(ready.row_ids, group.rollouts, strict=True)
        ]

    async def _finish_step(self) -> None:
        result = await self._learner.optimizer_step()
        self._step += 1
        group_ids = self._assembler.group_ids
        self._assembler.finish()
        self._ledger.train(group_ids, step=self._step)
        trained = [self._groups.pop(group_id) for group_id in sorted(group_ids)]
        self._cancel_what_comes_too_late()
        start = self._clock()
        self._published = await self._learner.publish()
        self._weights_published.notify()
        self._observer.step_trained(
            TrainedStep(
                step=self._step,
                result=result,
                groups=trained,
                publish_s=self._clock() - start,
            )
        )
        every = self._config.checkpoint_every
        if self._step == self._config.num_steps or (every and self._step % every == 0):
            await self._checkpoint(self._step)
        self._progress.notify()

    def _cancel_what_comes_too_late(self) -> None:
        """Groups whose first tokens may be older than the next step may train on; after the last
        step, whatever is left of what was issued beyond it."""
        is_last = self._step == self._config.num_steps
        oldest_allowed = self._step - self._config.asynchrony.max_staleness
        for group in list(self._groups.values()):
            if is_last:
                self._drop(group.group_id, "surplus")
            elif group.version < oldest_allowed:
                self._drop(group.group_id, "stale")

    # Sync: weights -> replicas -> gate

    async def _sync(self) -> None:
        """Consumes published weights. Waits for a new version; loads the newest into all replicas,
        in the middle of generation, and opens the gate."""
        while True:
            await self._weights_published.until(lambda: self._published is not None)
            manifest, self._published = self._published, None
            assert manifest is not None
            start = self._clock()
            pauses = await self._load(manifest)
            self._gate.samplers_at(manifest.version)
            self._observer.weights_loaded(manifest, sync_s=self._clock() - start, pauses_s=pauses)
            self._gate_moved.notify()
            self._progress.notify()

    async def _load(self, manifest: WeightManifest) -> list[float]:
        """Into every replica, all at once or one after the other; the pause of each, in seconds."""
        delayed = self._config.asynchrony.weight_update == "delayed"
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

    # Ends and failures

    def shard_lost(self, shard: str) -> None:
        """A shard of the store died: issue the groups again whose rows it held. Raises RowsLost if
        the step under way has taken some of them."""
        for group_id in self._store.lost(shard):
            if group_id in self._assembler.group_ids:
                raise RowsLost(
                    f"shard {shard} of the store died with rows of group {group_id}, which the "
                    f"trainer was about to read for step {self._step + 1}; resume from the newest "
                    "checkpoint."
                )
            self._issue_again(self._groups[group_id])

    def _drop(self, group_id: int, reason: str) -> None:
        """End a group without training it; others are issued in its stead."""
        group = self._groups.pop(group_id)
        self._store.drop_group(group_id)
        self._ledger.drop(group_id, reason=reason)
        self._gate.drop()
        self._dropped.put_nowait(group)
        self._gate_moved.notify()

    async def _watch(self) -> None:
        """Raises StallError when nothing at all has happened for cluster.call_timeout_s."""
        limit = self._config.cluster.call_timeout_s
        while True:
            try:
                async with asyncio.timeout(limit):
                    await self._progress.next()
            except TimeoutError:
                raise StallError(
                    f"nothing has happened for {limit:g} s (cluster.call_timeout_s): step "
                    f"{self._step + 1} lacks {self._assembler.num_wanted} groups, "
                    f"{len(self._groups)} groups are open, outstanding tokens by replica: "
                    f"{ {name: self._router.load(name) for name in self._replicas} }. Raise the "
                    "limit if rollouts take longer than that."
                ) from None

    def _issue_again(self, group: Group) -> None:
        """From the beginning, under its own id; the store has dropped its rows."""
        del self._groups[group.group_id]
        self._dropped.put_nowait(group)
        self._to_reissue.append(OpenGroup(group_id=group.group_id, prompt_index=group.prompt.index))
        self._gate_moved.notify()

    async def _abort(self) -> None:
        """Consumes dropped groups; cancels what still runs of them."""
        while True:
            group = await self._dropped.get()
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
