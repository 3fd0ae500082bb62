"""Conversion of ragged rows into the tensors of one forward pass.

    rows ──► micro-batches of at most max_tokens, of similar lengths ──► CollatedBatch, packed or
                                                                         right-padded

The model's output is read at the inputs that predict completion tokens (`collate`), or at the last
token of each row (`collate_whole`). Only in the second case is the last token an input. Packed rows
store a shared prefix once. An output that several rows read for the same target is computed once.

A rollout that is a tree (rlsys.engines.models.branches) is one row with several sequences, one per
path. Each token is read in one of them. All sequences of a row are in the same micro-batch.

Shape legend: B rows, S sequences of inputs (one per row, or one per branch), L longest sequence, M
inputs in all, N places (completion tokens with loss mask 1, or rows), U distinct places, W experts
of an input (rlsys.engines.models.routing).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlsys.dataflow.scheduling.microbatch_plan import Budget, GroupLengths, plan_micro_batches
from rlsys.engines.models.branches import Paths, last_path
from rlsys.engines.models.prefix_tree import IntArray
from rlsys.engines.models.row_packing import MIN_SHARED, Packing, ragged_places, tree_of
from rlsys.errors import InvalidValue, require
from rlsys.types import ExpertArray, Float32Array, Int32Array, TrainRow

# Larger than all token ids, which are int32.
FIRST_KEY = 1 << 31


@dataclass(frozen=True, kw_only=True)
class CollatedBatch:
    """Rows of one forward pass, packed into a single row [1, M], or right-padded [S, L].

    Outputs at padding are never read.
    """

    input_ids: torch.Tensor  # [1, M] or [S, L] int64
    packing: Packing | None  # set if the rows are packed
    positions: torch.Tensor  # [U] int64, into the flattened input
    targets: torch.Tensor  # [U] int64: the token that is predicted there; 0 for whole rows
    read_at: torch.Tensor | None  # [N] int64 into U; None if U = N
    policy_versions: torch.Tensor  # [N] int64, of the targets; 0 for whole rows
    row_index: torch.Tensor  # [N] int64, into the rows
    group_ids: torch.Tensor  # [N] int64
    columns: Mapping[str, torch.Tensor]  # each [N] float32, or [N, K] with K values per place
    # [M or S·L, W] uint8 or int16: the experts of every input, 0 for padding. None: the model
    # chooses the experts.
    routed_experts: torch.Tensor | None = None

    @property
    def each_read(self) -> CollatedBatch:
        """The same batch with U = N: no place is shared."""
        if self.read_at is None:
            return self
        positions, targets = self.spread(self.positions), self.spread(self.targets)
        return replace(self, positions=positions, targets=targets, read_at=None)

    def spread(self, read: torch.Tensor) -> torch.Tensor:
        """Expand values of the distinct places [U] to all places [N]."""
        return read if self.read_at is None else read.index_select(0, self.read_at)


def input_lengths(row: TrainRow) -> list[int]:
    """Return the number of inputs of each sequence of a row."""
    if row.branches is not None:
        return Paths.of(row).input_lengths
    return [len(row.prompt_token_ids) + len(row.token_ids) - 1]


def split_passes(
    rows: Sequence[TrainRow],
    max_tokens: int,
    *,
    packed: bool = True,
    shares: bool = False,
    whole_groups: bool = False,
) -> list[list[int]]:
    """Return indices of rows, grouped into micro-batches of at most `max_tokens` input tokens.

    Padding counts if rows are not packed. With `shares`, the prompt of a group counts once, as does
    a prefix that branches of a row share.

    Rows are sorted by length, longest first, so that padding wastes little and a lack of memory
    shows at the beginning. A row longer than `max_tokens` gets a micro-batch of its own. With
    `whole_groups`, the same holds for a group.
    """
    if packed and shares:
        return _split_shared(rows, max_tokens, whole_groups=whole_groups)
    units = [[index] for index in range(len(rows))]
    if whole_groups:
        units = list(_indices_by_key(row.group_id for row in rows).values())
    lengths = [[n for index in unit for n in input_lengths(rows[index])] for unit in units]
    longest_of = [max(of_unit, default=0) for of_unit in lengths]
    passes: list[list[int]] = []
    longest = num_tokens = 0
    for number in sorted(range(len(units)), key=lambda number: -longest_of[number]):
        of_unit = lengths[number]
        if not passes or num_tokens + _cost(of_unit, packed, longest) > max_tokens:
            passes.append([])
            longest, num_tokens = longest_of[number], 0
        passes[-1].extend(units[number])
        num_tokens += _cost(of_unit, packed, longest)
    return passes


def _split_shared(
    rows: Sequence[TrainRow], max_tokens: int, *, whole_groups: bool
) -> list[list[int]]:
    # Group rows by their prompt, unless the loss needs all rows of a group together.
    units = list(
        _indices_by_key(
            (row.group_id, b"" if whole_groups else row.prompt_token_ids.tobytes()) for row in rows
        ).values()
    )
    groups = [
        GroupLengths(
            prompt=len(rows[unit[0]].prompt_token_ids),
            completions=[_num_after_prompt(rows[index]) for index in unit],
        )
        for unit in units
    ]
    budget = Budget(num_ranks=1, max_tokens=max_tokens, attention_tokens=math.inf)
    passes = plan_micro_batches(groups, budget, whole_groups=whole_groups) if rows else []
    return [[units[unit][place] for unit, place in of_rank] for [of_rank] in passes]


def _num_after_prompt(row: TrainRow) -> int:
    """Return the inputs of a row after its prompt; prefixes that branches share count once."""
    if row.branches is not None:
        return Paths.of(row).num_inputs_shared(MIN_SHARED)
    return len(row.token_ids)


def _indices_by_key(keys: Iterable[Any]) -> dict[Any, list[int]]:
    indices: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    return indices


def _cost(lengths: Sequence[int], packed: bool, longest: int) -> int:
    """Return the input tokens that sequences add to a micro-batch of this longest sequence."""
    return sum(lengths) if packed else len(lengths) * longest


def collate(
    rows: Sequence[TrainRow],
    device: torch.device | str = "cpu",
    *,
    packed: bool = True,
    shares: bool = True,
    columns: Sequence[str] = (),
) -> CollatedBatch:
    """Return the batch of one forward pass, with these columns of the rows.

    Without rows the batch has one input token whose output is not read.

    Raises InvalidValue for a row without a prompt, because nothing predicts its first token, and
    for a column whose length is not a multiple of the completion tokens.
    """
    if not rows:
        return _empty_batch(device, columns)
    if all(row.branches is None for row in rows):
        sequences = _Sequences.of_lines(rows)
    else:
        sequences = _Sequences.of_trees(rows)
    laid_out = _lay_out(rows, sequences.tokens, device, packed=packed, shares=shares)
    row, _ = ragged_places(np.array([len(row.token_ids) for row in rows]))
    trained = _concatenate([row.loss_mask for row in rows]).astype(np.bool_)
    group_ids = np.array([row.group_id for row in rows])

    def flat(parts: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(_concatenate(parts)[trained].astype(dtype)).to(device)

    row = row[trained]
    positions = laid_out.positions(sequences.reader[trained], sequences.inputs[trained])
    targets = _concatenate([row.token_ids for row in rows])[trained].astype(np.int64)
    return CollatedBatch(
        **laid_out.inputs,
        **_reads(positions, targets, device),
        policy_versions=flat([row.policy_versions for row in rows], np.int64),
        row_index=torch.from_numpy(row).to(device),
        group_ids=torch.from_numpy(group_ids[row]).to(device),
        columns={name: flat([_column(row, name) for row in rows], np.float32) for name in columns},
    )


def collate_whole(
    rows: Sequence[TrainRow],
    device: torch.device | str = "cpu",
    *,
    packed: bool = True,
    shares: bool = True,
    columns: Sequence[str] = (),
    unread: int | None = None,
    fill: int = 0,
) -> CollatedBatch:
    """Return the batch of one forward pass over whole rows, each read at its last token.

    Tokens `unread` at the end of a row are left out. Padding has token `fill`. A column repeats one
    number per row, and its last value is used. In a tree, the last branch's path is read.

    Raises InvalidValue for a row without a prompt, or, with columns, without a completion.
    """
    if not rows:
        return _empty_batch(device, columns)
    tokens = [_scored(row, unread) for row in rows]
    num_inputs = np.array([len(of_row) for of_row in tokens])  # [B]
    laid_out = _lay_out(rows, tokens, device, packed=packed, shares=shares, fill=fill)
    every = np.arange(len(rows))
    return CollatedBatch(
        **laid_out.inputs,
        **_reads(laid_out.positions(every, num_inputs - 1), np.zeros(len(rows), np.int64), device),
        policy_versions=torch.zeros(len(rows), dtype=torch.int64, device=device),
        row_index=torch.arange(len(rows), device=device),
        group_ids=torch.tensor([row.group_id for row in rows], device=device),
        columns={
            name: torch.tensor([_last(row, name) for row in rows], device=device)
            for name in columns
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Sequences:
    """Input sequences of rows, and the input at which each completion token is predicted."""

    tokens: list[Int32Array]  # [S] inputs
    reader: IntArray  # [Σ T] index of the sequence
    inputs: IntArray  # [Σ T] index within the sequence

    @classmethod
    def of_lines(cls, rows: Sequence[TrainRow]) -> _Sequences:
        """Return one sequence per row."""
        row, column = ragged_places(np.array([len(row.token_ids) for row in rows]))
        prompt_lengths = np.array([len(row.prompt_token_ids) for row in rows])
        return cls(
            tokens=[np.concatenate((row.prompt_token_ids, row.token_ids))[:-1] for row in rows],
            reader=row,
            inputs=prompt_lengths[row] - 1 + column,
        )

    @classmethod
    def of_trees(cls, rows: Sequence[TrainRow]) -> _Sequences:
        """Return one sequence per branch, and one per row without branches."""
        tokens: list[Int32Array] = []
        readers, inputs = [], []
        for row in rows:
            if row.branches is None:
                one = cls.of_lines([row])
                of_row, reader, of_inputs = one.tokens, one.reader, one.inputs
            else:
                paths = Paths.of(row)
                whole = np.concatenate((row.prompt_token_ids, row.token_ids))
                reading = zip(paths.readers, paths.input_lengths, strict=True)
                of_row = [whole[paths.places[branch][:length]] for branch, length in reading]
                reader, of_inputs = paths.predicted_at
            readers.append(len(tokens) + reader)
            inputs.append(of_inputs)
            tokens += of_row
        return cls(tokens=tokens, reader=np.concatenate(readers), inputs=np.concatenate(inputs))


@dataclass(frozen=True, kw_only=True)
class _LaidOut:
    """Inputs of a batch, and the index of each sequence's inputs."""

    inputs: Mapping[str, Any]  # fields of a CollatedBatch
    places: IntArray  # indices into the flattened input, for all sequences one after another
    starts: IntArray  # [S] into `places`

    def positions(self, sequence: IntArray, column: IntArray) -> IntArray:
        """Return the index in the flattened input of input `column` of each sequence."""
        positions: IntArray = self.places[self.starts[sequence] + column]
        return positions


