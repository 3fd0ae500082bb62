"""From ragged rows to the tensors of one forward pass.

    rows ──► passes of at most max_tokens, alike in length ──► Batch, packed or right-padded

A model is read at places of its input: where each completion token is predicted (`collate`), or at
the last token of each row (`collate_whole`). Only then is the last token an input. What packed rows
begin with alike is one input, and what is read there for the same token is read once.

A rollout that is a tree (rlsys.engines.models.branches) is one row with several sequences, a path
each, of which each token is read in one. It is in one pass with all of them.

Shape legend: B rows, S sequences of inputs: of each row one, or one of each branch; L longest of
the pass, M inputs in all, N places: completion tokens with loss mask 1, or rows; U of them that
differ; W experts of an input (rlsys.engines.models.routing).
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
from rlsys.types import ExpertArray, Float32Array, Int32Array, TrainRow

# Beyond all token ids, which are int32.
FIRST_KEY = 1 << 31


@dataclass(frozen=True, kw_only=True)
class CollatedBatch:
    """Rows of one forward pass, one after another in a single row [1, M], or right-padded [S, L];
    what a causal model computes at padding is never looked at.
    """

    input_ids: torch.Tensor  # [1, M] or [S, L] int64
    packing: Packing | None  # of a single row
    positions: torch.Tensor  # [U] int64, into the flattened input
    targets: torch.Tensor  # [U] int64: the token that is predicted there; of whole rows 0
    read_at: torch.Tensor | None  # [N] int64 into U; None: each place is read for itself
    policy_versions: torch.Tensor  # [N] int64, of the targets; of whole rows 0
    row_index: torch.Tensor  # [N] int64, into the pass
    group_ids: torch.Tensor  # [N] int64
    columns: Mapping[str, torch.Tensor]  # each [N] float32, or [N, K] where a place has K values
    # [M or S·L, W] uint8 or int16: the experts that every input goes to, 0 for padding; None: the
    # model chooses them
    routed_experts: torch.Tensor | None = None

    @property
    def each_read(self) -> CollatedBatch:
        """The same, with every place read for itself."""
        if self.read_at is None:
            return self
        positions, targets = self.spread(self.positions), self.spread(self.targets)
        return replace(self, positions=positions, targets=targets, read_at=None)

    def spread(self, read: torch.Tensor) -> torch.Tensor:
        """What was read [U], at each place [N]."""
        return read if self.read_at is None else read.index_select(0, self.read_at)


def input_lengths(row: TrainRow) -> list[int]:
    """Of the row's sequences."""
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
    """Indices of rows, grouped so that passes hold at most `max_tokens` input tokens; padding
    counts where rows are not packed, and with `shares` the prompt of a group once, as what the
    branches of a row share does.

    Rows lie next to others of their length, longest first, so that padding wastes little and memory
    runs out at the beginning or not at all. A single longer row gets a pass of its own; and so do,
    with `whole_groups`, the rows of a single larger group.
    """
    if packed and shares:
        return _sharing_passes(rows, max_tokens, whole_groups=whole_groups)
    units = [[index] for index in range(len(rows))]
    if whole_groups:
        units = list(_gathered(row.group_id for row in rows).values())
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


def _sharing_passes(
    rows: Sequence[TrainRow], max_tokens: int, *, whole_groups: bool
) -> list[list[int]]:
    # What makes a group here is the prompt, unless a loss wants all of its rows.
    units = list(
        _gathered(
            (row.group_id, b"" if whole_groups else row.prompt_token_ids.tobytes()) for row in rows
        ).values()
    )
    groups = [
        GroupLengths(
            prompt=len(rows[unit[0]].prompt_token_ids),
            completions=[_num_behind_prompt(rows[index]) for index in unit],
        )
        for unit in units
    ]
    budget = Budget(num_ranks=1, max_tokens=max_tokens, attention_tokens=math.inf)
    passes = plan_micro_batches(groups, budget, whole_groups=whole_groups) if rows else []
    return [[units[unit][place] for unit, place in of_rank] for [of_rank] in passes]


def _num_behind_prompt(row: TrainRow) -> int:
    """Inputs of a row beside its prompt, where what its branches share stands once."""
    if row.branches is not None:
        return Paths.of(row).num_inputs_shared(MIN_SHARED)
    return len(row.token_ids)


