"""An AdamW update of a piece of a parameter, with moments of any precision, in one kernel.

    weights, gradient, first, second moment [N] ─► AdamW in float32 ─► weights; moments rounded

torch compiles it to one kernel on GPUs. torch's own fused AdamW needs float32 moments, so each
update of bfloat16 moments would read and write them several more times. Moments are rounded to
bfloat16 stochastically (2010.06192). A hash of position and seed provides the randomness, so that
ranks with copies of the same weights and one seed keep the same moments.

Decoupled weight decay and bias correction follow 1711.05101, algorithm 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SEEDS_PER_PIECE = 2  # one for each moment


@dataclass(frozen=True, kw_only=True)
class AdamWCoefficients:
    """Hyperparameters of an update. `step` counts from 1."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    def on(self, device: torch.device) -> torch.Tensor:
        """Return them as a tensor, so that a new learning rate needs no recompilation."""
        return torch.tensor(
            [
                self.beta1,
                self.beta2,
                self.eps,
                1 - self.rate * self.weight_decay,
                self.rate / (1 - self.beta1**self.step),
                (1 - self.beta2**self.step) ** 0.5,
            ],
            dtype=torch.float32,
            device=device,
        )


def update(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    coefficients: torch.Tensor,
    seed: torch.Tensor,
) -> None:
    """Update weights and both moments in place.

    Args:
        weights: [N] float32.
        gradient: [N].
        first: The mean of gradients, [N] float32 or bfloat16.
        second: The mean of their squares, as `first`.
        coefficients: Coefficients.on(device).
        seed: [] int64, below 2^31. The update uses it and the next integer.
    """
    (_compiled() if weights.is_cuda else adamw)(
        weights, gradient, first, second, coefficients, seed
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(adamw, dynamic=True, fullgraph=True)


def adamw(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    coefficients: torch.Tensor,
    seed: torch.Tensor,
) -> None:
    """Compute `update`."""
    beta1, beta2, eps, kept, rate, correction = coefficients.unbind()
    slope = gradient.float()
    mean = slope + (first.float() - slope) * beta1
    square = slope * slope + (second.float() - slope * slope) * beta2
    change = rate * mean / (square.sqrt() / correction + eps)
    weights.copy_(weights * kept - change)
    first.copy_(_rounded(mean, first.dtype, seed))
    second.copy_(_rounded(square, second.dtype, seed + 1))


def _rounded(exact: torch.Tensor, dtype: torch.dtype, seed: torch.Tensor) -> torch.Tensor:
    """Return finite float32 numbers [N] in `dtype`, rounded stochastically to bfloat16.

    A number becomes either neighbour, with a probability that grows with its nearness.
    """
    if dtype is torch.float32:
        return exact
    draw = _hashed(torch.arange(len(exact), device=exact.device), seed) & 0xFFFF
    # bfloat16 drops the lower 16 bits: a random number added to them carries with that probability.
    bits = (exact.view(torch.int32).long() + draw) & ~0xFFFF
    return bits.to(torch.int32).view(torch.float32).to(dtype)


def _hashed(places: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return 32 pseudo-random bits for each place [N] int64 (the finalizer of MurmurHash3)."""
    bits = (places + seed * 0x9E3779B1) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
