"""In-memory checkpoints: memory for the trainer's snapshots that outlives its ranks.

    rank ── slot ──► holder on its node ──► shared memory ◄── mapped ── the rank's successor

A holder is a separate process on each node that has ranks. It owns shared memory, and the ranks
write to that memory directly. The snapshots are lost with the holder or its node.

Ranks with another layout get new slots. The former slots stay until the new ranks have loaded their
state, and holders send the data that other nodes lack
(rlsys.engines.training.state_resharding).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.common.async_condition import AsyncCondition
from rlsys.common.background_tasks import report, start_task
from rlsys.engines.training.snapshot_header import steps_in
from rlsys.reallocation.transport.shared_memory import SharedMemory

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerDied

if TYPE_CHECKING:
    from rlsys.engines.training.state_resharding import Kept, Move
    from rlsys.reallocation.shards import TensorShard
    from rlsys.reallocation.transport.weight_deltas import WeightDelta


@dataclass(frozen=True)
class SnapshotSlot:
    """Memory of one rank's snapshots. `held` describes its shards if they can be resharded."""

    node_id: str
    path: str
    name: str
    held: tuple[TensorShard, ...] = ()

    @property
    def file(self) -> Kept:
        # imports torch, which takes seconds
        """Return the description of the snapshot file for a resharding plan."""
        from rlsys.engines.training.state_resharding import Kept
        from rlsys.reallocation.shards import Holder

        holder = Holder(self.name, self.node_id, self.held)
        return Kept(path=self.path, name=self.name, holder=holder)


class SnapshotHolder(Heartbeat):
    """Actor that owns the snapshot memory of one node."""

    def __init__(self) -> None:
        # by era (see SnapshotHolders) and rank
        self._held: dict[tuple[int, int], SharedMemory] = {}

    def slot(self, era: int, rank: int, num_bytes: int) -> SnapshotSlot:
        """Allocate new memory for this rank, in place of an earlier slot of the same era.

        Raises:
            OSError: The node is out of memory.
        """
        if (era, rank) in self._held:
            self._held.pop((era, rank)).close()
        purpose = f"the snapshots of trainer-{rank} (trainer.snapshot_every=0 disables them)"
        name = f"rlsys-snapshots-{uuid.uuid4().hex[:12]}"
        memory = self._held[era, rank] = SharedMemory(name, num_bytes, purpose=purpose)
        return SnapshotSlot(_this_node(), memory.path, name)

    def steps(self) -> dict[str, set[int]]:
        """Return the steps of the complete snapshots, by name of their slot."""
        return {memory.name: steps_in(memory.map()) for memory in self._held.values()}

    def weight_delta(self, move: Move, node_id: str) -> WeightDelta:
        """Return the data of the slots here that ranks of another node lack.

        Raises MemoryGone. The first call imports torch, which takes seconds.
        """
        from rlsys.engines.training.state_resharding import packed

        return packed(move, _this_node(), node_id)

    def release(self, names: Collection[str]) -> None:
        """Free the slots with these names, if they exist."""
        for key in [key for key, memory in self._held.items() if memory.name in names]:
            self._held.pop(key).close()


def _this_node() -> str:
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


