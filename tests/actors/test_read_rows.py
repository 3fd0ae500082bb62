"""Rows as a model's worker reads them from the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from actors.store.row_transfer import read_rows
from rlsys.controller.worker_protocols import StepRowsRef
from rlsys.dataflow.store.blocks import layout_of
from rlsys.types import INJECTED

COLUMNS: dict[str, list[Any]] = {
    "prompt_token_ids": [np.array([1, 2], np.int32), np.array([1, 2], np.int32)],
    "token_ids": [np.array([3, 4, 5], np.int32), np.array([6], np.int32)],
    "policy_versions": [np.array([0, INJECTED, 1], np.int32), np.array([2], np.int32)],
    "sampler_logprobs": [np.array([-1, 0, -2], np.float32), np.array([-3], np.float32)],
    "branches": [np.array([2, -1, 2, 0, 1, 0, 3, 1], np.int32), np.array([1, -1, 2, 0], np.int32)],
}
ROWS = StepRowsRef(
    cells={},
    scalars={"advantages": [0.5, -0.5]},
    group_ids=[0, 0],
    group_sizes=[2, 2],
    group_num_tokens=[3, 3],
)


class Store:
    """Store that contains only COLUMNS."""

    def get_batch(self, cells: Any) -> dict[str, list[Any]]:
        return COLUMNS


def test_a_rollout_with_a_single_branch_has_no_branches() -> None:
    tree, line = read_rows(ROWS, Store())  # type: ignore[arg-type]
    assert tree.branches is not None
    assert tree.branches.tolist() == [2, -1, 2, 0, 1, 0, 3, 1]
    assert line.branches is None
    assert set(tree.columns) == {"sampler_logprobs", "advantages"}
    assert tree.columns["advantages"].tolist() == [0.5] * 3
    assert tree.loss_mask.tolist() == [True, False, True]


def test_rows_know_which_rollout_is_recorded() -> None:
    rows = replace(ROWS, recorded_as=[None, 1])
    assert [row.recorded_as for row in read_rows(rows, Store())] == [None, 1]  # type: ignore[arg-type]
    assert [row.recorded_as for row in read_rows(ROWS, Store())] == [None, None]  # type: ignore[arg-type]


def test_tokens_of_other_seats_are_not_trained_on() -> None:
    columns = {
        **COLUMNS,
        "seats": [np.array([0, 0, 1], np.int32), np.array([1], np.int32)],
    }

    class Seated:
        def get_batch(self, cells: Any) -> dict[str, list[Any]]:
            return columns

    masks = [
        [row.loss_mask.tolist() for row in read_rows(replace(ROWS, seats=seats), Seated())]  # type: ignore[arg-type]
        for seats in (None, (0,), (1,), (0, 1), (2,))
    ]
    assert masks == [
        [[True, False, True], [True]],
        [[True, False, False], [False]],
        [[False, False, True], [True]],
        [[True, False, True], [True]],
        [[False, False, False], [False]],
    ]


def test_rollouts_of_different_numbers_of_branches_are_one_write() -> None:
    lengths = layout_of(COLUMNS).lengths
    assert lengths[list(COLUMNS).index("branches")].tolist() == [8, 4]
