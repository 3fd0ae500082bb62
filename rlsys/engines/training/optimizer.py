"""AdamW, its learning rate over the run, and what a step does to gradients before it.

Gradients arrive as sums over all tokens; one factor normalises and clips them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlsys.config import TrainerConfig
from rlsys.layout.holdings import local_part


def build_adamw(parameters: Sequence[nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and biases have no scale to be pulled back from."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        # One operation updates a group, and takes tensors that lie on the ranks alike.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": config.weight_decay if is_matrix else 0.0}
            for (is_matrix, _), group in groups.items()
        ],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=True,
    )


def learning_rate(config: TrainerConfig, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` = 0 .. num_steps − 1.

    The warm-up climbs in equal parts and never stands at 0, so no step is spent on nothing; the
    last step has the final rate.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(num_steps - 1 - config.warmup_steps, 1)
    progress = min(progress, 1.0)
    share = progress if config.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return config.learning_rate * (1 - (1 - config.final_lr_frac) * share)


def squared_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Σ g² over this rank's gradients, float64 on the CPU, shape []."""
    gradients = _gradients(parameters)
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum().cpu()


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    gradients = _gradients(parameters)
    if gradients:
        torch._foreach_mul_(gradients, factor)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    return [gradient for gradient in gradients if gradient.numel()]