def _gathered(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """Places of each key."""
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places


def _cost(lengths: Sequence[int], packed: bool, longest: int) -> int:
    """Input tokens that sequences add to a pass whose longest one has `longest`."""
    return sum(lengths) if packed else len(lengths) * longest


def collate(
    rows: Sequence[TrainRow],
    device: torch.device | str = "cpu",
    *,
    packed: bool = True,
    shares: bool = True,
    columns: Sequence[str] = (),
) -> CollatedBatch:
    """One pass, with these columns of the rows. No rows give one input token whose output nobody
    reads.

    Raises ValueError for a row without a prompt: its first token is predicted from nothing; and for
    a column that has not one value a completion token. Every row has the columns.
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
    """One pass over whole rows, each read at the last token that is not `unread`; what stands
    behind is no input. Padding is of token `fill`. Of a column, which repeats a number of the row,
    the last value counts. Of a tree the path of its last branch is read.

    Raises ValueError for a row without a prompt, or, where columns are asked for, a completion.
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
    """What a model is given of rows, and where in it each completion token is predicted."""

    tokens: list[Int32Array]  # [S] of the inputs
    reader: IntArray  # [Σ T] sequence
    inputs: IntArray  # [Σ T] place within it

    @classmethod
    def of_lines(cls, rows: Sequence[TrainRow]) -> _Sequences:
        """One of each row."""
        row, column = ragged_places(np.array([len(row.token_ids) for row in rows]))
        prompt_lengths = np.array([len(row.prompt_token_ids) for row in rows])
        return cls(
            tokens=[np.concatenate((row.prompt_token_ids, row.token_ids))[:-1] for row in rows],
            reader=row,
            inputs=prompt_lengths[row] - 1 + column,
        )

    @classmethod
    def of_trees(cls, rows: Sequence[TrainRow]) -> _Sequences:
        """One of each branch of those that have any."""
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
    """Inputs of a pass, and where those of each sequence lie among them."""

    inputs: Mapping[str, Any]  # fields of a Batch
    places: IntArray  # into the flattened input, of all sequences' inputs one after another
    starts: IntArray  # [S] into `places`

    def positions(self, sequence: IntArray, column: IntArray) -> IntArray:
        """In the flattened input, of these inputs of these sequences."""
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
    """`tokens` [S]: the inputs of each sequence of the rows."""
    for row in rows:
        if not len(row.prompt_token_ids):
            raise ValueError(
                f"rollout of group {row.group_id} has an empty prompt, so nothing predicts its "
                "first token; begin prompts with at least one token, such as <bos>."
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
        routed[places[::-1]] = experts[::-1]  # where rows share a prompt, those of the first one
        inputs["routed_experts"] = torch.from_numpy(routed).to(device)
    return _LaidOut(inputs=inputs, places=places, starts=starts)


def _routed_experts(rows: Sequence[TrainRow], num_inputs: IntArray) -> ExpertArray | None:
    """[Σ num_inputs, W] of inputs of all rows one after another; None where none were recorded."""
    recorded = [row.routed_experts for row in rows]
    told = [experts for experts in recorded if experts is not None]
    if not told:
        return None
    if any(row.branches is not None for row in rows):
        raise ValueError(
            "routed_experts stand along one line of tokens, and a rollout here has branches; leave "
            "rollout.replay_routing out."
        )
    widths = {
        -1 if experts is None or experts.size % length else experts.size // length
        for experts, length in zip(recorded, num_inputs.tolist(), strict=True)
    }
    if len(widths) > 1 or -1 in widths:
        sizes = [None if experts is None else experts.size for experts in recorded]
        raise ValueError(
            f"rows of {num_inputs.tolist()} inputs have {sizes} numbers of experts; give every row "
            "as many for each of its inputs as any other, or leave routed_experts out of all."
        )
    return np.concatenate(told).reshape(-1, widths.pop())


def _keys(
    rows: Sequence[TrainRow], tokens: Sequence[Int32Array], experts: ExpertArray
) -> list[IntArray]:
    """Of which rows share what they begin with: the tokens of prompts, which passes are planned by;
    of completions the tokens and their experts, so that each is trained as it was sampled.
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
    """Fields of a Batch: what is read, each pair of a place and a token once."""
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
    """Tokens of a row up to the one at which it is scored."""
    tokens = last_path(row)
    if unread is None:
        return tokens
    places = np.flatnonzero(tokens != unread)
    return tokens[: int(places[-1]) + 1 if len(places) else 1]


def _last(row: TrainRow, name: str) -> float:
    values = _column(row, name)
    if not len(values):
        raise ValueError(
            f"a rollout of group {row.group_id} has no completion, so column {name} has no value "
            "for it; leave empty completions out."
        )
    return float(values[-1])


def _column(row: TrainRow, name: str) -> Float32Array:
    """[T], or [T, K]."""
    values, num_tokens = row.columns[name], len(row.token_ids)
    if values.shape == (num_tokens,):
        return values
    if values.ndim != 1 or not num_tokens or len(values) % num_tokens:
        raise ValueError(
            f"column {name} of a rollout of group {row.group_id} has shape {values.shape} for "
            f"{num_tokens} completion tokens; give one value a token, or as many of each."
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
