"""Columns with the turn and the seat of each token, for turn-level credit assignment.

`rlsys.algorithms.turn_credit` reads them.

Shape legend: T tokens of a trajectory, N replies.
"""

from __future__ import annotations

import numpy as np

from rlsys.environments.tokens.token_tree import FIELDS, Trajectory
from rlsys.types import INJECTED, Int32Array

NO_TURN = -1


def turns_of(trajectory: Trajectory) -> Int32Array:
    """Return the number of each token's reply, [T]; NO_TURN for tokens outside of replies.

    Replies are numbered in the order in which they were sampled. Tokens injected into a reply are
    part of it.
    """
    turns = np.full(len(trajectory.token_ids), NO_TURN, np.int32)
    replies = np.flatnonzero(trajectory.reply_ends >= 0)
    replies = replies[np.argsort(trajectory.reply_ends[replies], kind="stable")]
    start = 0  # end of the previous reply
    for reply in replies.tolist():
        end = int(trajectory.reply_ends[reply]) + 1
        sampled = np.flatnonzero(trajectory.policy_versions[start:end] != INJECTED)
        if len(sampled):
            turns[start + sampled[0] : end] = reply
        start = end
    return turns


def num_by_seat(versions: Int32Array, seats: Int32Array) -> tuple[int, ...]:
    """Return the number of sampled tokens of each seat, up to the last seat that has any.

    Args:
        versions: Policy version of each token, [T].
        seats: Seat of each token, [T].
    """
    return tuple(np.bincount(seats[versions != INJECTED]).tolist())


def seats_of(trajectory: Trajectory) -> Int32Array:
    """Return the seat of each token, [T]: that of its branch."""
    table = trajectory.branches.reshape(-1, FIELDS)
    return np.repeat(table[:, 3], table[:, 0]).astype(np.int32)
