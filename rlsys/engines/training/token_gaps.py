"""Differences of log-probabilities between sampler and trainer, token by token.

    add(rows, differences [N]) per pass ──► take() per step: one array [T] per recorded rollout

The trainer computes these differences for its metrics in any case. Here they are kept for the few
rollouts that rollouts.jsonl records. Nothing is copied from the device before `take`.

Shape legend: T completion tokens of a row, N trained tokens of all rows of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlsys.types import BoolArray, Float32Array, RolloutKey, TrainRow


class TokenGaps:
    """Differences of the recorded rollouts in the current step."""

    def __init__(self) -> None:
        self._parts: dict[RolloutKey, tuple[BoolArray, torch.Tensor]] = {}

    def add(self, rows: Sequence[TrainRow], differences: torch.Tensor) -> None:
        """Keep the differences [N] of the recorded rows of a pass.

        A rollout that several updates of a step train keeps those of its first pass.
        """
        start = 0
        for row in rows:
            is_trained = row.loss_mask.astype(np.bool_)  # a copy: the row is in shared memory
            stop = start + int(is_trained.sum())
            if row.recorded_as is not None:
                key = (row.group_id, row.recorded_as)
                self._parts.setdefault(key, (is_trained, differences[start:stop].detach().clone()))
            start = stop

    def take(self) -> dict[RolloutKey, Float32Array]:
        """Return the differences [T] of each recorded rollout, NaN for untrained tokens.

        The next step begins without any.
        """
        parts, self._parts = self._parts, {}
        return {key: _spread(mask, of_row) for key, (mask, of_row) in parts.items()}


def _spread(is_trained: BoolArray, differences: torch.Tensor) -> Float32Array:
    """Return the differences at the trained tokens of a row, and NaN at the others: [T]."""
    spread = np.full(len(is_trained), np.nan, np.float32)
    spread[is_trained] = differences.float().cpu().numpy()
    return spread
