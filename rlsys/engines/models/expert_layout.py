"""The form of a token's record of experts, which sampler, store and trainer share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

REPLAY, LEAVE_OUT = "rollout.replay_routing", "Leave the option out."


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Record of a token's routing: L·K expert indices, layer by layer."""

    num_layers: int
    num_chosen: int
    num_experts: int

    @property
    def width(self) -> int:
        """L·K, the indices per token."""
        return self.num_layers * self.num_chosen

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest integer type that holds all expert indices."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.int16)
