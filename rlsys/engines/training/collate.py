"""From ragged rows to the tensors of one forward pass.

    rows ──► passes of at most max_tokens, alike in length ──► Batch, packed or right-padded
                                                               └─ the rows' columns, flat

Shape legend: B rows, L longest input of the pass, M inputs in all, N completion tokens with loss
mask 1.

The last token of a rollout is never an input: nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rlsys.engines.packing import Packing, ragged_places
from rlsys.types import Float32Array, TrainRow


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one forward pass, one after another in a single row [1, M], or right-padded [B, L];
    what a causal model computes at padding is never looked at."""

    input_ids: torch.Tensor  # [1, M] or [B, L] int64
    packing: Packing | None  # of a single row
    positions: torch.Tensor  # [N] int64, into the flattened input: where each target is predicted
    targets: torch.Tensor  # [N] int64
    policy_versions: torch.Tensor  # [N] int64
    row_index: torch.Tensor  # [N] int64
    columns: Mapping[str, torch.Tensor]  # each [N] float32


def input_length(row: TrainRow) -> int:
    return len(row.prompt_token_ids) + len(row.token_ids) - 1


def split_passes(
    rows: Sequence[TrainRow], max_tokens: int, *, packed: bool = True
) -> list[list[int]]:
    """Indices of rows, grouped so that passes hold at most `max_tokens` input tokens; padding
    counts where rows are not packed.

    Rows lie next to others of their length, longest first, so that padding wastes little and memory
    runs out at the beginning or not at all. A single longer row gets a pass of its own.
    """
    order = sorted(range(len(rows)), key=lambda index: -input_length(rows[index]))
    passes: list[list[int]] = []
    longest = num_tokens = 0
    for index in order:
        length = input_length(rows[index])
        if not passes or num_tokens + (length if packed else longest) > max_tokens:
            passes.append([])
            longest, num_tokens = length, 0
        passes[-1].append(index)
        num_tokens += length if packed else longest
    return passes


def collate(
    rows: Sequence[TrainRow],
    device: torch.device | str = "cpu",
    *,
    packed: bool = True,
    columns: Sequence[str] = (),
) -> Batch:
    """One pass, with these columns of the rows. No rows give one input token whose output nobody
    reads.

    Raises ValueError for a row without a prompt: its first token is predicted from nothing; and for
    a column that has not one value a completion token. Every row has the columns.
    """
    if not rows:
        return _empty_batch(device, columns)
    prompt_lengths = np.array([len(row.prompt_token_ids) for row in rows])
    lengths = np.array([len(row.token_ids) for row in rows])
    if not prompt_lengths.all():
        raise ValueError(
            f"rollout of group {rows[int(prompt_lengths.argmin())].group_id} has an empty prompt, "
            "so nothing predicts its first token; begin prompts with at least one token, such as "
            "<bos>."
        )
    num_inputs = prompt_lengths + lengths - 1  # [B]
    row, column = ragged_places(num_inputs + 1)
    tokens = _concatenate([part for row in rows for part in (row.prompt_token_ids, row.token_ids)])
    is_input = column < num_inputs[row]
    if packed:
        starts = np.cumsum(num_inputs) - num_inputs
        input_ids = tokens[is_input].astype(np.int64)[None]
    else:
        starts = np.arange(len(rows)) * num_inputs.max()
        input_ids = np.zeros((len(rows), num_inputs.max()), np.int64)
        input_ids[row[is_input], column[is_input]] = tokens[is_input]

    row, column = ragged_places(lengths)
    positions = starts[row] + prompt_lengths[row] - 1 + column
    trained = _concatenate([row.loss_mask for row in rows]).astype(np.bool_)

    def flat(parts: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(_concatenate(parts)[trained].astype(dtype)).to(device)

    return Batch(
        input_ids=torch.from_numpy(input_ids).to(device),
        packing=Packing(num_inputs, device) if packed else None,
        positions=torch.from_numpy(positions[trained]).to(device),
        targets=flat([row.token_ids for row in rows], np.int64),
        policy_versions=flat([row.policy_versions for row in rows], np.int64),
        row_index=torch.from_numpy(row[trained]).to(device),
        columns={name: flat([_column(row, name) for row in rows], np.float32) for name in columns},
    )


def _column(row: TrainRow, name: str) -> Float32Array:
    values = row.columns[name]
    if values.shape != row.token_ids.shape:
        raise ValueError(
            f"column {name} of a rollout of group {row.group_id} has shape {values.shape} for "
            f"{len(row.token_ids)} completion tokens; give one value a token."
        )
    return values


def _empty_batch(device: torch.device | str, columns: Sequence[str]) -> Batch:
    no_index = torch.zeros(0, dtype=torch.int64, device=device)
    no_value = torch.zeros(0, device=device)
    return Batch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device),
        packing=None,
        positions=no_index,
        targets=no_index,
        policy_versions=no_index,
        row_index=no_index,
        columns=dict.fromkeys(columns, no_value),
    )


def _concatenate(parts: list[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts)
