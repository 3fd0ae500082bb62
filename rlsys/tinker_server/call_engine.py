"""Training engine that runs single calls of a client instead of whole steps.

    forward_backward(rows, loss) × n ──► optim_step(AdamStep) ──► save_for_sampler, publish

Gradients are summed, without a division by tokens or rows: the client normalizes by its weights and
advantages. Each call also returns the log-probability of every target.
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
from rlsys.engines.training.accumulation import Objective
from rlsys.engines.training.fsdp_engine import FSDPEngine
from rlsys.engines.training.optimizer import scale_gradients
from rlsys.engines.training.sharding import free_gathered
from rlsys.errors import InvalidValue
from rlsys.reallocation.shards import local_part, whole
from rlsys.tinker_server.datum_rows import DATUM, TARGETS
from rlsys.types import Float32Array, TrainRow, WeightManifest

# Directory of a whole model in what `save_for_sampler` writes, next to PEFT's `adapter`.
WHOLE_MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """A update of the weights. `grad_clip_norm` 0: no clipping."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


@dataclass(frozen=True, kw_only=True)
class PassOutput:
    """Results of one rank's rows: log-probabilities of targets by datum, and the summed loss."""

    logprobs: dict[int, Float32Array]  # [N] or [N * K]
    loss: float


class RecordingLoss:
    """A loss that keeps what it has computed.

    With `num_targets`, it is about K tokens at each place, named by a column, instead of the row's
    own tokens.
    """

    def __init__(self, loss: LossFn, num_targets: int) -> None:
        self._loss = loss
        self._num_targets = num_targets
        self.needs = (*needs_of(loss), DATUM)
        self.uses_advantages = uses_advantages(loss)
        self.candidates = TARGETS if num_targets else None
        self._seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token, and keep it."""
        logprobs = inputs.trainer_logprobs
        if self._num_targets:
            assert inputs.candidate_logprobs is not None
            logprobs = inputs.candidate_logprobs  # [N, K]
            if len(logprobs):
                of_targets = self._loss(_of_targets(inputs, logprobs))[0]  # [N K]
                losses = of_targets.reshape(logprobs.shape).sum(1)
            else:  # without rows, K is unknown
                losses = inputs.trainer_logprobs * 0.0
        else:
            losses = self._loss(inputs)[0]
        self._seen.append((inputs.column(DATUM).long(), logprobs.detach(), losses.detach()))
        return losses, {}

    def output(self) -> PassOutput:
        """Return what the loss has computed."""
        logprobs: dict[int, Float32Array] = {}
        total = 0.0
        for datum, of_targets, losses in self._seen:
            total += float(losses.double().sum())
            numbers, values = datum.cpu().numpy(), of_targets.float().cpu().numpy()
            for number in np.unique(numbers):  # the tokens of a row are in order
                logprobs[int(number)] = values[numbers == number].reshape(-1)
        return PassOutput(logprobs=logprobs, loss=total)


def _of_targets(inputs: LossInputs, logprobs: torch.Tensor) -> LossInputs:
    """Return the inputs of a loss about all targets [N K] as if each were a token of its own.

    `logprobs` [N, K] are those of the targets. A single loss over N K elements needs a few autograd
    nodes; a loss per target would need several for each of K.
    """

    def flat(values: torch.Tensor) -> torch.Tensor:
        wide = values if values.ndim == 2 else values[:, None]  # [N, K] or [N, 1]
        return wide.expand(logprobs.shape).reshape(-1)

    of_targets = logprobs.reshape(-1)
    return LossInputs(
        trainer_logprobs=of_targets,
        proximal_logprobs=of_targets.detach(),
        sampler_logprobs=flat(inputs.sampler_logprobs),
        advantages=flat(inputs.advantages),
        entropy=flat(inputs.entropy),
        staleness=flat(inputs.staleness),
        row_index=flat(inputs.row_index),
        columns={name: flat(one) for name, one in inputs.columns.items() if name != TARGETS},
    )


def summed(group_size: int, group_num_tokens: int, row_num_tokens: int) -> tuple[float, float]:
    """Return the weights of an aggregation that divides by nothing.

    `optim_step` leaves the denominator out.
    """
    return 1.0, 1.0


class PrimitiveEngine(FSDPEngine):
    """A rank of a trainer. All ranks get the same calls, each with its share of the rows.

    Raises:
        InvalidValue: The precision is float16, or the layout has pipeline stages.
    """

    def __init__(self, **options: Any) -> None:
        if options["model"].dtype == "float16":
            raise InvalidValue(
                "model.dtype",
                "float16",
                rule="it scales the loss and may compute a batch twice, which commands of a client "
                "do not allow",
                fix="Use bfloat16 or float32.",
            )
        if options["trainer"].parallel.pp > 1:
            raise InvalidValue(
                "trainer.layout",
                options["trainer"].layout,
                rule="pipeline stages cannot return log-probabilities to a client",
                fix="Use dp, tp, cp or ep.",
            )
        super().__init__(**options)

    def forward_backward(
        self, rows: Sequence[TrainRow], loss: LossFn, *, num_targets: int, backward: bool
    ) -> PassOutput:
        """Add the gradient of the loss, or only compute it without `backward`. A collective.

        Raises:
            FloatingPointError: Log-probabilities, or the loss, are not finite, on all ranks.
                Without this check the answer would be a loss of NaN or infinity.
        """
        recording = RecordingLoss(loss, num_targets)
        if backward:
            self._accumulate(Objective(self.role, recording, summed), [rows])
        else:
            self._evaluate(rows, recording)
        output = recording.output()
        is_finite = all(np.isfinite(values).all() for values in output.logprobs.values())
        if self.ranks.max(int(not is_finite)):
            raise FloatingPointError(
                f"the log-probabilities are not finite: {self._cause_in_weights()} Load a "
                "checkpoint."
            )
        if self.ranks.max(int(not np.isfinite(output.loss))):
            raise FloatingPointError(
                f"the loss is {output.loss}, although all log-probabilities are finite. Look for "
                "huge weights, advantages or settings of the loss."
            )
        return output

    def _cause_in_weights(self) -> str:
        """Return a sentence about the weights for a message. A collective."""
        after = f"after optimizer step {self.policy_version}"
        parameters = self.parameters.values()
        is_finite = all(bool(torch.isfinite(local_part(one.detach())).all()) for one in parameters)
        if self.ranks.max(int(not is_finite)):
            return f"the weights are not finite {after}."
        return f"the weights are finite but too large {after}."

    def _evaluate(self, rows: Sequence[TrainRow], loss: Any) -> None:
        role = self.role
        columns = role.columns(loss, rows)
        passes = split_passes(
            rows, self._config.micro_batch_tokens, packed=role.packs, shares=role.shares
        )
        passes += [[]] * (self.ranks.max(len(passes)) - len(passes))
        try:
            with torch.no_grad():
                for chosen in passes:
                    batch = role.collate([rows[index] for index in chosen], columns)
                    role.learn(loss, batch, torch.zeros_like(batch.policy_versions))
        finally:
            free_gathered(role.network)

    def discard(self) -> None:
        """Discard the accumulated gradients."""
        self._begin_update()

    def optim_step(self, step: AdamStep) -> dict[str, float]:
        """Take a step of AdamW on the sum of the gradients. A collective.

        The result is the same on all ranks. After an error the weights are unchanged and the
        gradient is discarded.

        Raises:
            InvalidValue: There is no gradient.
            FloatingPointError: The gradient is not finite.
        """
        parameters = list(self.parameters.values())
        sums = self._reduced(parameters)
        if sums.denominator <= 0:
            self._begin_update()
            raise InvalidValue(
                "optim_step",
                rule="there is no gradient",
                fix="Call forward_backward before, with data of its own.",
            )
        norm = sums.grad_norm * sums.denominator
        if not np.isfinite(norm):
            cause = self._cause_in_weights()
            self._begin_update()
            if "are not finite" in cause:
                raise FloatingPointError(
                    f"the gradient's norm is {norm}: {cause} Load a checkpoint."
                )
            raise FloatingPointError(
                f"the gradient's norm is {norm}. Look for huge weights or advantages, or lower the "
                "learning rate. The gradient is discarded, and the weights are unchanged."
            )
        scale = 1.0
        if 0 < step.grad_clip_norm < norm:
            scale = step.grad_clip_norm / norm
        scale_gradients(parameters, scale / self._scale.value)
        for group in self.optimizer.param_groups:
            is_matrix = all(one.ndim >= 2 for one in group["params"])
            group["lr"] = step.learning_rate
            group["betas"] = (step.beta1, step.beta2)
            group["eps"] = step.eps
            group["weight_decay"] = step.weight_decay if is_matrix else 0.0
        self.optimizer.step()
        self._begin_update()
        self.policy_version += 1
        return {
            "grad_norm": norm,
            "learning_rate": step.learning_rate,
            "policy_version": float(self.policy_version),
        }

    def load_weights(self, directory: Path, *, optimizer: bool) -> None:
        """Load a saved state. Without `optimizer`, its moments are reset."""
        self.load(directory)
        if not optimizer:
            self.reset_optimizer()

    def publish_as(self, number: int, nodes: Sequence[str]) -> WeightManifest | None:
        """Publish the weights under a number of the caller. A collective."""
        return self._require_publisher().publish(number, nodes)

    def save_for_sampler(self, directory: Path) -> None:
        """Save adapters as PEFT loads them, or the whole model. A collective.

        rlsys.tinker_server.saved_weights reads it.

        Raises:
            OSError: The disk refuses, on rank 0, which writes.
        """
        if self._adapters is None:
            self.export(directory / WHOLE_MODEL)
            return
        trained = {name: whole(tensor).cpu() for name, tensor in self._tensors.items()}
        if self.ranks.rank == 0:
            self._adapters.save(trained, directory)
