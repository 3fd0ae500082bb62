"""What a training engine offers, on each of its ranks.

Every rank receives the same sequence of calls; a micro-batch is already split by data-parallel
rank. Gradients accumulate unnormalised; `optimizer_step` divides by the denominator summed over all
micro-batches and ranks, so the result depends neither on the number of ranks nor of micro-batches.

    accumulate(micro_batch) × n ──► optimizer_step() ──► publish()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rlsys.types import Float32Array, MicroBatch, WeightManifest


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Flat tensors over the N completion tokens of a micro-batch whose loss mask is 1."""

    trainer_logprobs: torch.Tensor  # [N] float32, carries the gradient
    proximal_logprobs: torch.Tensor  # [N] the trainer's policy at the start of the step, detached
    sampler_logprobs: torch.Tensor  # [N]
    advantages: torch.Tensor  # [N]
    entropy: torch.Tensor  # [N] exact entropy of the trainer's distribution, in nats
    staleness: torch.Tensor  # [N] int64: policy_version of the trainer less that of the token
    row_index: torch.Tensor  # [N] int64: which rollout of the micro-batch a token belongs to


# Per-token loss [N] and named per-token metrics [N]; metrics are averaged over the global batch.
LossFn = Callable[[LossInputs], tuple[torch.Tensor, dict[str, torch.Tensor]]]

# (group_size, group_num_tokens, row_num_tokens) of a rollout -> (weight of each of its tokens, what
# the rollout adds to the denominator). The loss is Σ weight·loss / Σ denominator over the batch.
Aggregation = Callable[[int, int, int], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step, over the global batch; equal on every rank."""

    policy_version: int  # after the step
    metrics: dict[str, float]  # loss, grad_norm, entropy, kl/sampler_trainer, staleness/..., ...
    num_tokens: int  # trained completion tokens
    train_s: float  # time inside forward, backward and the optimizer on this rank


class TrainingEngine(Protocol):
    def sft_step(self, token_ids: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> float:
        """One supervised optimizer step on completion tokens; returns the mean loss. Does not
        count as a policy_version."""

    def accumulate(self, micro_batch: MicroBatch) -> None:
        """Forward and backward of one micro-batch; an empty one takes part in collectives only."""

    def optimizer_step(self) -> StepResult: ...

    def logprobs(self, micro_batch: MicroBatch) -> list[Float32Array]:
        """trainer_logprobs of every completion token, per row, without gradient."""

    def publish(self) -> WeightManifest:
        """Write the weights for the generation engines; a file in shared memory, by rank 0."""

    def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and RNG, all ranks together."""

    def load(self, directory: Path) -> None:
        """Inverse of save; the number of ranks may differ."""

    def export(self, directory: Path) -> None:
        """A Hugging Face checkpoint that AutoModelForCausalLM.from_pretrained loads."""
