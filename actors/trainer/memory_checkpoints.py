"""Memory for the trainer's snapshots, owned by processes that outlive its ranks.

    rank ── room ──► keeper of its node ──► shared memory ◄── mapped ── the rank's successor

A keeper is a process of its own on each node that has ranks. It holds memory and does nothing: the
ranks write to that memory by themselves. What a keeper holds is gone with it, and with its node.

Ranks that are laid out otherwise get rooms of their own; until they have their state there, the
former rooms stay, and keepers send what other nodes lack of them
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
    """Where the snapshots of a rank lie; and what of a state, where somebody may move it."""

    node_id: str
    path: str
    name: str
    held: tuple[TensorShard, ...] = ()

    @property
    def file(self) -> Kept:
        from rlsys.engines.training.state_resharding import Kept  # takes seconds, for torch
        from rlsys.reallocation.shards import Holder

        holder = Holder(self.name, self.node_id, self.held)
        return Kept(path=self.path, name=self.name, holder=holder)


class SnapshotHolder(Heartbeat):
    def __init__(self) -> None:
        self._held: dict[tuple[int, int], SharedMemory] = {}  # by era and rank

    def room(self, era: int, rank: int, num_bytes: int) -> SnapshotSlot:
        """New memory for this rank; what it had here in this era is let go. Raises OSError where
        memory is short.
        """
        if (era, rank) in self._held:
            self._held.pop((era, rank)).close()
        purpose = f"the snapshots of trainer-{rank} (trainer.snapshot_every=0 does without)"
        name = f"rlsys-snapshots-{uuid.uuid4().hex[:12]}"
        memory = self._held[era, rank] = SharedMemory(name, num_bytes, purpose=purpose)
        return SnapshotSlot(_this_node(), memory.path, name)

    def steps(self) -> dict[str, set[int]]:
        """Of the whole snapshots, by the name of a room."""
        return {memory.name: steps_in(memory.map()) for memory in self._held.values()}

    def weight_delta(self, move: Move, node_id: str) -> WeightDelta:
        """What the ranks of another node lack and rooms here have. Raises MemoryGone. The first
        one takes seconds, for torch.
        """
        from rlsys.engines.training.state_resharding import packed

        return packed(move, _this_node(), node_id)

    def let_go(self, names: Collection[str]) -> None:
        """Of the rooms of these names, where they are still here."""
        for key in [key for key, memory in self._held.items() if memory.name in names]:
            self._held.pop(key).close()


def _this_node() -> str:
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


class SnapshotHolders:
    """The keepers of one run, and who has which room there."""

    def __init__(self, *, timeout_s: float, heartbeat_timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._keepers: dict[str, Worker] = {}  # by node
        self._watching: set[asyncio.Task[None]] = set()
        self._era = 0  # rises when rooms are set aside
        self._unused: list[SnapshotSlot] = []  # which keepers still hold
        self.rooms: dict[int, SnapshotSlot] = {}  # by rank; of living keepers
        self.former: dict[int, SnapshotSlot] = {}  # the same, of ranks that were laid out otherwise
        self.lost = AsyncCondition()
        """A keeper has died."""

    def find_room(
        self, rank: int, node_id: str, held: tuple[TensorShard, ...]
    ) -> SnapshotSlot | None:
        """The rank's, where it lies on this node, is for what the rank has, and its keeper
        lives.
        """
        room = self.rooms.get(rank)
        return room if room and room.node_id == node_id and room.held == held else None

    async def make_room(
        self, rank: int, node_id: str, num_bytes: int, held: tuple[TensorShard, ...]
    ) -> SnapshotSlot:
        """New and empty, on the rank's node. Raises WorkerDied, or OSError where memory is
        short.
        """
        if node_id not in self._keepers:
            self._keepers[node_id] = self._hire(node_id)
        keeper = self._keepers[node_id]
        try:
            room: SnapshotSlot = await keeper.call("room", self._era, rank, num_bytes)
        except WorkerDied:
            self._forget(node_id, keeper)
            raise
        room = self.rooms[rank] = replace(room, held=held)
        return room

    def limit(self, num_ranks: int) -> None:
        """There are only so many ranks now."""
        for rank in [rank for rank in self.rooms if rank >= num_ranks]:
            self._unused.append(self.rooms.pop(rank))

    def set_aside(self) -> None:
        """All ranks get new rooms; what is in those that they have stays until `settle`."""
        if self.former:  # nobody has filled those that came after it
            self._unused += self.rooms.values()
        else:
            self.former, self._era = self.rooms, self._era + 1
        self.rooms = {}

    def give_up(self) -> None:
        """What is kept belongs to a history that is given up."""
        self._unused += [*self.rooms.values(), *self.former.values()]
        self.rooms, self.former = {}, {}

    async def files(self) -> list[tuple[Kept, set[int]]]:
        """Of all rooms, with the steps that are whole there."""
        calls = [keeper.call("steps") for keeper in self.workers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        whole: dict[str, set[int]] = {}
        for answer in answers:
            if isinstance(answer, dict):
                whole |= answer
            elif not isinstance(answer, WorkerDied):
                raise answer
        rooms = (*self.rooms.values(), *self.former.values())
        return [(room.file, whole[room.name]) for room in rooms if room.name in whole]

    def weight_deltas(self, move: Move, shared: Any) -> Mapping[str, Sequence[Any]]:
        """References to what each node with ranks gets of others. `shared` is one to the move.
        Raises WorkerDied where one of those that send it is gone by now.
        """
        for sender in {one for senders in move.senders.values() for one in senders}:
            if sender not in self._keepers:
                raise WorkerDied(f"what kept the snapshots of node {sender[:6]} is gone")
        return {
            node: [
                self._keepers[sender].handle.weight_delta.remote(shared, node) for sender in senders
            ]
            for node, senders in move.senders.items()
        }

    @property
    def has_unused(self) -> bool:
        return bool(self._unused or self.former)

    async def settle(self) -> None:
        """The ranks work, and can go on from the rooms that they have: let go of all others."""
        unused = [*self._unused, *self.former.values()]
        self._unused, self.former = [], {}
        for node_id in {room.node_id for room in unused} & self._keepers.keys():
            names = [room.name for room in unused if room.node_id == node_id]
            with contextlib.suppress(WorkerDied):
                await self._keepers[node_id].call("let_go", names)

    def close(self) -> None:
        """End the keepers, and with them what they keep."""
        for task in self._watching:
            task.cancel()
        for keeper in self._keepers.values():
            keeper.kill()
        self._keepers, self.rooms, self.former = {}, {}, {}

    @property
    def workers(self) -> list[Worker]:
        return list(self._keepers.values())

    def _hire(self, node_id: str) -> Worker:
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        keeper = Worker(
            f"snapshots-{node_id[:6]}",
            ray.remote(concurrency_groups=HEARTBEAT_GROUP)(SnapshotHolder)
            .options(num_cpus=0, scheduling_strategy=place)
            .remote(),
            timeout_s=self._timeout_s,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
        )
        watching = start_task(
            self._watch(node_id, keeper), fail=lambda error: self._failed(node_id, keeper, error)
        )
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return keeper

    async def _watch(self, node_id: str, keeper: Worker) -> None:
        with contextlib.suppress(WorkerDied):
            await keeper.watch()
        self._forget(node_id, keeper)

    def _failed(self, node_id: str, keeper: Worker, error: BaseException) -> None:
        """Replace a keeper that nobody watches any more."""
        report(error)
        keeper.end(f"it is not watched any more: {error!r}")
        self._forget(node_id, keeper)

    def _forget(self, node_id: str, keeper: Worker) -> None:
        if self._keepers.get(node_id) is keeper:
            del self._keepers[node_id]
            for rooms in (self.rooms, self.former):
                for rank in [rank for rank, room in rooms.items() if room.node_id == node_id]:
                    del rooms[rank]
            self.lost.notify()
