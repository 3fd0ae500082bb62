"""The factor of the loss that keeps its gradients within the range of float16.

    loss · scale ─► backward in float16 ─► gradients · scale, summed in float32 ─► ÷ scale ─► AdamW

float16 has numbers from 6e-8 to 65,504. Gradients of single tokens are small for it, and sums over
a pass may be large. An update with infinite gradients is computed again with a lower scale, so that
none is lost. The scale then grows again (as in Mixed Precision Training, 1710.03740): too low a
scale loses digits of small gradients, too high a scale costs time. The size of gradients depends on
the aggregation (a mean over a group of many tokens makes them small), so at first the scale grows
with every update, until it is too high.

Other precisions have the range of float32, and their scale is 1.
"""

from __future__ import annotations

import torch

# Scale of the first update.
FIRST = 2.0**4
# Below this scale, infinite gradients have another cause.
LOWEST = 2.0**-14
# Larger than FACTOR, so that an update is rarely computed more than twice; float16's range allows
# it.
DIVISOR = 16.0
FACTOR = 2.0
UPDATES_TO_CLIMB = 100


class LossScale:
    """Loss scale of one trainer, equal on all ranks because they see the same reduced gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.adapts = dtype is torch.float16
        # The scale, updates since it changed, number of reductions: a tensor, so that checkpoints
        # and snapshots include it.
        self._state = torch.tensor([FIRST if self.adapts else 1.0, 0, 0], dtype=torch.float64)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The state, to be changed in place; empty if the scale is constant."""
        return {"loss_scale": self._state} if self.adapts else {}

    @property
    def value(self) -> float:
        """The current scale."""
        return float(self._state[0])

    @property
    def num_lowered(self) -> int:
        """Number of reductions since the run began."""
        return int(self._state[2])

    def lower(self) -> bool:
        """Lower the scale after gradients that are not finite; return False if that cannot help."""
        if not self.adapts or self.value <= LOWEST:
            return False
        self._state[0] /= DIVISOR
        self._state[1] = 0
        self._state[2] += 1
        return True

    def updated(self) -> None:
        """Count an update with finite gradients, and raise the scale if it is time."""
        self._state[1] += 1
        was_too_high = self.num_lowered > 0
        if self.adapts and self._state[1] >= (UPDATES_TO_CLIMB if was_too_high else 1):
            self._state[0] *= FACTOR
            self._state[1] = 0
