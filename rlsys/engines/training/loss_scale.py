"""The factor of the loss that keeps its gradients within float16.

    loss · scale ─► backward in float16 ─► gradients · scale, summed in float32 ─► ÷ scale ─► AdamW

float16 begins at 6e-8 and ends at 65,504; gradients of single tokens are small for it, and sums
over a pass may be large. An update whose gradients are infinite is computed again with a lower
scale, so that none is lost. The scale then climbs again (as in Mixed Precision Training,
1710.03740): too low a scale costs digits of small gradients, and too high a one costs time. How
small they are goes by the aggregation (a mean over a group of many tokens gives each of them
little), so that at first the scale climbs with every update, until it is too high.

Other precisions have the range of float32, and their scale is 1.
"""

from __future__ import annotations

import torch

# For the first update, of sums over tokens; a mean over n of them takes n times this.
FIRST = 2.0**4
# Gradients that are infinite even so are so for another reason than the scale.
LOWEST = 2.0**-14
# Down at once by more than it climbed, so that an update is rarely computed twice, and hardly ever
# three times; float16 has room for it.
DIVISOR = 16.0
FACTOR = 2.0
UPDATES_TO_CLIMB = 100


class LossScale:
    """Of one trainer; equal on all of its ranks, because they are told the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.adapts = dtype is torch.float16
        # The scale, updates since it changed, and how often it was lowered: a tensor, so that
        # checkpoints and snapshots hold it as they hold others.
        self._state = torch.tensor([FIRST if self.adapts else 1.0, 0, 0], dtype=torch.float64)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its state, in place, where it has one."""
        return {"loss_scale": self._state} if self.adapts else {}

    @property
    def value(self) -> float:
        return float(self._state[0])

    @property
    def num_lowered(self) -> int:
        """Since the run began."""
        return int(self._state[2])

    def lower(self) -> bool:
        """After gradients that are not finite. False if the scale is not why."""
        if not self.adapts or self.value <= LOWEST:
            return False
        self._state[0] /= DIVISOR
        self._state[1] = 0
        self._state[2] += 1
        return True

    def updated(self) -> None:
        """After gradients that were finite."""
        self._state[1] += 1
        was_too_high = self.num_lowered > 0
        if self.adapts and self._state[1] >= (UPDATES_TO_CLIMB if was_too_high else 1):
            self._state[0] *= FACTOR
            self._state[1] = 0
