"""Rollouts that are trees, for tests.

They are made of the texts of their branches, and split again by the definition of a branch, not by
rlsys' own computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from rlsys.types import INJECTED, TrainRow


@dataclass(frozen=True)
class Branch:
    """A branch whose `own` tokens follow the first `at` tokens of the path of branch `parent`.

    `sampled` marks the tokens of the policy.
    """

    own: tuple[int, ...]
    parent: int
    at: int
    sampled: tuple[bool, ...]
    seat: int = 0


def tree_row(prompt: Sequence[int], branches: Sequence[Branch], group_id: int = 0) -> TrainRow:
    """Return a row whose columns differ between tokens."""
    tokens = [token for branch in branches for token in branch.own]
    mask = np.array([one for branch in branches for one in branch.sampled], np.bool_)
    flat = [(len(b.own), b.parent, b.at, b.seat) for b in branches]
    count = np.arange(len(tokens), dtype=np.float32)
    return TrainRow(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        policy_versions=np.where(mask, 0, INJECTED).astype(np.int32),
        loss_mask=mask,
        columns={
            "sampler_logprobs": np.where(mask, -3.0 - count / 100, 0.0).astype(np.float32),
            "advantages": (0.5 - count % 3).astype(np.float32),
        },
        group_id=group_id,
        group_size=2,
        group_num_tokens=int(mask.sum()),
        branches=np.array(flat, np.int32).flatten(),
    )


def texts(row: TrainRow, branches: Sequence[Branch]) -> list[list[int]]:
    """Return the whole path of each branch."""
    paths: list[list[int]] = []
    for branch in branches:
        if not paths:
            before = row.prompt_token_ids.tolist()
        else:
            before = [] if branch.parent < 0 else paths[branch.parent][: branch.at]
        paths.append([*before, *branch.own])
    return paths


def apart(row: TrainRow, branches: Sequence[Branch]) -> list[TrainRow]:
    """Return a rollout of each branch with sampled tokens, with the tokens before it as prompt."""
    rows, end = [], 0
    for branch, path in zip(branches, texts(row, branches), strict=True):
        start, end = end, end + len(branch.own)
        num_before = len(path) - len(branch.own)
        first = 0 if num_before else 1  # a new branch's first token becomes the prompt
        if not any(branch.sampled):
            continue
        own = slice(start + first, end)
        rows.append(
            replace(
                row,
                prompt_token_ids=np.array(path[: num_before + first], np.int32),
                token_ids=row.token_ids[own],
                policy_versions=row.policy_versions[own],
                loss_mask=row.loss_mask[own],
                columns={name: values[own] for name, values in row.columns.items()},
                branches=None,
            )
        )
    return rows


@st.composite
def trees(
    draw: st.DrawFn, *, num_tokens: int = 21, longest: int = 8
) -> tuple[TrainRow, list[Branch]]:
    """Draw rollouts of up to five branches, with at most `longest` own tokens each."""
    token = st.integers(0, num_tokens - 1)
    prompt = draw(st.lists(token, min_size=1, max_size=longest))
    branches: list[Branch] = []
    lengths: list[int] = []
    for number in range(draw(st.integers(1, 5))):
        own = tuple(draw(st.lists(token, max_size=longest)))
        parent = draw(st.sampled_from([-1, *(i for i in range(number) if lengths[i])]))
        at = 0 if parent < 0 else draw(st.integers(1, lengths[parent]))
        if number == 0:
            at = len(prompt)
        sampled = [draw(st.booleans()) for _ in own]
        if own and not at:
            sampled[0] = False
        branches.append(Branch(own, parent, at, tuple(sampled), seat=number % 2))
        lengths.append(at + len(own))
    return tree_row(prompt, branches), branches
