"""Memory for the trainer's snapshots, owned by processes that outlive its ranks.

    rank ── room ──► keeper of its node ──► shared memory ◄── mapped ── the rank's successor

A keeper is a process of its own on each node that has ranks. It holds memory and does nothing: the
ranks write to that memory by themselves. What a keeper holds is gone with it, and with its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsys.dataflow.signal import Signal
from rlsys.layout.transport.shared_memory import SharedMemory

from .calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerDied


@dataclass(frozen=True)
class Room:
    """Where the snapshots of a rank lie."""

    node_id: str
    path: str
    name: str


class SnapshotKeeper(Heartbeat):
    def __init__(self) -> None:
        self._held: dict[int, SharedMemory] = {}  # by rank

    def room(self, rank: int, num_bytes: int) -> Room:
        """New memory for this rank; what it had here is let go. Raises OSError where memory is
        short."""
        if rank in self._held:
            self._held.pop(rank).close()
        purpose = f"the snapshots of trainer-{rank} (trainer.snapshot_every=0 does without)"
        name = f"rlsys-snapshots-{uuid.uuid4().hex[:12]}"
        self._held[rank] = SharedMemory(name, num_bytes, purpose=purpose)
        node_id: str = ray.get_runtime_context().get_node_id()
        return Room(node_id, self._held[rank].path, name)


class SnapshotKeepers:
    """The keepers of one run, and who has which room there."""

    def __init__(self, *, timeout_s: float, heartbeat_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._keepers: dict[str, Worker] = {}  # by node
        self._watching: set[asyncio.Task[None]] = set()
        self.rooms: dict[int, Room] = {}  # by rank; of living keepers
        self.lost = Signal()
        """A keeper has died."""

    def find_room(self, rank: int, node_id: str) -> Room | None:
        """The rank's, where it lies on this node and its keeper lives."""
        room = self.rooms.get(rank)
        return room if room and room.node_id == node_id else None

    async def make_room(self, rank: int, node_id: str, num_bytes: int) -> Room:
        """New and empty, on the rank's node. Raises WorkerDied, or OSError where memory is
        short."""
        if node_id not in self._keepers:
            self._keepers[node_id] = self._hire(node_id)
        keeper = self._keepers[node_id]
        try:
            room: Room = await keeper.call("room", rank, num_bytes)
        except WorkerDied:
            self._forget(node_id, keeper)
            raise
        self.rooms[rank] = room
        return room

    def close(self) -> None:
        """End the keepers, and with them what they keep."""
        for task in self._watching:
            task.cancel()
        for keeper in self._keepers.values():
            keeper.kill()
        self._keepers, self.rooms = {}, {}

    @property
    def workers(self) -> list[Worker]:
        return list(self._keepers.values())

    def _hire(self, node_id: str) -> Worker:
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        keeper = Worker(
            f"snapshots-{node_id[:6]}",
            ray.remote(concurrency_groups=HEARTBEAT_GROUP)(SnapshotKeeper)
            .options(num_cpus=0, scheduling_strategy=place)
            .remote(),
            timeout_s=self._timeout_s,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
        watching = asyncio.create_task(self._watch(node_id, keeper))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return keeper

    async def _watch(self, node_id: str, keeper: Worker) -> None:
        with contextlib.suppress(WorkerDied):
            await keeper.watch()
        self._forget(node_id, keeper)

    def _forget(self, node_id: str, keeper: Worker) -> None:
        if self._keepers.get(node_id) is keeper:
            del self._keepers[node_id]
            gone = [rank for rank, room in self.rooms.items() if room.node_id == node_id]
            for rank in gone:
                del self.rooms[rank]
            self.lost.notify()
