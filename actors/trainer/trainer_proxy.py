"""All ranks of the trainer behind the controller's `TrainerProxy`; started anew when one of them
dies.

RayLearner ──► Crew: one life of all ranks ──► TrainerActor, one per rank
     ├───────► SnapshotKeepers: memory on the ranks' nodes, from which the next crew goes on
     └───────► Layouts: how the next crew is laid out, by the places that are there
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray

from rlsys.common.atomic_files import writing
from rlsys.common.background_tasks import start_task
from rlsys.config.parallel_layout import ParallelLayout
from rlsys.controller.worker_protocols import StepRowsRef, TrainerDied, Written
from rlsys.dataflow.graph.stages import PerBatchStage
from rlsys.engines.training.state_resharding import Move, find_move
from rlsys.reallocation.shards import Holder, TensorShard
from rlsys.reallocation.traffic import size_text
from rlsys.runs.checkpoint import Checkpoint
from rlsys.types import StepResult, WeightManifest

from ..cluster.calls import InputLost, Worker, WorkerDied, as_future, while_loading
from ..store.store_actor import StoreAddress
from .elastic import Layouts
from .memory_checkpoints import SnapshotHolders, SnapshotSlot
from .rank_group import RankGroup

logger = logging.getLogger(__name__)

# In place of the id of a node on which no rank lies.
ELSEWHERE = ""

# Of what is begun again when somebody dies in the middle of it.
ATTEMPTS = 3


class RayTrainerProxy:
    """The answer of rank 0 is the answer.

    `start_worker` starts the actor of a rank, in the layout and the place that `layouts` has for
    it. Where layouts vary, a crew that is laid out otherwise than the one before, or on other
    nodes, gets its state out of what that one kept, in memory, and `tell` is told of it. `stages`
    are the functions over a step that this learner computes; `per_token`: its model makes a value
    for each token of a row; `writes`: it writes to the store, which `open_store` makes sure of on a
    node. `num_snapshots` of the state stay in memory. When they are gone with a node, ranks start
    from the newest checkpoint, or from what the warm start had taught, which is written to
    `warm_start_dir` until `close`.
    """

    def __init__(
        self,
        start_worker: Callable[[int], Worker],
        keepers: SnapshotHolders,
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
        tell: Callable[[str], None] = logger.warning,
    ) -> None:
        self.node_id = ""  # of rank 0, from `start` on
        self._hire = start_worker
        self._keepers = keepers
        self._layouts = layouts
        self._tell = tell
        self._num_snapshots = num_snapshots
        self._start_timeout_s = start_timeout_s
        self._newest_checkpoint = newest_checkpoint
        self._stages = {stage.name: stage for stage in stages}
        self.model = model
        self._per_token = per_token
        self._open_store = open_store
        self.writes = writes
        self._warm_start_dir = warm_start_dir
        self._crew = self._held_by = RankGroup([])
        self._node_ids: list[str] = []  # by rank
        self._snapshot_bytes: list[int] = []  # by rank, as the next
        self._held: list[tuple[TensorShard, ...]] = []  # of a state, where layouts vary
        self._told = layouts.current  # which layout the user knows of
        self._origin = ""  # of the state, in words
        self._attention_tokens = math.inf
        self._replacing: asyncio.Task[None] | None = None
        self._growing: asyncio.Future[None] | None = None
        self._settling: asyncio.Future[None] | None = None
        self._began_warm = False
        self._is_released = False
        self._step = 0  # of the newest answer
        self.reader_nodes: Callable[[], Iterable[str]] = tuple
        """Ids of those with replicas, which will take what is published next."""
        # Which version; references to what goes to a place that has another, by both.
        self._sent: tuple[WeightManifest | None, dict[tuple[str, int | None], list[Any]]]
        self._sent = (None, {})
        self._distrusted: WeightManifest | None = None  # of which a replica has found bytes damaged

    async def start(self, checkpoint: Path | None = None) -> None:
        """Build all ranks from model.path, and load the trainer's part of a checkpoint where there
        is one; begin anew where a rank dies meanwhile.
        """
        try:
            await _outliving_deaths(lambda: self._begin(checkpoint))
        except TrainerDied as death:
            raise TrainerDied(while_loading(self.model, death)) from None
        self._tell_layout()

    async def restart(self, step: int) -> int:
        restored = 0

        async def restart() -> None:
            nonlocal restored
            await self._start_ranks()
            restored = await self._restore(step)
            await self._keep_snapshots()

        # The first successor may be sent to a node that is gone, which Ray notices late.
        await _outliving_deaths(restart)
        self._tell_layout()
        return restored

    def _tell_layout(self) -> None:
        if self._layout != self._told:
            before, self._told = self._told, self._layout
            self._tell(f"{self.model} trains as {self._layout} now, not as {before}{self._origin}")

    def close(self) -> None:
        """End what keeps the snapshots, and remove what was kept of the warm start. The ranks are
        among the workers that are ended together.
        """
        for task in (self._replacing, self._growing, self._settling):
            if task is not None:
                task.cancel()
        self._keepers.close()
        shutil.rmtree(self._warm_start_dir, ignore_errors=True)

    @property
    def ranks(self) -> Sequence[Worker]:
        return self._crew.ranks

    def weight_deltas(self, manifest: WeightManifest, node_id: str, base: int | None) -> list[Any]:
        """References to what a node lacks of a version, by rank that sends it; Ray brings each to
        the node once. Nodes without a rank lack the same, which is packed once for those that have
        the same version `base`, or none.
        """
        if self._sent[0] != manifest:
            self._sent = (manifest, {})
        _, sent = self._sent
        place = node_id if node_id in self._node_ids else ELSEWHERE
        if (place, base) not in sent:
            sent[place, base] = [
                rank.handle.weight_delta.remote(manifest, place, base)
                for rank, of_rank in zip(self.ranks, self._node_ids, strict=True)
                if of_rank != node_id
            ]
        return sent[place, base]

    def send_again(self, manifest: WeightManifest) -> None:
        """Something has changed on its way."""
        if self._sent[0] == manifest:
            self._sent = (None, {})

    def mark_corrupt(self, manifest: WeightManifest, why: str) -> None:
        """A replica ends because it found bytes damaged that were sent again. Where a second one
        does, they are so where they were staged: the trainer starts anew, and publishes again.
        """
        if manifest == self._distrusted:
            self._crew.end(TrainerDied(f"weights are damaged where the trainer staged them: {why}"))
        self._distrusted = manifest

    async def sft_step(
        self, token_ids: list[list[int]], prompt_lengths: list[int], learning_rate: float
    ) -> float:
        losses = await self._crew.all("sft_step", token_ids, prompt_lengths, learning_rate)
        loss: float = losses[0]
        return loss

    async def warm_start(self, lessons: Callable[[], Awaitable[None]]) -> None:
        """Before the first optimizer step: `lessons` takes supervised steps, and what they taught
        is the beginning from then on. Where a rank dies meanwhile, all of it begins anew.
        """

        async def warm_start() -> None:
            if self._crew.failure is not None:
                await self._begin(None)
            await lessons()
            await self._crew.all("clear_snapshots")
            await self._crew.all("reset_optimizer")
            await asyncio.to_thread(shutil.rmtree, self._warm_start_dir, ignore_errors=True)
            await self.save(self._warm_start_dir)

        await _outliving_deaths(warm_start)
        self._began_warm = True

    @property
    def _layout(self) -> ParallelLayout:
        return self._layouts.current

    @property
    def _num_ranks(self) -> int:
        return self._layout.num_ranks

    @property
    def is_outgrown(self) -> bool:
        """Whether there are places for a larger layout again, to which `restart` goes."""
        growing = self._growing
        if growing is None or not growing.done() or growing.cancelled():
            return False
        return growing.exception() is None

    async def snapshot(self) -> None:
        """Keep the state as it is now, whether or not it is due."""
        await self._crew.all("snapshot")

    @property
    def num_data(self) -> int:
        return self._layout.num_data

    @property
    def num_stages(self) -> int:
        return self._layout.pp

    @property
    def attention_tokens(self) -> float:
        return self._attention_tokens

    async def infer(
        self, writes: str, shares: Sequence[StepRowsRef], *, adapters: bool = True
    ) -> Sequence[Written]:
        # Of the ranks that have the same rows, one answers for them.
        speak = [rank for rank in range(self._num_ranks) if self._layout.counts(rank)]
        written = await self._crew.each(
            "infer",
            [
                [writes, self._per_token, adapters, share, rank in speak]
                for rank, share in enumerate(self._by_rank(shares))
            ],
        )
        return [written[rank] for rank in sorted(speak, key=self._layout.data_index)]

    async def compute(self, stage: str, rows: StepRowsRef) -> Written:
        written: Written = await self._crew.first("compute", self._stages[stage], rows)
        return written

    async def accumulate(self, passes: Sequence[Sequence[StepRowsRef]]) -> None:
        self._works_again()
        by_rank = zip(*map(self._by_rank, passes), strict=True)
        await self._crew.each("accumulate", list(by_rank))

    def _by_rank(self, shares: Sequence[StepRowsRef]) -> list[StepRowsRef]:
        return [shares[self._layout.data_index(rank)] for rank in range(self._num_ranks)]

    async def optimizer_step(self, *, last: bool = True) -> StepResult:
        result: StepResult = (await self._crew.all("optimizer_step", last))[0]
        if last:
            self._step = result.policy_version
        return result

    async def publish(self) -> WeightManifest:
        nodes = sorted(self.reader_nodes())
        manifest: WeightManifest = (await self._crew.all("publish", nodes))[0]
        return manifest

    async def watch(self) -> None:
        await self._crew.watch()

    async def hold(self) -> None:
        self._held_by = self._crew
        await self._crew.all("hold")

    async def release(self) -> None:
        self._is_released = True
        await self._crew.all("release")

    def _works_again(self) -> None:
        """Whoever restarted the ranks takes their state. Keepers that were lost meanwhile can be
        replaced, for which it must be there.
        """
        if self._keepers.has_unused:
            self._settling = as_future(self._keepers.settle())
        if self._is_released:
            self._is_released = False
            self._keepers.lost.notify()

    async def write(self, directory: Path) -> None:
        """What is held, as a state on disk. Raises OSError for an unwritable directory or a full
        disk; the trainer goes on.
        """
        parts: list[bytes] = []
        for part in await self._held_by.write(absolute(directory)):
            if isinstance(part, OSError):
                raise part
            parts.append(part)
        await asyncio.to_thread(finish, directory, parts)

    async def save(self, directory: Path) -> None:
        """Both, one after the other."""
        with writing(directory):
            await self.hold()
            await self.write(directory)

    async def load(self, directory: Path) -> None:
        # No rank may find an old snapshot beside another's new one.
        await self._crew.all("clear_snapshots")
        await self._crew.all("load", absolute(directory))
        await self._crew.all("snapshot")

    async def export(self, directory: Path) -> None:
        """Raises OSError for an unwritable directory or a full disk; the trainer goes on."""
        refused: OSError | None = (await self._crew.all("export", absolute(directory)))[0]
        if refused is not None:
            raise refused

    async def export_the_end(self, directory: Path) -> None:
        """A rank's death in the middle is outlived: the trained state is exported all the same."""

        async def export() -> None:
            if self._crew.failure is not None and await self.restart(sys.maxsize) < self._step:
                raise ValueError(
                    f"the state after step {self._step} is gone with the trainer's node, and no "
                    "checkpoint holds it; resume the run to train it again."
                )
            await self.export(directory)

        await _outliving_deaths(export)

    async def _begin(self, checkpoint: Path | None) -> None:
        self._keepers.give_up()
        await self._start_ranks()
        if checkpoint is not None:
            await self.load(checkpoint)
        await self._keep_snapshots()

    async def _start_ranks(self) -> None:
        """From model.path, in place of those that may be there."""
        self._crew.end(TrainerDied("the trainer starts anew"))
        self._crew.kill()
        for task in (self._replacing, self._growing):
            if task is not None:
                task.cancel()
        self._growing = None
        await self._layouts.choose(self._start_timeout_s)
        rank_group = self._crew = RankGroup([self._hire(rank) for rank in range(self._num_ranks)])
        self._is_released = False
        self._sent = (None, {})
        limit_s = self._start_timeout_s
        meeting = rank_group.all("rendezvous", timeout_s=limit_s)
        places = await self._layouts.while_standing(meeting)
        self._node_ids = [node_id for node_id, _, _ in places]
        self.node_id, host, port = places[0]
        if self.writes and self._open_store is not None:
            for node_id in set(self._node_ids):
                store = await self._open_store(node_id)
            await rank_group.all("use_store", store)
        facts = await rank_group.all("start", host, port, self._num_snapshots, timeout_s=limit_s)
        self._snapshot_bytes = [snapshot_bytes for snapshot_bytes, _ in facts]
        self._attention_tokens = facts[0][1]
        self._held = [()] * self._num_ranks
        if self._layouts.vary:
            self._held = await rank_group.all("holdings")

    async def _restore(self, at_most: int) -> int:
        """Bring the newest whole state into new ranks, of so many optimizer steps at most: a rank
        may have died when a step's state was safe and its answer was not. Returns its steps.
        """
        steps = {step for step in await self._steps_of_own_rooms() if step <= at_most}
        newest, move = max(steps, default=-1), None
        if self._layouts.vary and not steps and (move := await self._find_move(at_most)):
            newest = move.step
        checkpoint = await asyncio.to_thread(self._newest_checkpoint)
        if newest >= 0 and (checkpoint is None or checkpoint.step <= newest):
            if move is None:
                self._origin = "; its state was in memory there"
                self._keepers.limit(self._num_ranks)
                await self._crew.all("restore", newest)
            else:
                await self._take(move)
            return newest
        self._origin = ""
        self._keepers.give_up()  # what lies there belongs to a history that is given up
        if checkpoint is not None:
            await self.load(checkpoint.role_dir(self.model))
            self._origin = f"; its state is that of {checkpoint.path.name}"
            return checkpoint.step
        if self._began_warm:
            await self.load(self._warm_start_dir)
        return 0

    async def _steps_of_own_rooms(self) -> set[int]:
        """Of whole states that these ranks, as they are laid out, can read where they are."""
        found = [self._find_room(rank) for rank in range(self._num_ranks)]
        rooms = [room for room in found if room is not None]
        if len(rooms) < self._num_ranks:
            return set()
        return set.intersection(*await self._open_snapshots(rooms))

    async def _find_move(self, at_most: int) -> Move | None:
        """Out of all that is kept, if it is whole."""
        files = await self._keepers.files()
        targets = [
            Holder(f"rank {rank}", node_id, held)
            for rank, (node_id, held) in enumerate(zip(self._node_ids, self._held, strict=True))
        ]
        return await asyncio.to_thread(find_move, files, targets, at_most)

    async def _take(self, move: Move) -> None:
        """Bring a state to these ranks out of the rooms of those before."""
        start = time.perf_counter()
        self._keepers.set_aside()
        try:
            shared = ray.put(move)
            sent = self._keepers.weight_deltas(move, shared)
            calls = [[shared, one.rank, *sent.get(one.node, ())] for one in move.targets]
            await self._crew.each("take", calls)
        except (InputLost, WorkerDied) as loss:
            raise TrainerDied(f"the trainer's state was lost on its way: {loss}") from None
        sent_text = size_text(move.bytes_sent).strip()
        seconds = time.perf_counter() - start
        self._origin = f"; its state came from memory in {seconds:.1f} s, {sent_text} between nodes"

    async def _keep_snapshots(self) -> None:
        """Give each rank that has none a place for its snapshots; a snapshot of all is there at the
        end. From then on a keeper that dies is replaced.
        """
        if not self._num_snapshots:
            return
        await self._make_rooms()
        rank_group = self._crew

        def ended_by(error: BaseException) -> None:
            """Let the next call of the ranks raise the error."""
            rank_group.end(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        self._replacing = start_task(self._replace_keepers(), fail=ended_by, returns=False)
        if self._layouts.can_grow:
            self._growing = start_task(self._layouts.until_larger(), fail=ended_by)

    async def _replace_keepers(self) -> None:
        while True:
            await self._keepers.lost.until(
                lambda: len(self._keepers.rooms) < self._num_ranks and not self._is_released
            )
            await self._make_rooms()

    async def _make_rooms(self) -> None:
        """A place for the snapshots of every rank that has none, and a snapshot of all ranks."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                rooms = await asyncio.gather(*map(self._room, range(self._num_ranks)))
            except WorkerDied as death:
                if attempt == ATTEMPTS:
                    raise TrainerDied(f"nobody keeps the trainer's snapshots: {death}") from None
            else:
                await self._open_snapshots(rooms)
                await self._crew.all("snapshot")
                return

    def _find_room(self, rank: int) -> SnapshotSlot | None:
        return self._keepers.find_room(rank, self._node_ids[rank], self._held[rank])

    async def _room(self, rank: int) -> SnapshotSlot:
        return self._find_room(rank) or await self._keepers.make_room(
            rank, self._node_ids[rank], self._snapshot_bytes[rank], self._held[rank]
        )

    async def _open_snapshots(self, rooms: Sequence[SnapshotSlot]) -> list[set[int]]:
        """By rank, the steps whose snapshots are there."""
        return await self._crew.each("open_snapshots", [[room.path, room.name] for room in rooms])


async def _outliving_deaths(work: Callable[[], Awaitable[None]]) -> None:
    """Do it, and again if a rank dies in the middle of it."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await work()
        except TrainerDied as death:
            if attempt == ATTEMPTS:
                raise
            logger.warning("%s; what it was part of begins anew", death)
        else:
            return


def absolute(directory: Path) -> Path:
    """As it holds in the ranks, whose working directory is another."""
    return directory.absolute()


def finish(directory: Path, parts: Sequence[bytes]) -> None:
    from rlsys.engines.training.trainer_state import finish_state  # a second of imports

    finish_state(directory, parts)
