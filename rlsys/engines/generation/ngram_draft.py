"""Drafts of next tokens by repetition: what followed the last tokens where they occurred before.

    tokens [N, C], lengths [N] ──► repeated ──► drafts [N, K], found [N]

All rows are searched at once with a few numpy passes over the tokens, without an index that each
sampled token would have to update (prompt lookup decoding; Saxena 2023).

Shape legend: N sequences, C tokens of the longest, K tokens of a draft.
"""

from __future__ import annotations

import numpy as np

from rlsys.types import BoolArray, Int32Array


def repeated(
    tokens: Int32Array, lengths: Int32Array, *, min_match: int, max_match: int, num_tokens: int
) -> tuple[Int32Array, BoolArray]:
    """Return drafts [N, K] of `num_tokens` tokens, and which rows [N] have one.

    The place with the longest match wins, of equal ones the latest. `tokens` after a row's length
    are ignored. A draft that reaches the end of its row goes on with its own beginning, as a
    repetition of period `length - place` would.
    """
    num_rows, rows = len(lengths), np.arange(len(lengths))
    if not num_rows or lengths.max() < 2:
        return np.zeros((num_rows, num_tokens), np.int32), np.zeros(num_rows, np.bool_)
    tokens = tokens[:, : lengths.max()]
    last = lengths - 1  # [N]
    num_places = tokens.shape[1] - 1
    # Places that may end a match: any token before the last one.
    matches = np.arange(num_places) < last[:, None]  # [N, C - 1]
    match_lengths = np.zeros((num_rows, num_places), np.int8)
    for back in range(min(max_match, num_places)):
        wanted = tokens[rows, np.maximum(last - back, 0)]
        matches[:, back:] &= tokens[:, : num_places - back] == wanted[:, None]
        matches[:, :back] = False
        matches[last < back] = False
        if not matches.any():
            break
        match_lengths += matches
    latest = num_places - 1 - match_lengths[:, ::-1].argmax(1)  # [N]
    found: BoolArray = match_lengths[rows, latest] >= min_match
    period = np.maximum(last - latest, 1)
    places = latest[:, None] + 1 + np.arange(num_tokens) % period[:, None]  # [N, K]
    drafts: Int32Array = tokens[rows[:, None], np.minimum(places, last[:, None])]
    return drafts, found
