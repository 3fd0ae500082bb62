"""The controller's `TrainerProxy`: all ranks of a trainer, restarted when one of them dies.

RayTrainerProxy ──► RankGroup: one life of all ranks ──► TrainerActor, one per rank
     ├────────────► SnapshotHolders: memory on the ranks' nodes, from which the next group
     resumes
     └────────────► Layouts: the layout of the next group, according to the places available
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlsys.common.atomic_files import writing
from rlsys.common.background_tasks import start_task
from rlsys.common.supervision import TRAINER_OPERATIONS, retried
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.config.rollout_config import WeightTransport
from rlsys.controller.worker_protocols import StepRowsRef, TrainerDied, Written
from rlsys.dataflow.graph.stages import PerBatchStage
from rlsys.engines.training.state_resharding import Move, find_move
from rlsys.reallocation.shards import Holder, TensorShard
from rlsys.reallocation.traffic import size_text
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.runs.checkpoint import Checkpoint
from rlsys.types import StepResult, WeightManifest

from ..cluster.calls import InputLost, Worker, WorkerDied, as_future, loading_failure
from ..store.store_actor import StoreAddress
from .elastic import Layouts
from .memory_checkpoints import SnapshotHolders, SnapshotSlot
from .rank_group import RankGroup
from .weight_imports import OTHER_NODE, WeightImports

logger = logging.getLogger(__name__)


class RayTrainerProxy:
    """Trainer whose ranks are Ray actors. Rank 0 gives the answer of all ranks.

    Args:
        start_worker: Starts the actor of a rank, in the current layout and place of `layouts`.
        holders: Holders of the snapshots.
        layouts: Possible layouts. After a change of layout or nodes, the new ranks get their state
            from
            the snapshots of the former ones, in memory, and `report` gets a message.
        num_snapshots: Number of states that are kept in memory. If they are lost with a node, ranks
            start from the newest checkpoint, or from the result of the warm start.
        start_timeout_s: Time limit for starting all ranks.
        newest_checkpoint: Returns the newest checkpoint, if any.
        warm_start_dir: Directory for the result of the warm start, until `close`.
        stages: Functions over a step that this trainer computes.
        model: Name of the model.
        per_token: Whether the model computes a value for each token of a row.
        open_store: Ensures that a node has a shard of the store, and returns the store's address.
        writes: Whether the trainer writes to the store.
        weight_transport: How weights reach nodes that lack them.
        report: Gets messages for the user.
    """

    def __init__(
        self,
        start_worker: Callable[[int], Worker],
        holders: SnapshotHolders,
        *,
        layouts: Layouts,
        num_snapshots: int,
        start_timeout_s: float,
        newest_checkpoint: Callable[[], Checkpoint | None],
        warm_start_dir: Path,
        stages: Sequence[PerBatchStage] = (),
        model: str = "policy",
        per_token: bool = True,
        open_store: Callable[[str], Awaitable[StoreAddress]] | None = None,
        writes: bool = False,
        weight_transport: WeightTransport = "auto",
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        self.node_id = ""  # node of rank 0, set by `start`
        self._start_worker = start_worker
        self._holders = holders
        self._layouts = layouts
        self._report = report
        self._num_snapshots = num_snapshots
        self._start_timeout_s = start_timeout_s
        self._newest_checkpoint = newest_checkpoint
        self._stages = {stage.name: stage for stage in stages}
        self.model = model
        self._per_token = per_token
        self._open_store = open_store
        self.writes = writes
        self._warm_start_dir = warm_start_dir
        self._group = self._holding_group = RankGroup([])
        self._node_ids: list[str] = []  # by rank
        self._snapshot_bytes: list[int] = []  # by rank
        self._shards: list[tuple[TensorShard, ...]] = []  # by rank, if layouts are elastic
        self._reported_layout = layouts.current  # the layout that was last reported to the user
        self._state_source = ""  # source of the state, as part of a message
        self._attention_tokens = math.inf
        self._replacing: asyncio.Task[None] | None = None
        self._growing: asyncio.Future[None] | None = None
        self._freeing: asyncio.Future[None] | None = None
        self._is_warm_started = False
        self._is_released = False
        self._step = 0  # number of optimizer steps
        self.reader_nodes: Callable[[], Iterable[str]] = tuple
        """Returns the ids of the nodes with replicas, which read the published weights."""
        self.imports = WeightImports(self, weight_transport, report=report)
        # The newest version that was sent, and its deltas or offers by node and base version.
        self._sent: tuple[WeightManifest | None, dict[tuple[str, int | None, str], list[Any]]]
        self._sent = (None, {})
        # version in which a replica found damaged bytes
        self._corrupt_manifest: WeightManifest | None = None

    async def start(self, checkpoint: Path | None = None) -> None:
        """Build all ranks from model.path or a checkpoint; retry if a rank dies meanwhile."""
        try:
            await _retry_after_deaths(lambda: self._start_anew(checkpoint))
        except TrainerDied as death:
            raise TrainerDied(loading_failure(self.model, death)) from None
        self._report_layout()

    async def restart(self, step: int) -> int:
        """Restart all ranks with the newest state of at most `step` steps; return its steps."""
        restored = 0

        async def restart() -> None:
            nonlocal restored
            await self._start_ranks()
            restored = await self._restore(step)
            await self._ensure_snapshots()

        # Ray notices a lost node late, so the first restart may be placed on one.
        await _retry_after_deaths(restart)
        self._report_layout()
        return restored

    def _report_layout(self) -> None:
        if self._layout != self._reported_layout:
            before, self._reported_layout = self._reported_layout, self._layout
            self._report(
                f"{self.model} changed its layout from {before} to {self._layout}"
                f"{self._state_source}"
            )

    def close(self) -> None:
        """End the holders of the snapshots, and remove the result of the warm start.

        The ranks are ended together with all other workers.
        """
        for task in (self._replacing, self._growing, self._freeing):
            if task is not None:
                task.cancel()
        self._holders.close()
        shutil.rmtree(self._warm_start_dir, ignore_errors=True)

    @property
    def ranks(self) -> Sequence[Worker]:
        """Return the workers of the current ranks."""
        return self._group.ranks

    def weight_deltas(
        self, manifest: WeightManifest, node_id: str, base: int | None, link: Link | None
    ) -> list[Any]:
        """Return references to what a node lacks of a version, by sending rank.

        They are deltas, which Ray transfers to the node, or without bytes offers of what the ranks
        send over a link from now on. Nodes without a rank lack the same data, so it is packed once
        for all of them that have the same version `base`, or none.
        """
        if self._sent[0] != manifest:
            self._sent = (manifest, {})
        _, sent = self._sent
        place = node_id if node_id in self._node_ids else OTHER_NODE
        method = "weight_delta" if link is None else "offer_weights"
        ranks = [
            rank.handle
            for rank, of_rank in zip(self.ranks, self._node_ids, strict=True)
            if of_rank != node_id
        ]
        if (place, base, method) not in sent:
            sent[place, base, method] = [
                getattr(rank, method).remote(manifest, place, base) for rank in ranks
            ]
        found = sent[place, base, method]
        if link is not None:
            send_offers(ranks, found, link)
        return found

    def send_again(self, manifest: WeightManifest) -> None:
        """Pack a version again for the next request, after data was damaged in transit."""
        if self._sent[0] == manifest:
            self._sent = (None, {})

    def mark_corrupt(self, manifest: WeightManifest, reason: str) -> None:
        """Record that a replica found damaged bytes in data that was sent twice.

        When a second replica reports the same version, the bytes are damaged where the trainer
        staged them: the trainer restarts and publishes again.
        """
        if manifest == self._corrupt_manifest:
            self._group.end(TrainerDied(f"the trainer's staged weights are damaged: {reason}"))
        self._corrupt_manifest = manifest

    async def sft_step(
        self, token_ids: list[list[int]], prompt_lengths: list[int], learning_rate: float
    ) -> float:
        """Take one supervised step; return its loss."""
        losses = await self._group.all("sft_step", token_ids, prompt_lengths, learning_rate)
        loss: float = losses[0]
        return loss

    async def warm_start(self, supervised_steps: Callable[[], Awaitable[None]]) -> None:
        """Run supervised steps before the first optimizer step as the initial state.

        If a rank dies meanwhile, everything is repeated.
        """

        async def warm_start() -> None:
            if self._group.failure is not None:
                await self._start_anew(None)
            await supervised_steps()
            await self._group.all("clear_snapshots")
            await self._group.all("reset_optimizer")
            await asyncio.to_thread(shutil.rmtree, self._warm_start_dir, ignore_errors=True)
            await self.save(self._warm_start_dir)

        await _retry_after_deaths(warm_start)
        self._is_warm_started = True

    @property
    def _layout(self) -> ParallelLayout:
        return self._layouts.current

    @property
    def _num_ranks(self) -> int:
        return self._layout.num_ranks

    @property
    def can_grow_now(self) -> bool:
        """Return whether there are places for a larger layout, which `restart` would use."""
        growing = self._growing
        if growing is None or not growing.done() or growing.cancelled():
            return False
        return growing.exception() is None

    async def snapshot(self) -> None:
        """Keep the current state in memory, even if no snapshot is due."""
        await self._group.all("snapshot")

    @property
    def num_data(self) -> int:
        """Return the number of data-parallel ranks."""
        return self._layout.num_data

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages."""
        return self._layout.pp

    @property
    def attention_tokens(self) -> float:
        """Return the sequence length at which attention costs as much as the rest of the model."""
        return self._attention_tokens

    async def infer(
        self, writes: str, shares: Sequence[StepRowsRef], *, adapters: bool = True
    ) -> Sequence[Written]:
        # Among ranks with the same rows, one reports the result.
        """Compute values for the rows of each data rank; return where they were written."""
        reporting = [rank for rank in range(self._num_ranks) if self._layout.counts(rank)]
        written = await self._group.each(
            "infer",
            [
                [writes, self._per_token, adapters, share, rank in reporting]
                for rank, share in enumerate(self._by_rank(shares))
            ],
        )
        return [written[rank] for rank in sorted(reporting, key=self._layout.data_index)]

    async def compute(self, stage: str, rows: StepRowsRef) -> Written:
        """Compute a function over a step on rank 0."""
        written: Written = await self._group.first("compute", self._stages[stage], rows)
        return written

    async def accumulate(self, micro_batches: Sequence[Sequence[StepRowsRef]]) -> None:
        """Accumulate the gradients of micro-batches, each with one share of rows per data rank."""
        self._on_work_resumed()
        by_rank = zip(*map(self._by_rank, micro_batches), strict=True)
        await self._group.each("accumulate", list(by_rank))

    def _by_rank(self, shares: Sequence[StepRowsRef]) -> list[StepRowsRef]:
        return [shares[self._layout.data_index(rank)] for rank in range(self._num_ranks)]

    async def optimizer_step(self, *, last: bool = True) -> StepResult:
        """Take an optimizer step."""
        results: list[StepResult] = await self._group.all("optimizer_step", last)
        gaps = {key: of_row for one in results for key, of_row in one.gaps.items()}
        result = replace(results[0], gaps=gaps)
        if last:
            self._step = result.policy_version
        return result

    async def publish(self) -> WeightManifest:
        """Publish the weights for the nodes with replicas."""
        nodes = sorted(self.reader_nodes())
        on_device = self.imports.reads_devices
        manifest: WeightManifest = (await self._group.all("publish", nodes, on_device))[0]
        return manifest

    async def watch(self) -> None:
        """Wait until a rank fails, then raise the failure."""
        await self._group.watch()

    async def hold(self) -> None:
        """Keep the current state until `write` has written it."""
        self._holding_group = self._group
        await self._group.all("hold")

    async def release(self) -> None:
        """Free the memory of the devices until the next call."""
        self._is_released = True
        await self._group.all("release")

    def _on_work_resumed(self) -> None:
        """Free former slots, and replace holders that died while the state was released.

        The ranks have loaded their state by now, so the former slots are not needed.
        """
        if self._holders.has_unused:
            self._freeing = as_future(self._holders.settle())
        if self._is_released:
            self._is_released = False
            self._holders.lost.notify()

    async def write(self, directory: Path) -> None:
        """Write the held state to disk.

        Raises:
            OSError: The directory is not writable or the disk is full. The trainer continues.
        """
        parts: list[bytes] = []
        for part in await self._holding_group.write(absolute(directory)):
            if isinstance(part, OSError):
                raise part
            parts.append(part)
        await asyncio.to_thread(finish, directory, parts)

    async def save(self, directory: Path) -> None:
        """Hold the current state and write it."""
        with writing(directory):
            await self.hold()
            await self.write(directory)

    async def load(self, directory: Path) -> None:
        """Load a state from disk into all ranks."""
        # No rank may keep an old snapshot next to another rank's new one.
        await self._group.all("clear_snapshots")
        await self._group.all("load", absolute(directory))
        await self._group.all("snapshot")

    async def export(self, directory: Path) -> None:
        """Export the model.

        Raises:
            OSError: The directory is not writable or the disk is full. The trainer continues.
        """
        refused: OSError | None = (await self._group.all("export", absolute(directory)))[0]
        if refused is not None:
            raise refused

    async def export_final(self, directory: Path) -> None:
        """Export the final model, also if a rank dies meanwhile."""

        async def export() -> None:
            if self._group.failure is not None and await self.restart(sys.maxsize) < self._step:
                raise ValueError(
                    f"the state after step {self._step} was lost with the trainer's node, and no "
                    "checkpoint contains it. Resume the run to train it again."
                )
            await self.export(directory)

        await _retry_after_deaths(export)

    async def _start_anew(self, checkpoint: Path | None) -> None:
        self._holders.discard()
        await self._start_ranks()
        if checkpoint is not None:
            await self.load(checkpoint)
        await self._ensure_snapshots()

    async def _start_ranks(self) -> None:
        """Start all ranks from model.path, in place of the current ones."""
        self._group.end(TrainerDied("the trainer restarts"))
        self._group.kill()
        for task in (self._replacing, self._growing):
            if task is not None:
                task.cancel()
        self._growing = None
        await self._layouts.choose(self._start_timeout_s)
        rank_group = self._group = RankGroup(
            [self._start_worker(rank) for rank in range(self._num_ranks)]
        )
        self._is_released = False
        self._sent = (None, {})
        self.imports.trainer_restarted()
        limit_s = self._start_timeout_s
        meeting = rank_group.all("rendezvous", timeout_s=limit_s)
        places = await self._layouts.while_placed(meeting)
        self._node_ids = [node_id for node_id, _, _ in places]
        self.node_id, host, port = places[0]
        if self.writes and self._open_store is not None:
            for node_id in set(self._node_ids):
                store = await self._open_store(node_id)
            await rank_group.all("use_store", store)
        facts = await rank_group.all("start", host, port, self._num_snapshots, timeout_s=limit_s)
        self._snapshot_bytes = [snapshot_bytes for snapshot_bytes, _ in facts]
        self._attention_tokens = facts[0][1]
        self._shards = [()] * self._num_ranks
        if self._layouts.are_elastic:
            self._shards = await rank_group.all("holdings")

    async def _restore(self, at_most: int) -> int:
        """Load the newest complete state of at most `at_most` steps; return its number of steps.

        A rank may have died after a step's state was safe and before the step was reported.
        """
        steps = {step for step in await self._steps_in_own_slots() if step <= at_most}
        newest, move = max(steps, default=-1), None
        if self._layouts.are_elastic and not steps and (move := await self._find_move(at_most)):
            newest = move.step
        checkpoint = await asyncio.to_thread(self._newest_checkpoint)
        if newest >= 0 and (checkpoint is None or checkpoint.step <= newest):
            if move is None:
                self._state_source = "; its state was in memory"
                self._holders.drop_ranks_from(self._num_ranks)
                await self._group.all("restore", newest)
            else:
                await self._move_state(move)
            return newest
        self._state_source = ""
        self._holders.discard()  # the snapshots belong to a discarded history
        if checkpoint is not None:
            await self.load(checkpoint.role_dir(self.model))
            self._state_source = f"; its state is from {checkpoint.path.name}"
            return checkpoint.step
        if self._is_warm_started:
            await self.load(self._warm_start_dir)
        return 0

    async def _steps_in_own_slots(self) -> set[int]:
        """Return the steps of complete states that the current ranks can read in place."""
        found = [self._find_slot(rank) for rank in range(self._num_ranks)]
        slots = [slot for slot in found if slot is not None]
        if len(slots) < self._num_ranks:
            return set()
        return set.intersection(*await self._open_snapshots(slots))

    async def _find_move(self, at_most: int) -> Move | None:
        """Return the plan that moves the newest complete state to the ranks, if there is one."""
        files = await self._holders.files()
        targets = [
            Holder(f"rank {rank}", node_id, held)
            for rank, (node_id, held) in enumerate(zip(self._node_ids, self._shards, strict=True))
        ]
        return await asyncio.to_thread(find_move, files, targets, at_most)

    async def _move_state(self, move: Move) -> None:
        """Move a state from the slots of the former ranks to the current ranks."""
        start = time.perf_counter()
        self._holders.set_aside()
        try:
            shared = ray.put(move)
            sent = self._holders.weight_deltas(move, shared)
            calls = [[shared, one.rank, *sent.get(one.node, ())] for one in move.targets]
            await self._group.each("take", calls)
        except (InputLost, WorkerDied) as loss:
            raise TrainerDied(f"the trainer's state was lost in transit: {loss}") from None
        sent_text = size_text(move.bytes_sent).strip()
        seconds = time.perf_counter() - start
        self._state_source = (
            f"; its state came from memory in {seconds:.1f} s, {sent_text} between nodes"
        )

    async def _ensure_snapshots(self) -> None:
        """Ensure that each rank has a slot, and keep a snapshot of all ranks.

        From then on, holders that die are replaced.
        """
        if not self._num_snapshots:
            return
        await self._ensure_slots()
        rank_group = self._group

        def end_ranks(error: BaseException) -> None:
            """Let the next call of the ranks raise the error."""
            rank_group.end(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        self._replacing = start_task(self._replace_holders(), fail=end_ranks, returns=False)
        if self._layouts.can_grow:
            self._growing = start_task(self._layouts.until_larger(), fail=end_ranks)

    async def _replace_holders(self) -> None:
        while True:
            await self._holders.lost.until(
                lambda: len(self._holders.slots) < self._num_ranks and not self._is_released
            )
            await self._ensure_slots()

    async def _ensure_slots(self) -> None:
        """Allocate a slot for each rank that has none, and keep a snapshot of all ranks."""

        async def slots() -> list[SnapshotSlot]:
            return await asyncio.gather(*map(self._slot, range(self._num_ranks)))

        try:
            found = await retried(slots, TRAINER_OPERATIONS, WorkerDied)
        except WorkerDied as death:
            raise TrainerDied(
                f"no holder of the trainer's snapshots could be started: {death}"
            ) from None
        await self._open_snapshots(found)
        await self._group.all("snapshot")

    def _find_slot(self, rank: int) -> SnapshotSlot | None:
        return self._holders.find_slot(rank, self._node_ids[rank], self._shards[rank])

    async def _slot(self, rank: int) -> SnapshotSlot:
        return self._find_slot(rank) or await self._holders.new_slot(
            rank, self._node_ids[rank], self._snapshot_bytes[rank], self._shards[rank]
        )

    async def _open_snapshots(self, slots: Sequence[SnapshotSlot]) -> list[set[int]]:
        """Open the slots; return the steps of the snapshots there, by rank."""
        return await self._group.each("open_snapshots", [[slot.path, slot.name] for slot in slots])


def send_offers(handles: Sequence[Any], offers: Sequence[Any], link: Link) -> None:
    """Let each rank start to send its offer over a link.

    The receiver reports failures of the link within its time limit. The errors of the calls are
    retrieved too. Otherwise Ray logs them as unhandled, with a traceback.
    """
    for handle, offer in zip(handles, offers, strict=True):
        as_future(offer)
        as_future(handle.send_weights.remote(offer, link))


async def _retry_after_deaths(work: Callable[[], Awaitable[None]]) -> None:
    """Run `work`, and again if a rank dies meanwhile."""

    async def warn(death: Exception) -> None:
        logger.warning("%s; retrying", death)

    await retried(work, TRAINER_OPERATIONS, TrainerDied, warn)


def absolute(directory: Path) -> Path:
    """Return the path as it is valid in the ranks, which have another working directory."""
    return directory.absolute()


def finish(directory: Path, parts: Sequence[bytes]) -> None:
    """Complete a state on disk from the parts of all ranks."""
    # imports torch, which takes a second
    from rlsys.engines.training.trainer_state import finish_state

    finish_state(directory, parts)
