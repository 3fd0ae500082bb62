from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlsys.engines.models.branches import Paths, check_trained, last_path, longest_path
from rlsys.engines.models.collate import collate, collate_whole, input_lengths, split_passes
from rlsys.types import TrainRow
from tests.engines.tree_rows import Branch, texts, tree_row, trees
from tests.errors import invalid

# The tree of the module's docstring: prompt 1 2 3.
BRANCHES = [
    Branch((4, 5, 6), -1, 3, (True, True, False)),
    Branch((7, 8), 0, 4, (True, True)),
    Branch((9, 10, 11), -1, 0, (False, True, False), seat=1),
]


def test_paths_by_hand() -> None:
    row = tree_row([1, 2, 3], BRANCHES)
    paths = Paths.of(row)
    assert [path.tolist() for path in paths.places] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7],
                                                        [8, 9, 10]]  # fmt: skip
    assert paths.lengths == [6, 6, 3]
    assert paths.input_lengths == [5, 5, 2]
    reader, inputs = paths.predicted_at
    assert reader.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert inputs.tolist() == [2, 3, 4, 3, 4, 0, 0, 1]
    assert paths.unpredicted.tolist() == [5]
    assert longest_path(row) == 6
    assert last_path(row).tolist() == [9, 10, 11]


def test_a_pass_of_a_tree_by_hand() -> None:
    batch = collate([tree_row([1, 2, 3], BRANCHES)], columns=["sampler_logprobs"])
    # The two branches' shared prefix is stored once; 6, 8 and 11 predict nothing.
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 7, 9, 10]]
    assert batch.packing is not None
    assert batch.packing.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 0, 1]]
    # 4 after 3, 5 after 4, 7 after 4, 8 after 7, 10 after 9: in the order of the rollout's tokens.
    assert batch.positions.tolist() == [2, 3, 3, 5, 6]
    assert batch.targets.tolist() == [4, 5, 7, 8, 10]
    assert batch.row_index.tolist() == [0] * 5
    assert batch.columns["sampler_logprobs"].numpy() == pytest.approx(
        [-3.0, -3.01, -3.03, -3.04, -3.06]
    )


def test_a_padded_pass_of_a_tree_by_hand() -> None:
    batch = collate([tree_row([1, 2, 3], BRANCHES)], packed=False)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 7], [9, 10, 0, 0, 0]]
    assert batch.positions.tolist() == [2, 3, 8, 9, 10]
    assert batch.targets.tolist() == [4, 5, 7, 8, 10]


def test_a_reward_model_reads_the_last_branch() -> None:
    batch = collate_whole([tree_row([1, 2, 3], BRANCHES[:2])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 7, 8]]
    assert batch.positions.tolist() == [5]


def test_one_branch_after_the_prompt_is_an_ordinary_rollout() -> None:
    row = tree_row([1, 2], [Branch((3, 4, 5), -1, 2, (True, False, True))])
    found, expected = collate([row]), collate([replace(row, branches=None)])
    for name in ("input_ids", "positions", "targets", "row_index", "policy_versions"):
        assert getattr(found, name).equal(getattr(expected, name)), name
    assert split_passes([row], 4) == split_passes([replace(row, branches=None)], 4)


@pytest.mark.parametrize(
    ("branches", "field", "value", "allowed"),
    [
        ([], "branches", [], "4"),
        ([3, -1, 2], "branches", [3, -1, 2], "4"),
        ([3, -1, 2, 0], "branches: own tokens", [3], "4"),
        ([5, -1, 2, 0, -1, 0, 3, 0], "branches: own tokens", [5, -1], "4"),
        ([4, -1, 1, 0], "branches: start of branch 0", 1, "[2, 2]"),
        ([2, -1, 2, 0, 2, 1, 2, 0], "branches: parent of branch 1", 1, ""),
        ([2, -1, 2, 0, 2, -2, 2, 0], "branches: parent of branch 1", -2, ""),
        ([2, -1, 2, 0, 2, -1, 1, 0], "branches: start of branch 1", 1, "[0, 0]"),
        ([2, -1, 2, 0, 2, 0, 5, 0], "branches: start of branch 1", 5, "[1, 4]"),
        ([2, -1, 2, 0, 2, 0, 0, 0], "branches: start of branch 1", 0, "[1, 4]"),
    ],
)
def test_branches_that_do_not_describe_the_tokens_are_refused(
    branches: list[int], field: str, value: object, allowed: str
) -> None:
    with invalid(field, value) as refused:
        Paths(2, 4, np.array(branches, np.int32))
    assert allowed in refused.value.rule


