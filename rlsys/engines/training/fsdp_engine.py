"""The training engine: one rank of a data-parallel trainer over any Hugging Face causal LM.

    rows ─► passes ─► TokenPolicy ─► loss ─► backward ─┐ (summed, unnormalised)
                                                       ├─► one reduction ─► clip ─► AdamW ─► publish
    denominators, counts, metrics (summed) ────────────┘

FSDP2 shards parameters, gradients and optimizer over the ranks. Nothing is divided before the
optimizer step, where one reduction brings the sums of all micro-batches and ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rlsys import metrics
from rlsys.algorithms import kl
from rlsys.algorithms.aggregation import Aggregation, token_mean
from rlsys.algorithms.inputs import LossFn, LossInputs, needs_of
from rlsys.config import ModelConfig, TrainerConfig
from rlsys.engines.causal_lm import load_causal_lm
from rlsys.engines.cpu_memory import keep_freed_memory
from rlsys.engines.model_tensors import model_tensors
from rlsys.engines.rms_norm import use_fast_norms
from rlsys.engines.training.collate import Batch, collate, split_passes
from rlsys.engines.training.export import export_model
from rlsys.engines.training.optimizer import (
    build_adamw,
    learning_rate,
    scale_gradients,
    set_learning_rate,
    squared_norm,
)
from rlsys.engines.training.publisher import Publisher
from rlsys.engines.training.ranks import Ranks
from rlsys.engines.training.sharding import recompute_activations, shard, whole
from rlsys.engines.training.snapshot import SnapshotFile, snapshot_bytes
from rlsys.engines.training.statistics import StepStatistics, StepSums
from rlsys.engines.training.supervised import supervised_loss, supervised_row
from rlsys.engines.training.token_policy import TokenPolicy
from rlsys.engines.training.trainer_state import load_state, save_state, state_tensors
from rlsys.types import Float32Array, MicroBatch, StepResult, TrainRow, WeightManifest

# Columns that every loss of log-probabilities gets.
FIELDS = ("sampler_logprobs", "advantages")
# And one that it gets if a stage before the training wrote it.
PROXIMAL = "proximal_logprobs"


class FSDPEngine:
    """A rlsys.engines.training.protocol.TrainingEngine.

    With several ranks every one of them makes its own, after `init_process_group`. Raises OSError
    where memory is short for the versions of the weights that rank 0 publishes.
    """

    def __init__(
        self,
        *,
        model_path: str | Path,
        trainer: TrainerConfig,
        model: ModelConfig,
        loss: LossFn,
        aggregation: Aggregation,
        temperature: float,
        num_total_steps: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        device: str = "cpu",
    ) -> None:
        self.policy_version = 0
        self._model_path = model_path
        self._config = trainer
        self._dtype: torch.dtype = getattr(torch, model.dtype)
        self._loss = loss
        self._aggregation = aggregation
        self._temperature = temperature
        self._num_total_steps = num_total_steps
        self._ranks = Ranks(rank, world_size)
        self._device = torch.device(device)
        torch.manual_seed(seed)
        if self._device.type == "cpu":
            keep_freed_memory()
        # Masters are float32 whatever the precision of the forward pass. The model stays in
        # evaluation mode: dropout would make trainer and sampler two different policies.
        causal_lm = load_causal_lm(model_path, dtype="float32")
        use_fast_norms(causal_lm)
        self._policy = TokenPolicy(causal_lm)
        if model.gradient_checkpointing:
            recompute_activations(self._policy)
        shard(self._policy, world_size=world_size, dtype=model.dtype, device=device)
        self._parameters = dict(self._policy.model.named_parameters())  # tied ones stand once
        self._tensors = model_tensors(self._policy.model)  # these and the persistent buffers
        self.reset_optimizer()
        published = {name: (self._dtype_of(name), t.shape) for name, t in self._tensors.items()}
        self._publisher = Publisher(published) if rank == 0 else None
        self._begin_step()

    def reset_optimizer(self) -> None:
        self._optimizer = build_adamw(list(self._parameters.values()), self._config)

    def accumulate(self, micro_batch: MicroBatch) -> None:
        self._accumulate(micro_batch.rows, self._loss, self._aggregation, self._temperature)

    def optimizer_step(self) -> StepResult:
        rate = learning_rate(self._config, self.policy_version, self._num_total_steps)
        sums = self._apply_gradients(rate, f"optimizer step {self.policy_version + 1}")
        self.policy_version += 1
        return StepResult(
            policy_version=self.policy_version,
            metrics={
                metrics.LOSS: sums.loss,
                metrics.GRAD_NORM: sums.grad_norm,
                metrics.LEARNING_RATE: rate,
                metrics.STALENESS_MEAN: sums.staleness_mean,
                metrics.STALENESS_MAX: float(sums.staleness_max),
                **sums.token_means,
            },
            num_tokens=sums.num_tokens,
        )

    def sft_step(
        self,
        token_ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        learning_rate: float | None = None,
    ) -> float:
        if not self._statistics.is_empty:
            raise ValueError(
                "sft_step between accumulate and optimizer_step would mix their gradients; call "
                "optimizer_step first."
            )
        examples = list(zip(token_ids, prompt_lengths, strict=True))
        share = examples[self._ranks.rank :: self._ranks.world_size]
        rows = [supervised_row(tokens, length) for tokens, length in share]
        self._accumulate(rows, supervised_loss, token_mean, temperature=1.0)
        rate = self._config.learning_rate if learning_rate is None else learning_rate
        return self._apply_gradients(rate, "a supervised step").loss

    def logprobs(self, micro_batch: MicroBatch) -> list[Float32Array]:
        rows = [
            replace(row, loss_mask=np.ones(len(row.token_ids), np.bool_))
            for row in micro_batch.rows
        ]
        found = [np.zeros(len(row.token_ids), np.float32) for row in rows]
        indices = [index for index, row in enumerate(rows) if len(row.token_ids)]
        passes = self._split_passes([rows[index] for index in indices])
        with torch.no_grad():
            for number in range(self._ranks.max(len(passes))):
                chosen = [indices[i] for i in passes[number]] if number < len(passes) else []
                batch = self._collate([rows[index] for index in chosen])
                logprobs, _ = self._forward(batch, self._temperature)
                lengths = [len(rows[index].token_ids) for index in chosen]
                for index, part in zip(chosen, logprobs.cpu().split(lengths), strict=True):
                    found[index] = part.numpy()
        return found

    def publish(self) -> WeightManifest | None:
        file, error = None, None
        if self._publisher is not None:
            try:
                file = self._publisher.create(self.policy_version)
            except OSError as failure:
                error = failure
        self._ranks.raise_together(error)
        for name, tensor in self._tensors.items():
            gathered = whole(tensor)
            if file is not None:
                file.put(name, gathered)
        if file is None or self._publisher is None:
            return None
        return self._publisher.commit(file)

    def save(self, directory: Path) -> None:
        save_state(
            directory, self._tensors, self._optimizer, self.policy_version, sharded=self._sharded
        )

    def load(self, directory: Path) -> None:
        self.policy_version = load_state(
            directory, self._tensors, self._optimizer, sharded=self._sharded
        )
        self._begin_step()

    @property
    def snapshot_bytes(self) -> int:
        return snapshot_bytes(self._local_state())

    def open_snapshots(self, path: str, name: str) -> SnapshotFile:
        return SnapshotFile(path, name, self._local_state())

    def snapshot(self, file: SnapshotFile) -> None:
        file.write(self.policy_version, self._local_state())

    def restore(self, file: SnapshotFile, step: int) -> None:
        state = self._local_state()
        file.read(step, state)
        torch.set_rng_state(state["rng"])
        self.policy_version = step
        self._begin_step()

    def export(self, directory: Path) -> None:
        error = None
        tensors = {}
        for name, tensor in self._tensors.items():
            gathered = whole(tensor)
            if self._ranks.rank == 0:
                tensors[name] = gathered.to("cpu", self._dtype_of(name))
        if self._ranks.rank == 0:
            try:
                export_model(self._policy.model, tensors, self._dtype, self._model_path, directory)
            except OSError as failure:
                error = failure
        self._ranks.raise_together(error)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _local_state(self) -> dict[str, torch.Tensor]:
        """All that a snapshot holds; views of this rank's shards, and a copy of the RNG's state."""
        return state_tensors(self._tensors, self._optimizer) | {"rng": torch.get_rng_state()}

    def _dtype_of(self, name: str) -> torch.dtype:
        """In which a tensor leaves the trainer: a parameter as the forward pass computes with it, a
        buffer, which no precision is set for, as it is."""
        return self._dtype if name in self._parameters else self._tensors[name].dtype

    @property
    def _sharded(self) -> bool:
        return self._ranks.world_size > 1

    def _begin_step(self) -> None:
        self._statistics = StepStatistics()
        self._optimizer.zero_grad()

    def _accumulate(
        self, rows: Sequence[TrainRow], loss: LossFn, aggregation: Aggregation, temperature: float
    ) -> None:
        weights = [self._count(row, aggregation) for row in rows]
        trained = [index for index, row in enumerate(rows) if row.loss_mask.any()]
        passes = self._split_passes([rows[index] for index in trained])
        columns = self._columns(rows, loss)
        # FSDP2 gathers and reduces in every pass, so all ranks run equally many.
        for number in range(self._ranks.max(len(passes))):
            chosen = [trained[i] for i in passes[number]] if number < len(passes) else []
            batch = self._collate([rows[index] for index in chosen], columns)
            row_weights = torch.tensor([weights[index] for index in chosen])
            self._backward(batch, row_weights.to(self._device)[batch.row_index], loss, temperature)

    def _split_passes(self, rows: Sequence[TrainRow]) -> list[list[int]]:
        max_tokens = self._config.micro_batch_tokens
        return split_passes(rows, max_tokens, packed=self._policy.packs)

    def _columns(self, rows: Sequence[TrainRow], loss: LossFn) -> Sequence[str]:
        """Names of the columns that a pass has to have. Raises ValueError if a row lacks one."""
        names = [*FIELDS, *needs_of(loss)]
        if any(PROXIMAL in row.columns for row in rows):
            names.append(PROXIMAL)
        for row in rows:
            if missing := [name for name in names if name not in row.columns]:
                raise ValueError(
                    f"{loss} needs the column {missing[0]}, but a rollout of group {row.group_id} "
                    f"has only {', '.join(row.columns) or 'none'}; let a stage before the training "
                    "write it."
                )
        return names

    def _collate(self, rows: Sequence[TrainRow], columns: Sequence[str] = ()) -> Batch:
        return collate(rows, self._device, packed=self._policy.packs, columns=columns)

    def _count(self, row: TrainRow, aggregation: Aggregation) -> float:
        """Add a rollout to the sums; returns the weight of each of its tokens."""
        num_tokens = int(row.loss_mask.sum())
        weight, denominator = aggregation(row.group_size, row.group_num_tokens, num_tokens)
        versions = row.policy_versions[row.loss_mask]
        self._statistics.add_rollout(
            denominator=denominator,
            num_tokens=num_tokens,
            staleness=self.policy_version - int(versions.min(initial=self.policy_version)),
        )
        return weight

    def _backward(
        self, batch: Batch, weights: torch.Tensor, loss: LossFn, temperature: float
    ) -> None:
        logprobs, entropy = self._forward(batch, temperature)
        # Without such a column the policy at the start of the step is the policy now.
        proximal = batch.columns.get(PROXIMAL, logprobs.detach())
        sampler = batch.columns["sampler_logprobs"]
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            proximal_logprobs=proximal,
            sampler_logprobs=sampler,
            advantages=batch.columns["advantages"],
            entropy=entropy,
            staleness=self.policy_version - batch.policy_versions,
            row_index=batch.row_index,
            columns={name: batch.columns[name] for name in needs_of(loss)},
        )
        token_loss, token_metrics = loss(inputs)
        check_outputs(loss, token_loss, token_metrics, len(logprobs))
        total = (weights * token_loss).sum()
        total.backward()
        gap = (sampler, proximal)
        own = {
            metrics.ENTROPY: entropy,
            metrics.KL_SAMPLER_TRAINER: kl.k1(*gap),
            metrics.KL_SAMPLER_TRAINER_K3: kl.k3(*gap),
        }
        self._statistics.add_pass(total, {**token_metrics, **own})

    def _forward(self, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = self._policy(batch, temperature)
        return result

    def _apply_gradients(self, rate: float, what: str) -> StepSums:
        """Normalise, clip and step, then begin the next step; the weights change only if all is
        finite."""
        parameters = list(self._parameters.values())
        sums = self._statistics.reduce(self._ranks, squared_norm(parameters))
        if not (np.isfinite(sums.loss) and np.isfinite(sums.grad_norm)):
            self._begin_step()
            raise FloatingPointError(
                f"loss {sums.loss} and gradient norm {sums.grad_norm} at {what}: not a number that "
                "can be trained on; lower trainer.learning_rate, or look for infinite "
                "advantages or sampler_logprobs."
            )
        if sums.denominator <= 0:
            self._begin_step()
            raise ValueError(
                f"{what} has no trained token on any rank; accumulate rows with loss_mask tokens."
            )
        clip = min(1.0, self._config.max_grad_norm / (sums.grad_norm + 1e-6))
        scale_gradients(parameters, clip / sums.denominator)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._begin_step()
        return sums


def check_outputs(
    loss: LossFn, token_loss: torch.Tensor, token_metrics: Mapping[str, torch.Tensor], count: int
) -> None:
    """Raise ValueError unless everything is one value a token: anything else would be summed and
    divided wrongly without a sign of it."""
    for name, values in {"its loss": token_loss, **token_metrics}.items():
        if values.shape != (count,):
            raise ValueError(
                f"{loss} returned {name} with shape {tuple(values.shape)} for {count} tokens; "
                "return one value a token and leave sums and means to the aggregation."
            )
