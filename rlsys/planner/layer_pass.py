"""Seconds of a layer's forward or backward pass by part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pass:
    """Seconds of forward and backward of one layer or stage, by part."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """Sum of all parts."""
        return (
            self.products
            + self.attention
            + self.traffic
            + self.tensor_parallel
            + self.context_parallel
            + self.expert_parallel
            + self.host
        )

    def add(self, other: Pass, times: float = 1.0) -> None:
        """Add `times` x another pass."""
        for name in Pass.__slots__:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
