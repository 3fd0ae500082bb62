"""Sums, means and maxima over the tokens of each rollout, given back to each of its tokens.

In: values [N] and row_index [N] int64 (0 <= row_index < N: a rollout has at least one token).
Out: [N]. Gradients flow through.
"""

from __future__ import annotations

import torch


def sum_over_rollout(values: torch.Tensor, row_index: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(values).index_add(0, row_index, values)[row_index]


def mean_over_rollout(values: torch.Tensor, row_index: torch.Tensor) -> torch.Tensor:
    num_tokens = sum_over_rollout(torch.ones_like(values), row_index)
    return sum_over_rollout(values, row_index) / num_tokens


def max_over_rollout(values: torch.Tensor, row_index: torch.Tensor) -> torch.Tensor:
    """Without a gradient."""
    found = torch.zeros_like(values).scatter_reduce(
        0, row_index, values, "amax", include_self=False
    )
    return found[row_index]
