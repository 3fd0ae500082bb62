"""From ragged rows to the tensors of one forward pass.

    rows ──► passes of at most max_tokens, alike in length ──► Batch, packed or right-padded

A model is read at places of its input: where each completion token is predicted (`collate`), or at
the last token of each row (`collate_whole`). Only then is the last token an input.

Shape legend: B rows, L longest input of the pass, M inputs in all, N places: completion tokens with
loss mask 1, or rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rlsys.engines.packing import IntArray, Packing, ragged_places
from rlsys.types import Float32Array, TrainRow


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one forward pass, one after another in a single row [1, M], or right-padded [B, L];
    what a causal model computes at padding is never looked at."""

    input_ids: torch.Tensor  # [1, M] or [B, L] int64
    packing: Packing | None  # of a single row
    positions: torch.Tensor  # [N] int64, into the flattened input
    targets: torch.Tensor  # [N] int64: the token that is predicted there; of whole rows 0
    policy_versions: torch.Tensor  # [N] int64, of the targets; of whole rows 0
    row_index: torch.Tensor  # [N] int64, into the pass
    group_ids: torch.Tensor  # [N] int64
    columns: Mapping[str, torch.Tensor]  # each [N] float32


def input_length(row: TrainRow) -> int:
    return len(row.prompt_token_ids) + len(row.token_ids) - 1


def split_passes(
    rows: Sequence[TrainRow], max_tokens: int, *, packed: bool = True, whole_groups: bool = False
) -> list[list[int]]:
    """Indices of rows, grouped so that passes hold at most `max_tokens` input tokens; padding
    counts where rows are not packed, and the last token of a row does not.

    Rows lie next to others of their length, longest first, so that padding wastes little and memory
    runs out at the beginning or not at all. A single longer row gets a pass of its own; and so do,
    with `whole_groups`, the rows of a single larger group.
    """
    units: list[list[int]] = [[index] for index in range(len(rows))]
    if whole_groups:
        of_group: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            of_group.setdefault(row.group_id, []).append(index)
        units = list(of_group.values())
    lengths = [input_length(row) for row in rows]
    longest_of = [max(lengths[index] for index in unit) for unit in units]
    passes: list[list[int]] = []
    longest = num_tokens = 0
    for number in sorted(range(len(units)), key=lambda number: -longest_of[number]):
        unit = units[number]
        if not passes or num_tokens + _cost(unit, lengths, packed, longest) > max_tokens:
            passes.append([])
            longest, num_tokens = longest_of[number], 0
        passes[-1].extend(unit)
        num_tokens += _cost(unit, lengths, packed, longest)
    return passes


def _cost(unit: Sequence[int], lengths: Sequence[int], packed: bool, longest: int) -> int:
    """Input tokens that rows add to a pass whose longest row has `longest`."""
    return sum(lengths[index] for index in unit) if packed else len(unit) * longest


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
    num_inputs = prompt_lengths + lengths - 1  # [B]
    input_ids, starts = _lay_out(rows, num_inputs, packed=packed)
    row, column = ragged_places(lengths)
    positions = starts[row] + prompt_lengths[row] - 1 + column
    trained = _concatenate([row.loss_mask for row in rows]).astype(np.bool_)
    group_ids = np.array([row.group_id for row in rows])

    def flat(parts: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(_concatenate(parts)[trained].astype(dtype)).to(device)

    return Batch(
        input_ids=torch.from_numpy(input_ids).to(device),
        packing=Packing(num_inputs, device) if packed else None,
        positions=torch.from_numpy(positions[trained]).to(device),
        targets=flat([row.token_ids for row in rows], np.int64),
        policy_versions=flat([row.policy_versions for row in rows], np.int64),
        row_index=torch.from_numpy(row[trained]).to(device),
        group_ids=torch.from_numpy(group_ids[row[trained]]).to(device),
        columns={name: flat([_column(row, name) for row in rows], np.float32) for name in columns},
    )


def collate_whole(
    rows: Sequence[TrainRow],
    device: torch.device | str = "cpu",
    *,
    packed: bool = True,
    columns: Sequence[str] = (),
    unread: int | None = None,
    fill: int = 0,
) -> Batch:
    """One pass over whole rows, each read at the last token that is not `unread`; what stands
    behind is no input. Padding is of token `fill`. Of a column, which repeats a number of the row,
    the last value counts.

    Raises ValueError for a row without a prompt, or, where columns are asked for, a completion.
    """
    if not rows:
        return _empty_batch(device, columns)
    num_inputs = np.array([_scored_length(row, unread) for row in rows])  # [B]
    input_ids, starts = _lay_out(rows, num_inputs, packed=packed, fill=fill)
    zeros = torch.zeros(len(rows), dtype=torch.int64, device=device)
    return Batch(
        input_ids=torch.from_numpy(input_ids).to(device),
        packing=Packing(num_inputs, device) if packed else None,
        positions=torch.from_numpy(starts + num_inputs - 1).to(device),
        targets=zeros,
        policy_versions=zeros,
        row_index=torch.arange(len(rows), device=device),
        group_ids=torch.tensor([row.group_id for row in rows], device=device),
        columns={
            name: torch.tensor([_last(row, name) for row in rows], device=device)
            for name in columns
        },
    )


def _lay_out(
    rows: Sequence[TrainRow], num_inputs: IntArray, *, packed: bool, fill: int = 0
) -> tuple[IntArray, IntArray]:
    """The first `num_inputs` [B] tokens of each row as input [1, M] or [B, L], and where each row
    begins in it when it is flattened, [B]."""
    prompt_lengths = np.array([len(row.prompt_token_ids) for row in rows])
    if not prompt_lengths.all():
        raise ValueError(
            f"rollout of group {rows[int(prompt_lengths.argmin())].group_id} has an empty prompt, "
            "so nothing predicts its first token; begin prompts with at least one token, such as "
            "<bos>."
        )
    row, column = ragged_places(prompt_lengths + [len(row.token_ids) for row in rows])
    tokens = _concatenate([part for row in rows for part in (row.prompt_token_ids, row.token_ids)])
    is_input = column < num_inputs[row]
    if packed:
        return tokens[is_input].astype(np.int64)[None], np.cumsum(num_inputs) - num_inputs
    input_ids = np.full((len(rows), num_inputs.max()), fill, np.int64)
    input_ids[row[is_input], column[is_input]] = tokens[is_input]
    return input_ids, np.arange(len(rows)) * num_inputs.max()


def _scored_length(row: TrainRow, unread: int | None) -> int:
    """Tokens of a row up to the one at which it is scored."""
    tokens = np.concatenate([row.prompt_token_ids, row.token_ids])
    if unread is None:
        return len(tokens)
    places = np.flatnonzero(tokens != unread)
    return int(places[-1]) + 1 if len(places) else 1


def _last(row: TrainRow, name: str) -> float:
    values = _column(row, name)
    if not len(values):
        raise ValueError(
            f"a rollout of group {row.group_id} has no completion, so column {name} has no value "
            "for it; leave empty completions out."
        )
    return float(values[-1])


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
        group_ids=no_index,
        columns=dict.fromkeys(columns, no_value),
    )


def _concatenate(parts: list[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts)
