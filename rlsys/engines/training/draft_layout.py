"""Places at which a head drafts in a batch of the policy, as index arrays.

A node is a token with a token before it: the head reads the policy's hidden states at the token
before and the embedding of the token itself, and drafts the token after. Prompt tokens are nodes
whose keys and values are read. Queries are the nodes at which the policy's distribution is known,
because the policy is trained there. A prefix that rows share is computed once.

    sequence   a b c d e f     nodes  b c d e f
    trained          d e f     queries    d e f    before[e] = d, before[d] = -1

Shape legend: M inputs of the batch, N nodes, Q queries, S sequences of a piece, K longest of them
in nodes, C most queries of one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlsys.engines.models.collate import CollatedBatch
from rlsys.engines.models.prefix_tree import IntArray

# Limits of one piece of attention: S·K keys, and S·C·K scores of each attention head.
MAX_KEYS, MAX_SCORES = 1 << 16, 1 << 21


@dataclass(frozen=True)
class AttentionPiece:
    """Queries of some sequences of similar lengths, and the nodes that they see."""

    keys: torch.Tensor  # [S, K] nodes of each sequence from its start on; padding has any node
    queries: torch.Tensor  # [S, C], -1 for padding
    columns: torch.Tensor  # [S, C] index in a row of `keys` of each query's own node


@dataclass(frozen=True)
class DraftLayout:
    """Nodes and queries of a batch."""

    places: torch.Tensor  # [N] input of each node's token, into the flattened input
    parents: torch.Tensor  # [N] input of the token before
    positions: torch.Tensor  # [N] position of the token before in its sequence
    queries: torch.Tensor  # [Q] node of each query
    before: torch.Tensor  # [Q] query of the token before, -1 if there is none
    pieces: tuple[AttentionPiece, ...]  # each query occurs once


def draft_layout(batch: CollatedBatch) -> DraftLayout | None:
    """Return the layout of a batch, on its device; None if nothing is drafted in it."""
    places, starts = _sequences(batch)  # [Σ], [number of sequences]
    column = np.arange(len(places)) - np.repeat(starts, np.diff(starts, append=len(places)))
    inner = np.flatnonzero(column > 0)
    node_places, first = np.unique(places[inner], return_index=True)  # [N]
    at = inner[first]  # [N] into `places`: the first sequence that has the node
    node_of = np.full(batch.input_ids.numel(), -1)  # by input
    node_of[node_places] = np.arange(len(node_places))
    queries = node_of[np.unique(batch.positions.cpu().numpy())]
    queries = queries[queries >= 0]  # the first token of a sequence is no node
    if not len(queries):
        return None
    query_of = np.full(len(node_places) + 1, -1)  # by node; -1 stays -1
    query_of[queries] = np.arange(len(queries))
    parents = places[at - 1]
    sequence = np.searchsorted(starts, at, side="right") - 1  # [N]
    device = batch.input_ids.device

    def moved(values: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)

    runs = [
        _Run(
            node_of[places[starts[one] + 1 : at[nodes[-1]] + 1]],
            query_of[nodes],
            column[at[nodes]] - 1,
        )
        for one, nodes in _by_sequence(sequence[queries], queries, at)
    ]
    return DraftLayout(
        places=moved(node_places),
        parents=moved(parents),
        positions=moved(column[at] - 1),
        queries=moved(queries),
        before=moved(query_of[node_of[parents[queries]]]),
        pieces=tuple(
            AttentionPiece(*map(moved, _padded(group))) for group in _groups(_short_enough(runs))
        ),
    )


@dataclass(frozen=True)
class _Run:
    """Queries of one sequence, in its order."""

    keys: IntArray  # nodes of the sequence up to the last query
    queries: IntArray
    columns: IntArray


def _sequences(batch: CollatedBatch) -> tuple[IntArray, IntArray]:
    """Return the inputs of all sequences, one after another, and where each starts."""
    if batch.packing is not None:
        return batch.packing.tree.places, batch.packing.tree.row_starts
    num_rows, length = batch.input_ids.shape
    return np.arange(num_rows * length), np.arange(num_rows) * length


def _by_sequence(
    sequence: IntArray, queries: IntArray, at: IntArray
) -> Iterator[tuple[int, IntArray]]:
    """Yield each sequence with its queries' nodes, in the order of the sequence."""
    order = np.lexsort((at[queries], sequence))
    numbers, firsts = np.unique(sequence[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(queries[order], firsts[1:]), strict=True)


def _short_enough(runs: list[_Run]) -> list[_Run]:
    """Cut runs into those whose scores are within the limit, each with its own keys."""
    found = []
    for run in runs:
        size = max(1, MAX_SCORES // len(run.keys))
        for start in range(0, len(run.queries), size):
            columns = run.columns[start : start + size]
            keys = run.keys[: columns[-1] + 1]
            found.append(_Run(keys, run.queries[start : start + size], columns))
    return found


def _groups(runs: list[_Run]) -> Iterator[list[_Run]]:
    """Yield runs of similar lengths that make one piece, longest first."""
    group: list[_Run] = []
    most = 0  # queries of one run of the group
    for run in sorted(runs, key=lambda run: -len(run.keys)):
        most = max(most, len(run.queries))
        longest = len(group[0].keys) if group else 0
        num_keys = (len(group) + 1) * longest
        is_full = num_keys > MAX_KEYS or num_keys * most > MAX_SCORES
        if group and (is_full or 2 * len(run.keys) < longest):
            yield group
            group, most = [], len(run.queries)
        group.append(run)
    yield group


def _padded(group: list[_Run]) -> tuple[IntArray, IntArray, IntArray]:
    num_keys = max(len(run.keys) for run in group)
    num_queries = max(len(run.queries) for run in group)
    keys = np.zeros((len(group), num_keys), np.int64)
    queries = np.full((len(group), num_queries), -1)
    columns = np.zeros((len(group), num_queries), np.int64)
    for number, run in enumerate(group):
        keys[number, : len(run.keys)] = run.keys
        queries[number, : len(run.queries)] = run.queries
        columns[number, : len(run.queries)] = run.columns
    return keys, queries, columns
