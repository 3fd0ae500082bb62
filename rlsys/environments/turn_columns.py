"""Which turn each token of a trajectory belongs to, and whose it was: columns for functions over a
step (rlsys.algorithms.turn_credit).

Shape legend: T tokens of a trajectory, N replies.
"""

from __future__ import annotations

import numpy as np

from rlsys.environments.tokens.token_tree import FIELDS, Trajectory
from rlsys.types import INJECTED, Int32Array

NO_TURN = -1


def turns_of(trajectory: Trajectory) -> Int32Array:
    """[T]: the number of the reply that a token is part of, in the order in which replies came;
    NO_TURN for what no reply has. A phrase that was put into a reply is part of it.
    """
    turns = np.full(len(trajectory.token_ids), NO_TURN, np.int32)
    replies = np.flatnonzero(trajectory.reply_ends >= 0)
    replies = replies[np.argsort(trajectory.reply_ends[replies], kind="stable")]
    behind = 0  # tokens that stand in earlier replies, or before them
    for reply in replies.tolist():
        end = int(trajectory.reply_ends[reply]) + 1
        sampled = np.flatnonzero(trajectory.policy_versions[behind:end] != INJECTED)
        if len(sampled):
            turns[behind + sampled[0] : end] = reply
        behind = end
    return turns


def num_by_seat(versions: Int32Array, seats: Int32Array) -> tuple[int, ...]:
    """How many tokens were sampled in each seat, up to the last that has any; `versions` [T],
    `seats` [T].
    """
    return tuple(np.bincount(seats[versions != INJECTED]).tolist())


def seats_of(trajectory: Trajectory) -> Int32Array:
    """[T]: that of the branch whose own a token is."""
    table = trajectory.branches.reshape(-1, FIELDS)
    return np.repeat(table[:, 3], table[:, 0]).astype(np.int32)
