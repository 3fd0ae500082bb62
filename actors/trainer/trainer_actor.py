"""A rank of the trainer as a Ray actor."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlsys.controller.worker_protocols import StepRowsRef, TrainerDied, Written
from rlsys.reallocation.transport.group_transport import GroupSender
from rlsys.reallocation.transport.link_epochs import Link
from rlsys.reallocation.transport.shared_memory import MemoryGone, SharedMemory
from rlsys.reallocation.transport.staging import DamagedWeightsError
from rlsys.reallocation.transport.weight_deltas import WeightDelta, WeightOffer
from rlsys.runs.observe.trace import TraceBatch, Tracer
from rlsys.types import MicroBatch, StepResult, WeightManifest

from ..cluster.calls import HEARTBEAT_GROUP, Heartbeat
from ..store.row_transfer import compute_columns, read_rows, write_column
from ..store.store_actor import StoreAddress, StoreClient

if TYPE_CHECKING:
    from rlsys.dataflow.graph.stages import PerBatchStage
    from rlsys.engines.training.snapshot import SnapshotFile
    from rlsys.engines.training.state_resharding import Move
    from rlsys.engines.training.trainer_state import HeldState
    from rlsys.engines.training.training_protocol import TrainingEngine
    from rlsys.reallocation.shards import TensorShard

# Builds a rank's engine in the actor's process: (rank, host of rank 0, port there) -> engine.
EngineFactory = Callable[[int, str, int], "TrainingEngine"]


def free_port(host: str) -> int:
    """Return a free port of a host."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