def test_a_first_token_that_nothing_predicts_is_not_trained_on() -> None:
    row = tree_row([1], [Branch((2,), -1, 1, (True,)), Branch((3, 4), -1, 0, (True, True))])
    with invalid("branches"):
        check_trained(row)
    check_trained(tree_row([1, 2, 3], BRANCHES))


def test_recorded_experts_of_a_tree_are_refused() -> None:
    row = replace(tree_row([1, 2, 3], BRANCHES), routed_experts=np.zeros(8, np.uint8))
    with invalid("rollout.replay_routing"):
        collate([row])


@given(tree=trees(), packed=st.booleans(), shares=st.booleans())
def test_each_token_is_read_once_after_its_own_path(
    tree: tuple[TrainRow, list[Branch]], packed: bool, shares: bool
) -> None:
    row, branches = tree
    assume(row.token_ids.size)
    batch = collate([row], packed=packed, shares=shares).each_read
    expected = [
        (path[at - 1], path[at], at - 1)
        for branch, path in zip(branches, texts(row, branches), strict=True)
        for at, sampled in zip(range(branch.at, len(path)), branch.sampled, strict=True)
        if sampled
    ]
    flat = batch.input_ids.flatten()
    if batch.packing is not None:
        at = batch.packing.position_ids[0][batch.positions]
    else:
        at = batch.positions % batch.input_ids.shape[1]
    found = zip(flat[batch.positions].tolist(), batch.targets.tolist(), at.tolist(), strict=True)
    assert list(found) == expected


def _num_inputs(rows: Sequence[TrainRow], *, packed: bool = True, shares: bool = True) -> int:
    return collate(rows, packed=packed, shares=shares).input_ids.numel()


@given(
    several=st.lists(trees(num_tokens=3), min_size=1, max_size=6),
    max_tokens=st.integers(1, 80),
    layout=st.sampled_from([(True, True), (True, False), (False, False)]),
)
def test_passes_of_trees_hold_each_rollout_once_and_stay_within_the_limit(
    several: list[tuple[TrainRow, list[Branch]]],
    max_tokens: int,
    layout: tuple[bool, bool],
) -> None:
    packed, shares = layout
    rows = [
        replace(row, group_id=i // 2) for i, (row, _) in enumerate(several) if row.token_ids.size
    ]
    passes = split_passes(rows, max_tokens, packed=packed, shares=shares)
    assert sorted(index for chosen in passes for index in chosen) == list(range(len(rows)))
    for chosen in passes:
        num_inputs = _num_inputs([rows[i] for i in chosen], packed=packed, shares=shares)
        assert num_inputs <= max_tokens or len(chosen) == 1


def test_a_tree_costs_what_its_branches_do_not_share() -> None:
    """Eight branches of 10 tokens follow a path of 400: a prompt of 300, and 100 of branch 0."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 1000, count).tolist())

    branches = [Branch(draw(110), -1, 300, (True,) * 110)]
    branches += [Branch(draw(10), 0, 400, (True,) * 10) for _ in range(7)]
    row = tree_row(draw(300), branches)
    assert sum(input_lengths(row)) == 8 * 409
    assert _num_inputs([row]) == 300 + 110 + 7 * 10 - 8
    # Both fit into 2 · 480 tokens plus the bound for short shared pieces.
    two = [row, replace(row, group_id=1, prompt_token_ids=row.prompt_token_ids + 1)]
    assert split_passes(two, 2 * (480 + 7 * 15), shares=True) == [[0, 1]]
    assert split_passes(two, 2 * (480 + 7 * 15) - 1, shares=True) == [[0], [1]]
    assert split_passes(two, 2 * 480, shares=False) == [[0], [1]]