def _lay_out(
    rows: Sequence[TrainRow],
    tokens: Sequence[Int32Array],
    device: torch.device | str,
    *,
    packed: bool,
    shares: bool,
    fill: int = 0,
) -> _LaidOut:
    """Place the inputs `tokens` [S] of the rows' sequences into one batch."""
    for row in rows:
        require(
            len(row.prompt_token_ids) > 0,
            "prompt_token_ids",
            rule=f"a rollout of group {row.group_id} has an empty prompt, so nothing predicts its "
            "first token",
            fix="Begin prompts with at least one token, such as <bos>.",
        )
    num_inputs = np.array([len(of_sequence) for of_sequence in tokens])  # [S]
    experts = _routed_experts(rows, num_inputs)  # [Σ num_inputs, W]
    packing = None
    if packed:
        tree = tree_of(tokens if experts is None else _keys(rows, tokens, experts), shares=shares)
        packing = Packing(tree, device)
        places, starts, shape = tree.places, tree.row_starts, (1, tree.num_tokens)
    else:
        of_sequence, column = ragged_places(num_inputs)
        longest = int(num_inputs.max())
        places, shape = of_sequence * longest + column, (len(tokens), longest)
        starts = np.cumsum(num_inputs) - num_inputs
    input_ids = np.full(shape, fill, np.int64)
    input_ids.flat[places] = np.concatenate(tokens)
    inputs = {"input_ids": torch.from_numpy(input_ids).to(device), "packing": packing}
    if experts is not None:
        routed = np.zeros((input_ids.size, experts.shape[1]), experts.dtype)
        routed[places[::-1]] = experts[::-1]  # a shared prompt gets the experts of its first row
        inputs["routed_experts"] = torch.from_numpy(routed).to(device)
    return _LaidOut(inputs=inputs, places=places, starts=starts)