class SnapshotHolders:
    """Holders of one run and their slots by rank.

    An era is the time between two changes of the layout.
    """

    def __init__(self, *, timeout_s: float, heartbeat_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._holders: dict[str, Worker] = {}  # by node
        self._watching: set[asyncio.Task[None]] = set()
        self._era = 0
        self._unused: list[SnapshotSlot] = []  # still allocated
        self.slots: dict[int, SnapshotSlot] = {}  # by rank; of live holders
        self.former: dict[int, SnapshotSlot] = {}  # the same for the ranks of the previous layout
        self.lost = AsyncCondition()
        """Notified when a holder has died."""

    def find_slot(
        self, rank: int, node_id: str, held: tuple[TensorShard, ...]
    ) -> SnapshotSlot | None:
        """Return the rank's slot if it is on this node, alive and has the same shards."""
        slot = self.slots.get(rank)
        return slot if slot and slot.node_id == node_id and slot.held == held else None

    async def new_slot(
        self, rank: int, node_id: str, num_bytes: int, held: tuple[TensorShard, ...]
    ) -> SnapshotSlot:
        """Allocate an empty slot on the rank's node.

        Raises:
            WorkerDied: The holder died.
            OSError: The node is out of memory.
        """
        if node_id not in self._holders:
            self._holders[node_id] = self._start_holder(node_id)
        holder = self._holders[node_id]
        try:
            slot: SnapshotSlot = await holder.call("slot", self._era, rank, num_bytes)
        except WorkerDied:
            self._forget(node_id, holder)
            raise
        slot = self.slots[rank] = replace(slot, held=held)
        return slot

    def drop_ranks_from(self, num_ranks: int) -> None:
        """Mark the slots of ranks from `num_ranks` on as unused."""
        for rank in [rank for rank in self.slots if rank >= num_ranks]:
            self._unused.append(self.slots.pop(rank))

    def set_aside(self) -> None:
        """Make all slots former ones; their content stays until `settle`."""
        if self.former:  # the newer slots were never filled
            self._unused += self.slots.values()
        else:
            self.former, self._era = self.slots, self._era + 1
        self.slots = {}

    def discard(self) -> None:
        """Mark all slots as unused: their snapshots belong to a discarded history."""
        self._unused += [*self.slots.values(), *self.former.values()]
        self.slots, self.former = {}, {}

    async def files(self) -> list[tuple[Kept, set[int]]]:
        """Return all slots with the steps of their complete snapshots."""
        calls = [holder.call("steps") for holder in self.workers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        whole: dict[str, set[int]] = {}
        for answer in answers:
            if isinstance(answer, dict):
                whole |= answer
            elif not isinstance(answer, WorkerDied):
                raise answer
        slots = (*self.slots.values(), *self.former.values())
        return [(slot.file, whole[slot.name]) for slot in slots if slot.name in whole]

    def weight_deltas(self, move: Move, shared: Any) -> Mapping[str, Sequence[Any]]:
        """Return references to the data that each node with ranks gets from other nodes.

        `shared` is a reference to the move.

        Raises:
            WorkerDied: A holder that sends data is gone.
        """
        for sender in {one for senders in move.senders.values() for one in senders}:
            if sender not in self._holders:
                raise WorkerDied(
                    f"the snapshot holder of node {sender[:6]} is gone",
                    worker=f"snapshots-{sender[:6]}",
                )
        return {
            node: [
                self._holders[sender].handle.weight_delta.remote(shared, node) for sender in senders
            ]
            for node, senders in move.senders.items()
        }

    @property
    def has_unused(self) -> bool:
        """Return whether `settle` would free memory."""
        return bool(self._unused or self.former)

    async def settle(self) -> None:
        """Free all slots that the working ranks do not use."""
        unused = [*self._unused, *self.former.values()]
        self._unused, self.former = [], {}
        for node_id in {slot.node_id for slot in unused} & self._holders.keys():
            names = [slot.name for slot in unused if slot.node_id == node_id]
            with contextlib.suppress(WorkerDied):
                await self._holders[node_id].call("release", names)

    def close(self) -> None:
        """End the holders and free their memory."""
        for task in self._watching:
            task.cancel()
        for holder in self._holders.values():
            holder.kill()
        self._holders, self.slots, self.former = {}, {}, {}

    @property
    def workers(self) -> list[Worker]:
        """Return the holders."""
        return list(self._holders.values())

    def _start_holder(self, node_id: str) -> Worker:
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        holder = Worker(
            f"snapshots-{node_id[:6]}",
            ray.remote(concurrency_groups=HEARTBEAT_GROUP)(SnapshotHolder)
            .options(num_cpus=0, scheduling_strategy=place)
            .remote(),
            timeout_s=self._timeout_s,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
        watching = start_task(
            self._watch(node_id, holder), fail=lambda error: self._failed(node_id, holder, error)
        )
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return holder

    async def _watch(self, node_id: str, holder: Worker) -> None:
        with contextlib.suppress(WorkerDied):
            await holder.watch()
        self._forget(node_id, holder)

    def _failed(self, node_id: str, holder: Worker, error: BaseException) -> None:
        """Replace a holder whose watcher has failed."""
        report(error)
        holder.end(f"watching it failed: {error!r}")
        self._forget(node_id, holder)

    def _forget(self, node_id: str, holder: Worker) -> None:
        if self._holders.get(node_id) is holder:
            del self._holders[node_id]
            for slots in (self.slots, self.former):
                for rank in [rank for rank, slot in slots.items() if slot.node_id == node_id]:
                    del slots[rank]
            self.lost.notify()