@ray.remote(concurrency_groups={"concurrent": 1, "writing": 1, **HEARTBEAT_GROUP})
class TrainerActor(Heartbeat):
    """Actor of one rank.

    Calls run one at a time, in the order of the calls, except for those in the groups `concurrent`
    and `writing`. After a call has failed, later ones fail too: a step without one of its
    micro-batches must not be taken.
    """

    def __init__(
        self,
        rank: int,
        make_engine: EngineFactory,
        snapshot_every: int,
        store: StoreAddress,
        tracer: Tracer,
    ) -> None:
        self._tracer = tracer
        self._rank = rank
        self._make_engine = make_engine
        self._snapshot_every = snapshot_every
        self._store = StoreClient(store)
        self._engine: Any = None  # a TrainingEngine, set by `start`
        self._sender = GroupSender(ray.util.get_node_ip_address())
        self._snapshots: SnapshotFile | None = None
        self._held: HeldState | None = None
        self._is_released = False
        self._failure: Exception | None = None
        self._train_s = 0.0  # since the last optimizer step

    def rendezvous(self) -> tuple[str, str, int]:
        """Return the id and address of this rank's node, and a free port there."""
        host = ray.util.get_node_ip_address()
        return ray.get_runtime_context().get_node_id(), host, free_port(host)

    def start(self, host: str, port: int, num_snapshots: int) -> tuple[int, float]:
        """Build the engine; return the bytes of the snapshots, and attention_tokens.

        Without snapshots, the state of `hold` gets memory of this process.
        """
        self._engine = self._make_engine(self._rank, host, port)
        if not num_snapshots:
            self._open_own_snapshot()
        return self._engine.snapshot_bytes(num_snapshots), self._engine.attention_tokens

    def open_snapshots(self, path: str, name: str) -> set[int]:
        """Keep snapshots at this path from now on; return the steps of those that it has.

        The result is empty if the holder has died meanwhile; it will be replaced.
        """
        # an open one may contain the held state
        if self._snapshots is None or self._snapshots.name != name:
            self._snapshots = None
            with contextlib.suppress(MemoryGone):
                self._snapshots = self._engine.open_snapshots(path, name)
        return self._snapshots.steps if self._snapshots else set()

    def _open_own_snapshot(self) -> SnapshotFile:
        """Open memory for one snapshot, which is freed with this process."""
        num_bytes = self._engine.snapshot_bytes(1)
        name = f"rlsys-held-{uuid.uuid4().hex[:12]}"
        memory = SharedMemory(name, num_bytes, purpose="the state of a checkpoint")
        file: SnapshotFile = self._engine.open_snapshots(memory.path, name)
        memory.close()
        self._snapshots = file
        return file

    def restore(self, step: int) -> None:
        """Load the snapshot of a step."""
        with self._call("restore"):
            self._engine.restore(self._snapshots, step)

    def holdings(self) -> tuple[TensorShard, ...]:
        """Return the shards in this rank's snapshots."""
        held: tuple[TensorShard, ...] = self._engine.state_holdings
        return held

    def take(self, move: Move, rank: str, *weight_deltas: WeightDelta) -> None:
        """Load this rank's state from the snapshots of ranks with another layout."""
        with self._call("take"), self._tracer.span("trainer", "take", step=move.step):
            try:
                self._engine.take(move, rank, weight_deltas)
            except (MemoryGone, DamagedWeightsError) as error:
                raise TrainerDied(
                    f"trainer-{self._rank} did not receive its state: {error}"
                ) from error

    def snapshot(self) -> None:
        """Keep a snapshot of the current state."""
        if self._snapshots is not None:
            with self._call("snapshot"), self._tracer.span("trainer", "snapshot"):
                self._engine.snapshot(self._snapshots)

    def clear_snapshots(self) -> None:
        """Discard all snapshots."""
        if self._snapshots is not None:
            self._snapshots.clear()

    @ray.method(concurrency_group="concurrent")
    def drain_trace(self) -> TraceBatch:
        """Return the trace records since the last call."""
        return self._tracer.drain()

    def use_store(self, store: StoreAddress) -> None:
        """Use another address of the store after a shard was replaced."""
        self._store = StoreClient(store)

    @ray.method(concurrency_group="concurrent")
    def weight_delta(
        self, manifest: WeightManifest, node_id: str, base: int | None
    ) -> WeightDelta | None:
        """Return this rank's part of a version that another node lacks. Raises MemoryGone."""
        found: WeightDelta | None = self._engine.weight_delta(manifest, node_id, base)
        return found

    @ray.method(concurrency_group="concurrent")
    def offer_weights(
        self, manifest: WeightManifest, node_id: str, base: int | None
    ) -> WeightOffer | None:
        """Keep what `weight_delta` returns for `send_weights`. Raises MemoryGone."""
        found: WeightDelta | None = self._engine.weight_delta(manifest, node_id, base)
        return None if found is None else self._sender.offer(found)

    @ray.method(concurrency_group="concurrent")
    def send_weights(self, offer: WeightOffer | None, link: Link) -> None:
        """Start to send an offer over a link. Failures reach the controller from its other end."""
        if offer is not None:
            self._sender.send(offer, link)

    def sft_step(
        self, token_ids: list[list[int]], prompt_lengths: list[int], learning_rate: float
    ) -> float:
        """Take one supervised step; return its loss."""
        with self._call("sft_step"), self._tracer.working("trainer", "sft_step"):
            loss: float = self._engine.sft_step(
                token_ids, prompt_lengths, learning_rate=learning_rate
            )
            return loss

    def reset_optimizer(self) -> None:
        """Reset the optimizer's state."""
        self._engine.reset_optimizer()

    def accumulate(self, *micro_batches: StepRowsRef) -> None:
        """Accumulate the gradients of micro-batches."""
        with self._working("accumulate", rows=sum(map(len, micro_batches))):
            batches = [MicroBatch(rows=read_rows(rows, self._store)) for rows in micro_batches]
            self._engine.accumulate(*batches)

    def infer(
        self, writes: str, per_token: bool, adapters: bool, rows: StepRowsRef, reports: bool
    ) -> Written:
        """Compute values with the current weights; write them if this rank `reports` them."""
        with self._working("infer", rows=len(rows)):
            made = self._engine.infer(read_rows(rows, self._store), adapters=adapters)
            if not reports:
                return Written()
            return write_column(writes, made, self._store, per_token=per_token)

    def compute(self, stage: PerBatchStage, rows: StepRowsRef) -> Written:
        """Compute a function over a step and write its columns."""
        with self._working("compute", rows=len(rows)):
            return compute_columns(stage, rows, self._store)

    def optimizer_step(self, last: bool = True) -> StepResult:
        """Take an optimizer step, and keep a snapshot if one is due."""
        with self._working("optimizer_step"):
            result: StepResult = self._engine.optimizer_step(last=last)
            is_due = self._snapshot_every and result.policy_version % self._snapshot_every == 0
            if last and is_due:
                self.snapshot()
        train_s, self._train_s = self._train_s, 0.0
        return replace(result, train_s=train_s)

    def publish(self, node_ids: Sequence[str], on_device: bool) -> WeightManifest | None:
        """Publish the weights for readers on these nodes; rank 0 returns a manifest."""
        with self._working("publish"):
            manifest: WeightManifest | None = self._engine.publish(node_ids, on_device=on_device)
            return manifest

    def hold(self) -> None:
        """Keep the current state until `write` has written it."""
        with self._call("hold"), self._tracer.span("trainer", "hold"):
            self._held = self._engine.hold(self._snapshots or self._open_own_snapshot())

    def release(self) -> None:
        """Free the memory of the device; the next call brings the state back."""
        with self._call("release"), self._tracer.span("trainer", "release"):
            self._engine.release()
            self._is_released = True

    @ray.method(concurrency_group="writing")
    def write(self, directory: Path) -> bytes | OSError:
        """Write this rank's part of the held state.

        Returns what rlsys.engines.training.trainer_state.finish_state needs, or the error of the
        disk, after which the trainer continues.
        """
        assert self._held is not None, "hold comes first"
        try:
            with self._tracer.span("checkpoint", "write"):
                return self._held.write(directory)
        except OSError as error:
            return error
        finally:
            self._held.release()
            self._held = None

    def load(self, directory: Path) -> None:
        """Load a state from disk."""
        with self._call("load"):
            self._engine.load(directory)

    def export(self, directory: Path) -> OSError | None:
        """Export the model; return the error of the disk, after which the trainer continues."""
        with self._call("export"):
            try:
                self._engine.export(directory)
            except OSError as error:
                return error
        return None

    def close(self) -> None:
        """Close the engine and all links."""
        self._sender.close()
        if self._engine is not None:
            self._engine.close()

    @contextlib.contextmanager
    def _working(self, name: str, **args: Any) -> Iterator[None]:
        start = time.perf_counter()
        with self._call(name), self._tracer.working("trainer", name, **args):
            yield
        self._train_s += time.perf_counter() - start

    @contextlib.contextmanager
    def _call(self, name: str) -> Iterator[None]:
        if self._failure is not None:
            raise TrainerDied(f"trainer-{self._rank} failed before {name}: {self._failure}")
        try:
            if self._is_released:
                with self._tracer.span("trainer", "take_back"):
                    self._engine.take_back()
                self._is_released = False
            yield
        except Exception as error:
            from rlsys.engines.training.ranks import lost_contact

            self._failure = error
            if lost_contact(error):
                raise TrainerDied(f"trainer-{self._rank} lost another rank: {error}") from error
            if isinstance(error, DamagedWeightsError):
                raise TrainerDied(f"trainer-{self._rank} has damaged weights: {error}") from error
            raise