def _routed_experts(rows: Sequence[TrainRow], num_inputs: IntArray) -> ExpertArray | None:
    """Return the experts [Σ num_inputs, W] of all rows' inputs; None if none were recorded."""
    recorded = [row.routed_experts for row in rows]
    present = [experts for experts in recorded if experts is not None]
    if not present:
        return None
    require(
        all(row.branches is None for row in rows),
        "rollout.replay_routing",
        rule="does not support rollouts with branches",
        fix="Leave it out.",
    )
    widths = {
        -1 if experts is None or experts.size % length else experts.size // length
        for experts, length in zip(recorded, num_inputs.tolist(), strict=True)
    }
    if len(widths) > 1 or -1 in widths:
        sizes = [None if experts is None else experts.size for experts in recorded]
        raise InvalidValue(
            "routed_experts",
            sizes,
            rule=f"must have the same number of experts for each of {num_inputs.tolist()} inputs",
            fix="Give every row its experts, or leave routed_experts out of all rows.",
        )
    return np.concatenate(present).reshape(-1, widths.pop())


def _keys(
    rows: Sequence[TrainRow], tokens: Sequence[Int32Array], experts: ExpertArray
) -> list[IntArray]:
    """Return keys per token, by which rows share prefixes.

    The key of a prompt token is the token, as the micro-batch plan assumes. The key of a completion
    token includes its experts, so that each token is trained as it was sampled.
    """
    lengths = np.array([len(of_row) for of_row in tokens])
    row, column = ragged_places(lengths)
    keys = np.concatenate(tokens).astype(np.int64)
    sampled = column >= np.array([len(row.prompt_token_ids) for row in rows])[row]
    both = np.column_stack((keys[sampled], experts[sampled].astype(np.int64)))
    _, number = np.unique(both, axis=0, return_inverse=True)
    keys[sampled] = FIRST_KEY + number.reshape(-1)
    return np.split(keys, np.cumsum(lengths)[:-1])


