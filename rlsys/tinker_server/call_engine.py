"""The training engine, call by call as a client asks for it, rather than step by step.

    forward_backward(rows, loss) × n ──► optim_step(AdamStep) ──► save_for_sampler, publish

Gradients add up as they are, by no token and no row divided: whoever gives weights and advantages
normalises. A pass tells the log-probability of every target beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlsys.algorithms.loss_inputs import LossFn, LossInputs, TokenLoss, needs_of, uses_advantages
from rlsys.engines.models.collate import split_passes
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.optimizer import scale_gradients
from rlsys.engines.training.sharding import free_gathered
from rlsys.reallocation.shards import whole
from rlsys.tinker_server.datum_rows import DATUM, TARGETS
from rlsys.types import Float32Array, TrainRow, WeightManifest

# Where it lies in a directory that `save_for_sampler` has written; beside it, PEFT's `adapter`.
WHOLE_MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """One update of the weights. `grad_clip_norm` 0: none."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What a pass says of the rows that one rank had: log-probabilities of each row's targets,
    flat, by the number of its datum; and the sum of the loss.
    """

    logprobs: dict[int, Float32Array]  # [N] or [N * K]
    loss: float


class Recorded:
    """A loss that keeps what it has seen. With `num_targets`, it is about K tokens at each place
    that a column names, not about the row's own.
    """

    def __init__(self, loss: LossFn, num_targets: int) -> None:
        self._loss = loss
        self._num_targets = num_targets
        self.needs = (*needs_of(loss), DATUM)
        self.uses_advantages = uses_advantages(loss)
        self.candidates = TARGETS if num_targets else None
        self._seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        logprobs, losses = inputs.trainer_logprobs, None
        if self._num_targets:
            assert inputs.candidate_logprobs is not None
            logprobs = inputs.candidate_logprobs  # [N, K]
            losses = sum(
                self._loss(self._of_target(inputs, k))[0] for k in range(logprobs.shape[1])
            )
            if not len(logprobs):  # a pass without rows knows no K
                losses = inputs.trainer_logprobs * 0.0
        else:
            losses = self._loss(inputs)[0]
        assert isinstance(losses, torch.Tensor)
        self._seen.append((inputs.column(DATUM).long(), logprobs.detach(), losses.detach()))
        return losses, {}

    def _of_target(self, inputs: LossInputs, k: int) -> LossInputs:
        def own(values: torch.Tensor) -> torch.Tensor:
            return values[:, k] if values.ndim == 2 else values

        assert inputs.candidate_logprobs is not None
        logprobs = inputs.candidate_logprobs[:, k]
        return LossInputs(
            trainer_logprobs=logprobs,
            proximal_logprobs=logprobs.detach(),
            sampler_logprobs=own(inputs.sampler_logprobs),
            advantages=own(inputs.advantages),
            entropy=inputs.entropy,
            staleness=inputs.staleness,
            row_index=inputs.row_index,
            columns={name: own(values) for name, values in inputs.columns.items()},
        )

    def told(self) -> Passed:
        logprobs: dict[int, Float32Array] = {}
        total = 0.0
        for datum, of_targets, losses in self._seen:
            total += float(losses.double().sum())
            numbers, values = datum.cpu().numpy(), of_targets.float().cpu().numpy()
            for number in np.unique(numbers):  # the tokens of a row stand in their order
                logprobs[int(number)] = values[numbers == number].reshape(-1)
        return Passed(logprobs=logprobs, loss=total)


def summed(group_size: int, group_num_tokens: int, row_num_tokens: int) -> tuple[float, float]:
    """An aggregation that divides by nothing: `optim_step` leaves the denominator out."""
    return 1.0, 1.0


class PrimitiveEngine(FSDPEngine):
    """One rank; all ranks get the same calls, each its share of the rows. Not in float16, and not
    with stages: ValueError.
    """

    def __init__(self, **options: Any) -> None:
        if options["model"].dtype == "float16":
            raise ValueError(
                "model.dtype=float16 scales the loss and may compute a batch twice, which commands "
                "of a client cannot; use bfloat16 or float32."
            )
        if options["trainer"].parallel.pp > 1:
            raise ValueError(
                f"trainer.layout={options['trainer'].layout!r} has stages, which cannot answer a "
                "client with log-probabilities; use dp, tp, cp or ep."
            )
        super().__init__(**options)

    def forward_backward(
        self, rows: Sequence[TrainRow], loss: LossFn, *, num_targets: int, backward: bool
    ) -> Passed:
        """Add the gradient of the loss, or with `backward` False only say what it is. A
        collective.
        """
        recorded = Recorded(loss, num_targets)
        if backward:
            self._accumulate(self._role, [rows], recorded, summed)
        else:
            self._look(rows, recorded)
        return recorded.told()

    def _look(self, rows: Sequence[TrainRow], loss: Any) -> None:
        role = self._role
        columns = role.columns(loss, rows)
        passes = split_passes(
            rows, self._config.micro_batch_tokens, packed=role.packs, shares=role.shares
        )
        passes += [[]] * (self._ranks.max(len(passes)) - len(passes))
        try:
            with torch.no_grad():
                for chosen in passes:
                    batch = role.collate([rows[index] for index in chosen], columns)
                    role.learn(loss, batch, torch.zeros_like(batch.policy_versions))
        finally:
            free_gathered(role.network)

    def discard(self) -> None:
        """Forget the gradients that have added up."""
        self._begin_update()

    def optim_step(self, step: AdamStep) -> dict[str, float]:
        """AdamW on the sum of the gradients. A collective; on all ranks the same.

        Raises ValueError where there is no gradient, FloatingPointError where it is not finite; the
        weights stay as they are, and the gradient is forgotten.
        """
        parameters = list(self._parameters.values())
        sums = self._reduced(parameters)
        if sums.denominator <= 0:
            self._begin_update()
            raise ValueError(
                "optim_step has no gradient; call forward_backward before, with data of its own."
            )
        norm = sums.grad_norm * sums.denominator
        if not np.isfinite(norm):
            self._begin_update()
            raise FloatingPointError(
                f"the gradient's norm is {norm}: not a number that can be trained on; look for "
                "huge weights or advantages, or lower the learning rate. The gradient is "
                "forgotten, the weights stay."
            )
        scale = 1.0
        if 0 < step.grad_clip_norm < norm:
            scale = step.grad_clip_norm / norm
        scale_gradients(parameters, scale / self._scale.value)
        for group in self._optimizer.param_groups:
            is_matrix = all(one.ndim >= 2 for one in group["params"])
            group["lr"] = step.learning_rate
            group["betas"] = (step.beta1, step.beta2)
            group["eps"] = step.eps
            group["weight_decay"] = step.weight_decay if is_matrix else 0.0
        self._optimizer.step()
        self._begin_update()
        self.policy_version += 1
        return {
            "grad_norm": norm,
            "learning_rate": step.learning_rate,
            "policy_version": float(self.policy_version),
        }

    def load_weights(self, directory: Path, *, optimizer: bool) -> None:
        """A saved state; without its moments, unless `optimizer`."""
        self.load(directory)
        if not optimizer:
            self.reset_optimizer()

    def publish_as(self, number: int, nodes: Sequence[str]) -> WeightManifest | None:
        """As `publish`, under a number that the caller gives. A collective."""
        return self._require_publisher().publish(number, nodes)

    def save_for_sampler(self, directory: Path) -> None:
        """What rlsys.tinker_server.saved_weights reads: adapters as PEFT loads them, or the whole
        model. A collective. Raises OSError on rank 0, which writes.
        """
        if self._adapters is None:
            self.export(directory / WHOLE_MODEL)
            return
        trained = {name: whole(tensor).cpu() for name, tensor in self._tensors.items()}
        if self._ranks.rank == 0:
            self._adapters.save(trained, directory)
