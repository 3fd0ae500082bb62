from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlsys.engines.models.collate import collate, collate_whole, input_lengths, split_passes
from rlsys.types import TrainRow
from tests.errors import invalid


def make_row(prompt: list[int], tokens: list[int], mask: list[bool] | None = None) -> TrainRow:
    """Make a row whose log-probabilities, advantages and versions differ between tokens."""
    return TrainRow(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        policy_versions=np.arange(len(tokens), dtype=np.int32),
        loss_mask=np.array([True] * len(tokens) if mask is None else mask, np.bool_),
        columns={
            "sampler_logprobs": -np.array(tokens, np.float32),
            "advantages": np.array([token / 2 for token in tokens], np.float32),
        },
        group_id=7,
        group_size=2,
        group_num_tokens=9,
    )


def test_two_rollouts_by_hand() -> None:
    rows = [make_row([1, 2], [3, 4, 5], [True, False, True]), make_row([6], [8])]
    batch = collate(rows, columns=["sampler_logprobs", "advantages"])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6]]
    # Token 3 is predicted at the place of 2, 5 at that of 4, 8 at that of 6.
    assert batch.positions.tolist() == [1, 3, 4]
    assert batch.packing is not None
    assert batch.packing.position_ids.tolist() == [[0, 1, 2, 3, 0]]
    assert batch.targets.tolist() == [3, 5, 8]
    assert {name: column.tolist() for name, column in batch.columns.items()} == {
        "sampler_logprobs": [-3, -5, -8],
        "advantages": [1.5, 2.5, 4.0],
    }
    assert batch.policy_versions.tolist() == [0, 2, 0]
    assert batch.row_index.tolist() == [0, 0, 1]


