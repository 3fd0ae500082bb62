"""Sums, means and maxima over the tokens of each rollout, at each of its tokens.

In: values [N] and row_index [N] int64 (0 <= row_index < N: a rollout has at least one token).
Out: [N].
"""

from __future__ import annotations

import torch


def sum_over_rollout(values: torch.Tensor, row_index: torch.Tensor) -> torch.Tensor:
    """Return the sum over the token's rollout, with its gradient."""
    return torch.zeros_like(values).index_add(0, row_index, values)[row_index]


def mean_over_rollout(values: torch.Tensor, row_index: torch.Tensor) -> torch.Tensor:
    """Return the mean over the token's rollout, with its gradient."""
    num_tokens = sum_over_rollout(torch.ones_like(values), row_index)
    return sum_over_rollout(values, row_index) / num_tokens


def max_over_rollout(values: torch.Tensor, row_index: torch.Tensor) -> torch.Tensor:
    """Return the maximum over the token's rollout."""
    found = torch.zeros_like(values).scatter_reduce(
        0, row_index, values, "amax", include_self=False
    )
    return found[row_index]
