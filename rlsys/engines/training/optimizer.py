"""AdamW, its learning rate over the run, and what a step does to gradients before it.

Gradients arrive as sums over all tokens; one factor normalises and clips them. Moments may be kept
in half the bytes, or in the host's memory while they are not used:

    moments as they are kept ─► a piece, float32, on the device ─► AdamW ─► rounded ─► back
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlsys.config import TrainerConfig
from rlsys.engines.training.fused_adamw import SEEDS_PER_PIECE, AdamWCoefficients, update
from rlsys.reallocation.shards import local_part

MOMENTS = ("exp_avg", "exp_avg_sq")


# Numbers of a parameter that are updated at a time, where moments are kept otherwise than computed.
# On a GPU a piece bounds what moments in the host's memory take there, and its kernels' launches.
PIECE = 1 << 22
GPU_PIECE = 1 << 26


class AdamW(torch.optim.AdamW):
    """torch's, with moments of `dtype`; with `offload`, in the host's memory.

    What bfloat16 cannot hold is rounded up or down by chance, so that it is right on average
    (stochastic rounding, 2010.06192): a change of a moment of less than a part in 256, which the
    nearest number would lose, counts in the long run. The draw follows from the number of the step
    and the shape, so that ranks with copies of the same weights keep the same moments.
    """

    def __init__(self, groups: Any, *, dtype: torch.dtype, offload: bool, **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        self._dtype = dtype
        devices = {one.device.type for group in self.param_groups for one in group["params"]}
        self._offload = offload and devices != {"cpu"}
        self._by_pieces = self._offload or dtype is not torch.float32

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """A parameter's, and its number of steps; made as zeros where there are none yet."""
        moments: dict[str, torch.Tensor] = self.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            where: dict[str, Any] = {}
            if self._offload:
                where = {"device": "cpu", "pin_memory": True}
            for name in MOMENTS:
                moments[name] = torch.zeros_like(parameter, dtype=self._dtype, **where)
        return moments

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if not self._by_pieces:
            super().step()
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)
        if self._offload:
            torch.cuda.synchronize()  # moments in host memory may be read from now on

    def _update(
        self, group: dict[str, Any], parameter: nn.Parameter, gradient: torch.Tensor
    ) -> None:
        moments = self.moments(parameter)
        moments["step"] += 1
        own = [
            local_part(one) for one in (parameter, gradient, *(moments[name] for name in MOMENTS))
        ]
        if not own[0].numel():
            return
        if own[0].is_cuda:
            self._update_on_gpu(group, int(moments["step"]), own)
            return
        drawn_for = f"{int(moments['step'])} {tuple(own[0].shape)}"
        chance = torch.Generator(parameter.device)
        chance.manual_seed(zlib.crc32(drawn_for.encode()))  # on the CPU a seed has 32 bits
        beta1, beta2 = group["betas"]
        pieces = [_pieces(one, PIECE) for one in own]
        for weights, its_gradient, *kept in zip(*pieces, strict=True):
            computed = [one.float() for one in kept]
            first, second = ([one] for one in computed)
            torch._fused_adamw_(
                [weights],
                [its_gradient],
                first,
                second,
                [],
                [moments["step"]],
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for one, result in zip(kept, computed, strict=True):
                if one is not result:
                    one.copy_(result if one.dtype is torch.float32 else _rounded(result, chance))

    def _update_on_gpu(self, group: dict[str, Any], step: int, own: list[torch.Tensor]) -> None:
        """Update a parameter of which `own` has weights, gradient and moments. Moments in the
        host's memory come to the device and go back piece by piece, without waiting.
        """
        beta1, beta2 = group["betas"]
        device = own[0].device
        coefficients = AdamWCoefficients(
            rate=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
        ).on(device)
        # The same on ranks with copies of the same weights.
        seed = zlib.crc32(f"{step} {tuple(own[0].shape)}".encode()) >> 2
        pieces = zip(*(_pieces(one, GPU_PIECE) for one in own), strict=True)
        for number, (weights, gradient, *kept) in enumerate(pieces):
            moments = [one.to(device, non_blocking=True) for one in kept]
            update(
                weights.view(-1),
                gradient.reshape(-1),
                moments[0].view(-1),
                moments[1].view(-1),
                coefficients,
                torch.tensor(seed + SEEDS_PER_PIECE * number, device=device),
            )
            for one, updated in zip(kept, moments, strict=True):
                if one is not updated:
                    one.copy_(updated, non_blocking=True)


def _pieces(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Return views of at most `size` numbers each, or of one row."""
    if not tensor.ndim:
        return (tensor,)
    per_row = max(1, tensor.numel() // len(tensor))
    pieces: tuple[torch.Tensor, ...] = tensor.split(max(1, size // per_row))
    return pieces


def _rounded(exact: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """`exact`, finite float32, as bfloat16: of the two numbers around it the farther one by as much
    chance as it is near. Overwrites `exact`.
    """
    bits = exact.view(torch.int32)
    draw = torch.empty_like(bits).random_(0, 1 << 16, generator=chance)
    # The lower half of the bits is what bfloat16 lacks: adding to it carries over by that chance.
    bits.add_(draw).bitwise_and_(-1 << 16)
    return exact.to(torch.bfloat16)


def build_adamw(parameters: Sequence[nn.Parameter], config: TrainerConfig) -> AdamW:
    """Weight decay on matrices only: norms and biases have no scale to be pulled back from."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        # One operation updates a group, and takes tensors that lie on the ranks alike.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return AdamW(
        [
            {"params": group, "weight_decay": config.weight_decay if is_matrix else 0.0}
            for (is_matrix, _), group in groups.items()
        ],
        dtype=getattr(torch, config.moments_dtype),
        offload=config.offloads_moments,
        lr=config.learning_rate,
        betas=config.adam_betas,
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