def test_shared_prefixes_by_hand() -> None:
    rows = [make_row([1, 2], [3, 4]), make_row([1, 2], [5]), make_row([1, 2], [3, 6])]
    batch = collate(rows, columns=["sampler_logprobs"])
    # Each token that predicts another, once.
    assert batch.input_ids.tolist() == [[1, 2, 3]]
    # 3 after 2 is read once for two rows.
    assert batch.read_at is not None
    read = list(zip(batch.positions.tolist(), batch.targets.tolist(), strict=True))
    assert sorted(read) == [(1, 3), (1, 5), (2, 4), (2, 6)]
    assert [read[i] for i in batch.read_at.tolist()] == [(1, 3), (2, 4), (1, 5), (1, 3), (2, 6)]
    assert batch.row_index.tolist() == [0, 0, 1, 2, 2]
    assert batch.columns["sampler_logprobs"].tolist() == [-3, -4, -5, -3, -6]
    assert batch.spread(torch.tensor([10.0, 20.0, 30.0, 40.0])).shape == (5,)


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8))
def test_passes_that_share_prompts_stay_within_the_limit(prompts: list[list[int]]) -> None:
    rows = [
        replace(make_row(prompt, [2] * (len(prompt) + 1)), group_id=index // 3)
        for index, prompt in enumerate(prompts)
    ]
    passes = split_passes(rows, 12, shares=True)
    assert sorted(index for chosen in passes for index in chosen) == list(range(len(rows)))
    for chosen in passes:
        inputs = collate([rows[index] for index in chosen]).input_ids.shape[1]
        assert inputs <= 12 or len(chosen) == 1


def test_two_padded_rollouts_by_hand() -> None:
    batch = collate([make_row([6], [8]), make_row([1, 2], [3, 4, 5])], packed=False)
    assert batch.input_ids.tolist() == [[6, 0, 0, 0], [1, 2, 3, 4]]
    assert batch.positions.tolist() == [0, 5, 6, 7]
    assert batch.targets.tolist() == [8, 3, 4, 5]
    assert batch.packing is None


def test_an_empty_pass_has_one_input_without_targets() -> None:
    batch = collate([], columns=["values"])
    assert batch.input_ids.shape == (1, 1)
    assert len(batch.targets) == len(batch.row_index) == len(batch.columns["values"]) == 0


def test_a_column_of_another_length_is_rejected() -> None:
    short = replace(make_row([1], [2, 3]), columns={"values": np.zeros(1, np.float32)})
    with invalid("values") as found:
        collate([short], columns=["values"])
    assert "group 7" in found.value.rule
    assert "shape (1,) for 2 " in found.value.rule


def test_an_empty_prompt_is_refused() -> None:
    with invalid("prompt_token_ids") as found:
        collate([make_row([1], [2]), make_row([], [3])])
    assert "group 7" in found.value.rule


rows = st.builds(
    lambda num_prompt, num_tokens: make_row([1] * num_prompt, [2] * num_tokens),
    st.integers(1, 6),
    st.integers(0, 30),
)


@given(rows=st.lists(rows, max_size=20), max_tokens=st.integers(1, 100), packed=st.booleans())
def test_passes_hold_each_row_once_and_stay_within_the_limit(
    rows: list[TrainRow], max_tokens: int, packed: bool
) -> None:
    passes = split_passes(rows, max_tokens, packed=packed)
    assert sorted(index for chosen in passes for index in chosen) == list(range(len(rows)))
    for chosen in passes:
        lengths = [sum(input_lengths(rows[index])) for index in chosen]
        num_tokens = sum(lengths) if packed else len(chosen) * max(lengths)
        assert num_tokens <= max_tokens or len(chosen) == 1


@given(rows=st.lists(rows, min_size=1, max_size=20))
def test_rows_of_a_pass_are_neighbours_in_length(rows: list[TrainRow]) -> None:
    lengths = [sum(input_lengths(rows[i])) for chosen in split_passes(rows, 40) for i in chosen]
    assert lengths == sorted(lengths, reverse=True)


@given(rows=st.lists(rows, min_size=1, max_size=8), packed=st.booleans())
def test_each_target_is_the_input_after_its_position(rows: list[TrainRow], packed: bool) -> None:
    batch = collate(rows, packed=packed, shares=False)
    flat = batch.input_ids.flatten()
    lengths = np.array([sum(input_lengths(row)) for row in rows])
    starts = np.cumsum(lengths) - lengths if packed else np.arange(len(rows)) * lengths.max()
    last_of_row = set((starts + lengths - 1).tolist())
    for place, target in zip(batch.positions.tolist(), batch.targets.tolist(), strict=True):
        assert place in last_of_row or flat[place + 1] == target


@given(rows=st.lists(rows, max_size=20), max_tokens=st.integers(1, 100), packed=st.booleans())
def test_whole_groups_stay_together(rows: list[TrainRow], max_tokens: int, packed: bool) -> None:
    rows = [replace(row, group_id=index // 2) for index, row in enumerate(rows)]
    passes = split_passes(rows, max_tokens, packed=packed, whole_groups=True)
    assert sorted(index for chosen in passes for index in chosen) == list(range(len(rows)))
    of_group: dict[int, int] = {}
    for number, chosen in enumerate(passes):
        for index in chosen:
            assert of_group.setdefault(rows[index].group_id, number) == number
        lengths = [sum(input_lengths(rows[index])) for index in chosen]
        num_tokens = sum(lengths) if packed else len(chosen) * max(lengths)
        assert num_tokens <= max_tokens or len({rows[index].group_id for index in chosen}) == 1


def test_whole_rows_are_read_at_their_last_tokens() -> None:
    rows = [make_row([1, 2], [3, 4]), make_row([6], [8, 0]), make_row([0], [0])]
    batch = collate_whole(rows, columns=["advantages"], unread=0, shares=False)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6, 8, 0]]
    assert batch.positions.tolist() == [3, 5, 6]
    assert batch.row_index.tolist() == [0, 1, 2]
    assert batch.group_ids.tolist() == [7, 7, 7]
    assert batch.columns["advantages"].tolist() == [2, 0, 0]
    padded = collate_whole(rows, packed=False, fill=9)
    assert padded.input_ids.tolist() == [[1, 2, 3, 4], [6, 8, 0, 9], [0, 0, 9, 9]]
    assert padded.positions.tolist() == [3, 6, 9]
    assert collate_whole([], columns=["advantages"]).columns["advantages"].shape == (0,)
