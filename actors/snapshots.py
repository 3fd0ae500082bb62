"""Memory for the trainer's snapshots, owned by processes that outlive its ranks.

    rank ── room ──► keeper of its node ──► a file of memory ◄── mapped ── the rank's successor

A keeper is a process of its own on each node that has ranks. It holds memory and does nothing: the
ranks write to that memory by themselves. What a keeper holds is gone with it, and with its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.calls import HEARTBEAT_GROUP, Heartbeat, Worker, WorkerDied
from rlsys.dataflow.signal import Signal


class SnapshotKeeper(Heartbeat):
    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # descriptors, by rank

    def room(self, rank: int, num_bytes: int) -> str:
        """The path of a new file of zeros for this rank, open to processes of the same user on this
        node; its former one is let go. Raises OSError where memory is short."""
        if rank in self._files:
            os.close(self._files.pop(rank))
        self._files[rank] = reserve_memory(f"rlsys-snapshots-{rank}", num_bytes)
        return f"/proc/{os.getpid()}/fd/{self._files[rank]}"


def reserve_memory(name: str, num_bytes: int) -> int:
    """The descriptor of a file of zeros in memory, which the kernel frees when nobody has it open.

    Raises OSError where the memory is not there.
    """
    descriptor = os.memfd_create(name)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise OSError(
            error.errno,
            f"cannot reserve {num_bytes / 2**30:.2f} GiB for a rank's snapshots "
            f"({error.strerror}); set trainer.snapshot_every=0 to do without, or free some memory",
        ) from error
    return descriptor


@dataclass(frozen=True)
class Room:
    """Where the snapshots of a rank lie."""

    node_id: str
    path: str


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

    def path(self, rank: int, node_id: str) -> str | None:
        """Of the rank's file, where it lies on this node and its keeper lives."""
        room = self.rooms.get(rank)
        return room.path if room and room.node_id == node_id else None

    async def make_room(self, rank: int, node_id: str, num_bytes: int) -> str:
        """New and empty, on the rank's node. Raises WorkerDied, or OSError where memory is
        short."""
        if node_id not in self._keepers:
            self._keepers[node_id] = self._hire(node_id)
        keeper = self._keepers[node_id]
        try:
            path: str = await keeper.call("room", rank, num_bytes)
        except WorkerDied:
            self._forget(node_id, keeper)
            raise
        self.rooms[rank] = Room(node_id, path)
        return path

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
