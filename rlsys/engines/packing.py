"""Rows of different lengths as one row without padding, and back for what looks along a row.

    rows of lengths [B] ──► one row of N tokens ──► norms, projections, MLP: N tokens, not B·L
                                   pad │ ▲ unpad
                                       ▼ │
                                attention: [B, ..., L, ...]

Shape legend: B rows, L tokens of the longest, N = Σ lengths, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

IntArray = npt.NDArray[np.int64]


class Packing:
    """Where each token of the packed row stands among the padded rows."""

    def __init__(self, lengths: IntArray, device: torch.device | str = "cpu") -> None:
        self.longest = int(lengths.max())
        row, column = ragged_places(lengths)
        starts = np.cumsum(lengths) - lengths
        # What stands at padding is never looked at; a row's last token is as good as any.
        token = starts[:, None] + np.minimum(
            np.arange(self.longest), lengths[:, None] - 1
        )  # [B, L]
        self.position_ids = torch.from_numpy(column[None]).to(device)  # [1, N]
        self._num_rows = len(lengths)
        self._is_full = len(row) == len(lengths) * self.longest
        self._places = torch.from_numpy(row * self.longest + column).to(device)  # [N] into B·L
        self._tokens = torch.from_numpy(token.flatten()).to(device)  # [B·L] into N

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """[1, H, N, D] to [B, H, L, D]; no gradient may come from the padding."""
        tokens: torch.Tensor = packed[0].transpose(0, 1)  # [N, H, D]
        if not self._is_full:
            tokens = _Pad.apply(tokens, self._tokens, self._places)
        padded = tokens.reshape(self._num_rows, self.longest, *tokens.shape[1:])
        return padded.transpose(1, 2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[B, L, H, D] to [1, N, H, D]."""
        tokens = padded.flatten(0, 1)
        return (tokens if self._is_full else _Unpad.apply(tokens, self._places))[None]


class _Pad(torch.autograd.Function):
    """A gather whose gradient is a gather too: of each token, one copy has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, source: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class _Unpad(torch.autograd.Function):
    """A gather of places that differ, so that its gradient needs no sums."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_places = len(padded)
        return padded.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        padded = grad.new_zeros(ctx.num_places, *grad.shape[1:])
        return padded.index_copy_(0, places, grad.contiguous()), None


def ragged_places(lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Row and column of each element of ragged rows that lie one after another, [Σ lengths]."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - starts[row]
