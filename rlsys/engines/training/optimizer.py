"""AdamW, its learning-rate schedule, and the scaling of gradients.

Gradients arrive as sums over all tokens; one factor normalises and clips them. Moments may be kept
in half the bytes, or in host memory between updates:

    stored moments ─► a piece, float32, on the device ─► AdamW ─► rounded ─► stored again
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlsys.config import TrainerConfig
from rlsys.engines.training.fused_adamw import SEEDS_PER_PIECE, AdamWCoefficients, update
from rlsys.reallocation.shards import local_box, local_part

MOMENTS = ("exp_avg", "exp_avg_sq")


# Elements of a parameter that are updated at a time if moments are not stored as they are computed.
# On a GPU a piece limits the memory of offloaded moments and the number of kernel launches.
PIECE = 1 << 22
GPU_PIECE = 1 << 26


class AdamW(torch.optim.AdamW):
    """torch's AdamW with moments of `dtype`, in host memory if `offload` is set.

    Moments are rounded to bfloat16 stochastically (2010.06192), which is right on average: small
    changes of a moment, below one part in 256, would be lost by rounding to nearest. The random
    numbers depend on step, name of the parameter and place of the rank's part in it. So parameters
    and parts are rounded independently, and ranks with copies of the same weights keep the same
    moments.

    Args:
        parameters: Parameters by Hugging Face name, with their final sharding. A copy of a
            parameter has the same name on every rank.
        groups: Groups of these parameters, as for torch's AdamW.
        dtype: Precision of the moments.
        offload: Whether moments are in host memory between updates.
        **options: Options of torch's AdamW.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Any,
        *,
        dtype: torch.dtype,
        offload: bool,
        **options: Any,
    ) -> None:
        super().__init__(groups, fused=True, **options)
        self._shards = {one: f"{name} {local_box(one)}" for name, one in parameters.items()}
        self._dtype = dtype
        devices = {one.device.type for group in self.param_groups for one in group["params"]}
        self._offload = offload and devices != {"cpu"}
        self._by_pieces = self._offload or dtype is not torch.float32

    def moments(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return a parameter's moments and number of steps, created as zeros the first time."""
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
        """Update all parameters that have gradients."""
        if not self._by_pieces:
            super().step()
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, parameter.grad)
        if self._offload:
            torch.cuda.synchronize()  # moments in host memory may be read after this

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
        step = int(moments["step"])
        seed = _rounding_seed(self._shards[parameter], step)
        on_device = self._update_on_gpu if own[0].is_cuda else self._update_on_cpu
        on_device(group, step, seed, own)

    def _update_on_cpu(
        self, group: dict[str, Any], step: int, seed: int, own: list[torch.Tensor]
    ) -> None:
        """Update a parameter; `own` has its weights, gradient and moments."""
        chance = torch.Generator().manual_seed(seed)
        beta1, beta2 = group["betas"]
        pieces = [_pieces(one, PIECE) for one in own]
        for weights, gradient, *kept in zip(*pieces, strict=True):
            computed = [one.float() for one in kept]
            first, second = ([one] for one in computed)
            torch._fused_adamw_(
                [weights],
                [gradient],
                first,
                second,
                [],
                [torch.tensor(float(step))],
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

    def _update_on_gpu(
        self, group: dict[str, Any], step: int, seed: int, own: list[torch.Tensor]
    ) -> None:
        """Update a parameter as `_update_on_cpu` does.

        Offloaded moments move to the device and back piece by piece, without waiting.
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


def _rounding_seed(shard: str, step: int) -> int:
    """Return the seed of the rounding of a shard's moments, in [0, 2^30)."""
    digest = hashlib.blake2b(f"{step} {shard}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 2


def _pieces(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """Return views of at most `size` elements each, or of one row."""
    if not tensor.ndim:
        return (tensor,)
    per_row = max(1, tensor.numel() // len(tensor))
    pieces: tuple[torch.Tensor, ...] = tensor.split(max(1, size // per_row))
    return pieces


def _rounded(exact: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Return finite float32 numbers as bfloat16, rounded stochastically. Overwrites `exact`."""
    bits = exact.view(torch.int32)
    draw = torch.empty_like(bits).random_(0, 1 << 16, generator=chance)
    # bfloat16 drops the lower 16 bits: adding a random number carries with the right probability.
    bits.add_(draw).bitwise_and_(-1 << 16)
    return exact.to(torch.bfloat16)


def build_adamw(parameters: Mapping[str, nn.Parameter], config: TrainerConfig) -> AdamW:
    """Return an AdamW whose weight decay applies to matrices only, not to norms and biases.

    `parameters` are by Hugging Face name.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters.values():
        # One operation updates a group, whose tensors must be sharded in the same way.
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return AdamW(
        parameters,
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
    """Return the rate of optimizer step `step` = 0 .. num_steps − 1.

    The warm-up rises linearly and is never 0; the last step has the final rate.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    first = config.warmup_steps  # the last step with the peak rate
    if config.schedule == "wsd":
        first = max(first, num_steps - 1 - round(config.decay_frac * num_steps))
    progress = (step - first) / max(num_steps - 1 - first, 1)
    progress = min(max(progress, 0.0), 1.0)
    share = (1 - math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else progress
    return config.learning_rate * (1 - (1 - config.final_lr_frac) * share)


def squared_norm(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return Σ g² over this rank's gradients, float64 on the CPU, shape []."""
    gradients = _gradients(parameters)
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum().cpu()


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply this rank's gradients by a factor, in place."""
    gradients = _gradients(parameters)
    if gradients:
        torch._foreach_mul_(gradients, factor)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    return [gradient for gradient in gradients if gradient.numel()]
