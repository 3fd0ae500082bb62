"""What a training engine offers, on each of its ranks.

Every rank receives the same sequence of calls; a micro-batch is already split by data-parallel
rank. Gradients accumulate unnormalised; `optimizer_step` divides by the denominator summed over all
micro-batches and ranks, so the result depends neither on the number of ranks nor of micro-batches.

    accumulate(micro_batch) × n ──► optimizer_step() ──► publish()

A batch may take several updates of the weights, of which the last one makes a version:

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
    def sft_step(
        self,
        token_ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        learning_rate: float | None = None,
    ) -> float:
        """One supervised AdamW step on the tokens after each prompt, at temperature 1; returns
        their mean loss in nats. `learning_rate` defaults to the trainer's peak.

        Every rank receives the whole batch and takes its share. Not a policy_version.
        """

    def reset_optimizer(self) -> None:
        """Forget the optimizer's state: after a warm start the RL optimizer begins afresh."""

    def accumulate(self, *micro_batches: MicroBatch) -> None:
        """Forward and backward of micro-batches, as many on every rank; an empty one takes part in
        collectives only. Stages of a pipeline work on several of one call at once. In float16 the
        rows are kept until the update, which may have to compute them again.
        """

    def optimizer_step(self, *, last: bool = True) -> StepResult:
        """One AdamW update on what was accumulated since the last one; the `last` of a batch makes
        a new policy_version.

        Metrics are those of the batch so far: means over its updates, each weighted by what it is a
        mean of, the mean gradient norm, the largest staleness; num_tokens counts a token in each
        update that it is part of. The learning rate is the version's, for all its updates.
        Staleness counts updates: trainer.updates_per_step for each version, and those of this
        batch so far. `load`, `snapshot`, `hold` and `restore` come between batches only.

        In float16, gradients beyond its range are first computed again with a lower scale of the
        loss. Raises FloatingPointError, and leaves the weights as they are, if the loss or the
        gradient is not finite; ValueError if no token was accumulated on any rank.
        """

    def infer(self, rows: Sequence[TrainRow], *, adapters: bool = True) -> list[Float32Array]:
        """What the model says now, without gradient, an array a row: with head "logits" the
        log-probabilities of the completion tokens [T], with "value" the values of the text before
        each of them [T], with "score" the score of the row [1].

        Each rank gets a share of its own, in whatever way the caller splits the rows, and answers
        for it; one without rows takes part in collectives only. Loss masks and columns play no
        part. Without `adapters`, what the model says that they were put into; raises ValueError
        where there are none.
        """

    @property
    def attention_tokens(self) -> float:
        """Of a row, when attention to them costs as much as all the rest of the model does."""

    def publish(self, nodes: Sequence[str] = ()) -> WeightManifest | None:
        """Stage the weights for the generation engines, those of this rank in shared memory of its
        node: what a plan says for readers on these nodes. A collective, after which training may go
        on; nothing of it is gathered.

        Returns the manifest on rank 0 and None on the others. A version stays for those that have
        opened it before the next is published. Raises ValueError for a model without logits.
        """

    def weight_delta(
        self, manifest: WeightManifest, node: str, base: int | None
    ) -> WeightDelta | None:
        """What a node needs of this rank's share, which lies on another; None for nothing. `base`:
        a version of which the node still has what it got. Called on another thread than all else.
        Raises MemoryGone if it is too late.
        """

    def load(self, directory: Path) -> None:
        """From what all ranks have written of the state that they held (rlsys.engines.training.
        trainer_state); the number of ranks may differ.

        Raises ValueError if the directory does not hold this model.
        """

    def snapshot_bytes(self, num_snapshots: int) -> int:
        """Of the file that `open_snapshots` needs, on this rank, for so many of them."""

    def open_snapshots(self, path: str, name: str) -> SnapshotFile:
        """This rank's shared memory for snapshots: zeros, or what the rank that it replaces wrote
        there. A collective the first time. Raises MemoryGone.
        """

    def snapshot(self, file: SnapshotFile) -> None:
        """Copy model, optimizer and RNG, this rank's part of them, under its policy_version, which
        sets the schedule.
        """

    def hold(self, file: SnapshotFile) -> HeldState:
        """A snapshot of now, that can be written as this rank's part of a checkpoint while the
        engine goes on.
        """

    def restore(self, file: SnapshotFile, step: int) -> None:
        """Inverse of snapshot, as if nothing had happened since; for the same number of ranks."""

    @property
    def state_holdings(self) -> tuple[TensorShard, ...]:
        """What lies in this rank's snapshots: which boxes of parameters, moments and buffers."""

    def take(self, move: Move, rank: str, weight_deltas: Sequence[WeightDelta]) -> None:
        """As `restore`, out of snapshots of ranks that were laid out otherwise: files on this node,
        and what has come in of others. `rank`: this one's name in the move. Raises MemoryGone,
        DamagedWeightsError.
        """

    def release(self) -> None:
        """Let the device's memory go, between two steps: the state moves to the host's, gradients
        and buffers are forgotten. Nothing may be asked but `weight_delta`, until `take_back`. On
        the CPU the state is where it belongs, and stays.
        """

    def take_back(self) -> None:
        """Inverse of release, as if nothing had happened since."""

    def export(self, directory: Path) -> None:
        """A Hugging Face checkpoint with its tokenizer, which AutoTokenizer loads and, by the
        head, AutoModelForCausalLM or AutoModelForSequenceClassification. A critic is one of the
        latter, whose head is applied to every token.

        Raises OSError on rank 0, which writes it, for an unwritable directory or a full disk; all
        ranks can go on.
        """

    def close(self) -> None:
        """Unlink what was published. Idempotent."""
