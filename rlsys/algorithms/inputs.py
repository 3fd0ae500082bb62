"""What a loss is: a function of `LossInputs`, which the training engine makes for each forward pass
of the trainer, and calls the loss with.

Shape legend: N completion tokens with loss mask 1, of all rollouts of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Flat tensors over the N completion tokens, with loss mask 1, of one forward pass.

    All tokens of a rollout lie in the same pass. N may be 0: a rank without rows takes part in the
    collectives of the others. A log-probability may be −inf; `rlsys.algorithms.ratios` has what
    stays finite there.
    """

    trainer_logprobs: torch.Tensor  # [N] float32, carries the gradient
    proximal_logprobs: torch.Tensor  # [N] the trainer's policy at the start of the step, detached
    sampler_logprobs: torch.Tensor  # [N]
    advantages: torch.Tensor  # [N]
    entropy: torch.Tensor  # [N] exact, of the trainer's distribution, in nats; carries its gradient
    staleness: torch.Tensor  # [N] int64: policy_version of the trainer less that of the token
    row_index: torch.Tensor  # [N] int64, 0 <= row_index < N: which rollout a token belongs to
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [N]: what it `needs`


# Per-token loss [N] and named per-token metrics [N]; metrics are averaged over the global batch.
TokenLoss = tuple[torch.Tensor, dict[str, torch.Tensor]]
LossFn = Callable[[LossInputs], TokenLoss]


def needs_of(loss: object) -> tuple[str, ...]:
    """Names of the columns that a loss asks for beyond the fields of its inputs."""
    return tuple(getattr(loss, "needs", ()))
