"""The interface of a training engine, which each rank of a trainer implements.

Every rank receives the same sequence of calls; micro-batches are already split over the
data-parallel ranks. Gradients accumulate unnormalised. `optimizer_step` divides them by the
denominator summed over all micro-batches and ranks, so the result depends neither on the number of
ranks nor on the number of micro-batches.

    accumulate(micro_batch) × n ──► optimizer_step() ──► publish()

A batch may take several updates of the weights. The last one makes a new policy_version:

    (accumulate × n ──► optimizer_step(last=False)) × m, accumulate × n ──► optimizer_step()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlsys.engines.training.snapshot import SnapshotFile
from rlsys.engines.training.state_resharding import Move
from rlsys.engines.training.trainer_state import HeldState
from rlsys.reallocation.shards import TensorShard
from rlsys.reallocation.transport.weight_deltas import WeightDelta
from rlsys.types import Float32Array, MicroBatch, StepResult, TrainRow, WeightManifest


class TrainingEngine(Protocol):
    """A rank of a trainer: gradients, optimizer steps, weights for the engines, state."""

    def sft_step(
        self,
        token_ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        learning_rate: float | None = None,
    ) -> float:
        """Make one supervised AdamW step on the tokens after each prompt, at temperature 1.

        Every rank receives the whole batch and takes its share. The step does not change
        policy_version. `learning_rate` defaults to the trainer's peak.

        Returns the mean loss of these tokens in nats.
        """

    def reset_optimizer(self) -> None:
        """Discard the optimizer's state, so that RL after a warm start begins with a new one."""

    def accumulate(self, *micro_batches: MicroBatch) -> None:
        """Add the gradients of micro-batches, equally many on every rank.

        A rank with an empty micro-batch only takes part in collectives. Pipeline stages work on
        several micro-batches of one call at once. In float16 the engine keeps the rows until the
        update, because it may have to compute them again.
        """

    def optimizer_step(self, *, last: bool = True) -> StepResult:
        """Make one AdamW update from the gradients accumulated since the last one.

        The `last` update of a batch makes a new policy_version. `load`, `snapshot`, `hold` and
        `restore` are allowed between batches only. In float16, gradients that overflow are first
        computed again with a lower loss scale.

        Metrics cover the batch so far: weighted means over its updates, the mean gradient norm and
        the largest staleness. num_tokens counts a token once per update. All updates of a version
        use its learning rate. Staleness counts updates: trainer.updates_per_step for each version,
        plus those of this batch so far.

        Raises FloatingPointError, and leaves the weights unchanged, if the loss or the gradient is
        not finite; ValueError if no token was accumulated on any rank.
        """

    def infer(self, rows: Sequence[TrainRow], *, adapters: bool = True) -> list[Float32Array]:
        """Return the model's outputs without gradient, one array per row.

        Head "logits" gives log-probabilities of the completion tokens [T], "value" the value of the
        text before each of them [T], "score" the score of the row [1]. Loss masks and columns are
        ignored. Each rank computes its own rows, in any split that the caller chooses; a rank
        without rows takes part in collectives only.

        Without `adapters`, returns the outputs of the base model; raises ValueError if the model
        has no adapters.
        """

    @property
    def attention_tokens(self) -> float:
        """Row length at which attention costs as many FLOPs as the rest of the model."""

    def publish(
        self, nodes: Sequence[str] = (), *, on_device: bool = True
    ) -> WeightManifest | None:
        """Stage this rank's part of the weights in its node's shared memory. A collective.

        The plan covers readers on `nodes`. Nothing is gathered, and training may go on after the
        call. Readers that opened a version before the next is published can still read it.
        Without `on_device`, no version is staged in memory of the GPU from now on.

        Returns the manifest on rank 0 and None on other ranks. Raises ValueError for a model
        without logits.
        """

    def weight_delta(
        self, manifest: WeightManifest, node: str, base: int | None
    ) -> WeightDelta | None:
        """Return the part of this rank's share that another node needs; None if it needs nothing.

        `base` is a version whose parts the node still has. May be called from another thread.
        Raises MemoryGone if the version has been replaced.
        """

    def load(self, directory: Path) -> None:
        """Load a state that all ranks of a trainer wrote (rlsys.engines.training.trainer_state).

        The number of ranks may differ. Raises ValueError if it is the state of another model.
        """

    def snapshot_bytes(self, num_snapshots: int) -> int:
        """Return the size of this rank's file for `num_snapshots` snapshots."""

    def open_snapshots(self, path: str, name: str) -> SnapshotFile:
        """Open this rank's shared memory for snapshots. A collective the first time.

        It is empty, or has the snapshots of the rank that this one replaces. Raises MemoryGone.
        """

    def snapshot(self, file: SnapshotFile) -> None:
        """Copy this rank's part of model, optimizer and RNG under its policy_version."""

    def hold(self, file: SnapshotFile) -> HeldState:
        """Take a snapshot that can be written to a checkpoint while the engine goes on."""

    def restore(self, file: SnapshotFile, step: int) -> None:
        """Restore a snapshot of the same number of ranks."""

    @property
    def state_holdings(self) -> tuple[TensorShard, ...]:
        """Boxes of parameters, moments and buffers in this rank's snapshots."""

    def take(self, move: Move, rank: str, weight_deltas: Sequence[WeightDelta]) -> None:
        """Restore snapshots of ranks with another layout.

        Reads files on this node, and `weight_deltas` of files on other nodes. `rank` is this rank's
        name in the move. Raises MemoryGone, DamagedWeightsError.
        """

    def release(self) -> None:
        """Free the device's memory between two steps.

        The state moves to host memory; gradients and buffers are discarded. Only `weight_delta` is
        allowed until `take_back`. On the CPU the state stays in place.
        """

    def take_back(self) -> None:
        """Move the state back to the device after `release`."""

    def export(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint with its tokenizer.

        AutoModelForCausalLM loads a policy, AutoModelForSequenceClassification a critic or reward
        model. A critic applies its head to every token.

        Raises OSError on rank 0, the writer, for an unwritable directory or a full disk. All ranks
        can go on after it.
        """

    def close(self) -> None:
        """Unlink the published weights. Idempotent."""
