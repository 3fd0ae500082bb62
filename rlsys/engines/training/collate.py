"""From ragged rows to the tensors of one forward pass.

    rows ──► passes of at most max_tokens, alike in length ──► Batch, right-padded

Shape legend: B rows, L longest input of the pass, N completion tokens with loss mask 1.

The last token of a rollout is never an input: nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rlsys.types import TrainRow


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one forward pass; what a causal model computes at padding is never looked at."""

    input_ids: torch.Tensor  # [B, L] int64
    positions: torch.Tensor  # [N] int64, into B·L: where each target is predicted
    targets: torch.Tensor  # [N] int64
    sampler_logprobs: torch.Tensor  # [N] float32
    advantages: torch.Tensor  # [N] float32
    policy_versions: torch.Tensor  # [N] int64
    row_index: torch.Tensor  # [N] int64


def input_length(row: TrainRow) -> int:
    return len(row.prompt_token_ids) + len(row.token_ids) - 1


def split_passes(rows: Sequence[TrainRow], max_tokens: int) -> list[list[int]]:
    """Indices of rows, grouped so that padded passes hold at most `max_tokens` input tokens.

    Rows lie next to others of their length, longest first, so that padding wastes little and memory
    runs out at the beginning or not at all. A single longer row gets a pass of its own.
    """
    order = sorted(range(len(rows)), key=lambda index: -input_length(rows[index]))
    passes: list[list[int]] = []
    longest = 0
    for index in order:
        if not passes or (len(passes[-1]) + 1) * longest > max_tokens:
            passes.append([])
            longest = input_length(rows[index])
        passes[-1].append(index)
    return passes


def collate(rows: Sequence[TrainRow], device: torch.device | str = "cpu") -> Batch:
    """One pass. No rows give one input token whose output nobody reads.

    Raises ValueError for a row without a prompt: its first token is predicted from nothing.
    """
    if not rows:
        return _empty_batch(device)
    prompt_lengths = np.array([len(row.prompt_token_ids) for row in rows])
    lengths = np.array([len(row.token_ids) for row in rows])
    if not prompt_lengths.all():
        raise ValueError(
            f"rollout of group {rows[int(prompt_lengths.argmin())].group_id} has an empty prompt, "
            "so nothing predicts its first token; begin prompts with at least one token, such as "
            "<bos>."
        )
    longest = int((prompt_lengths + lengths).max()) - 1
    row, column = _ragged_places(prompt_lengths + lengths)
    tokens = _concatenate([part for row in rows for part in (row.prompt_token_ids, row.token_ids)])
    is_input = column < (prompt_lengths + lengths - 1)[row]
    input_ids = np.zeros((len(rows), longest), np.int64)
    input_ids[row[is_input], column[is_input]] = tokens[is_input]

    row, column = _ragged_places(lengths)
    positions = row * longest + prompt_lengths[row] - 1 + column
    trained = _concatenate([row.loss_mask for row in rows]).astype(np.bool_)

    def flat(parts: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(_concatenate(parts)[trained].astype(dtype)).to(device)

    return Batch(
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.from_numpy(positions[trained]).to(device),
        targets=flat([row.token_ids for row in rows], np.int64),
        sampler_logprobs=flat([row.sampler_logprobs for row in rows], np.float32),
        advantages=flat([row.advantages for row in rows], np.float32),
        policy_versions=flat([row.policy_versions for row in rows], np.int64),
        row_index=torch.from_numpy(row[trained]).to(device),
    )


def _empty_batch(device: torch.device | str) -> Batch:
    no_index = torch.zeros(0, dtype=torch.int64, device=device)
    no_value = torch.zeros(0, device=device)
    return Batch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device),
        positions=no_index,
        targets=no_index,
        sampler_logprobs=no_value,
        advantages=no_value,
        policy_versions=no_index,
        row_index=no_index,
    )


def _ragged_places(
    lengths: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column of each element of ragged rows that lie one after another, [Σ lengths]."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - starts[row]


def _concatenate(parts: list[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts)