def _reads(positions: IntArray, targets: IntArray, device: torch.device | str) -> dict[str, Any]:
    """Return the fields of a CollatedBatch for what is read, each (place, token) pair once."""
    pairs = positions * (targets.max(initial=0) + 1) + targets
    _, first, read_at = np.unique(pairs, return_index=True, return_inverse=True)
    index = None
    if len(first) < len(pairs):
        positions, targets = positions[first], targets[first]
        index = torch.from_numpy(read_at).to(device)
    return {
        "positions": torch.from_numpy(positions).to(device),
        "targets": torch.from_numpy(targets).to(device),
        "read_at": index,
    }


def _scored(row: TrainRow, unread: int | None) -> Int32Array:
    """Return the tokens of a row up to the one at which it is scored."""
    tokens = last_path(row)
    if unread is None:
        return tokens
    places = np.flatnonzero(tokens != unread)
    return tokens[: int(places[-1]) + 1 if len(places) else 1]


def _last(row: TrainRow, name: str) -> float:
    values = _column(row, name)
    require(
        len(values) > 0,
        name,
        rule=f"a rollout of group {row.group_id} has no completion, so the column has no value",
        fix="Leave empty completions out.",
    )
    return float(values[-1])


def _column(row: TrainRow, name: str) -> Float32Array:
    """Return a column of a row, [T] or [T, K]."""
    values, num_tokens = row.columns[name], len(row.token_ids)
    if values.shape == (num_tokens,):
        return values
    if values.ndim != 1 or not num_tokens or len(values) % num_tokens:
        raise InvalidValue(
            name,
            rule=f"a rollout of group {row.group_id} has a column of shape {values.shape} for "
            f"{num_tokens} completion tokens",
            fix="Give the same number of values, at least one, for each token.",
        )
    return values.reshape(num_tokens, -1)


def _empty_batch(device: torch.device | str, columns: Sequence[str]) -> CollatedBatch:
    no_index = torch.zeros(0, dtype=torch.int64, device=device)
    no_value = torch.zeros(0, device=device)
    return CollatedBatch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device),
        packing=None,
        positions=no_index,
        targets=no_index,
        read_at=None,
        policy_versions=no_index,
        row_index=no_index,
        group_ids=no_index,
        columns=dict.fromkeys(columns, no_value),
    )


def _concatenate(parts: list[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts)
