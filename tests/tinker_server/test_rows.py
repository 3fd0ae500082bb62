"""Conversion of data to rows of the engine."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.tinker_server import datum_rows
from rlsys.tinker_server.api_losses import KINDS
from rlsys.tinker_server.datum_rows import MAX_TARGETS, DataRows, ModelLimits, rows_of, turns
from rlsys.tinker_server.protobuf_messages import SparseArray, WireDatum
from tests.tinker_server.refusals import refused

LIMITS = ModelLimits(vocab_size=10, max_context=4)


def datum(tokens: list[int], targets: Any, **tensors: Any) -> WireDatum:
    return WireDatum(
        token_ids=np.array(tokens, np.int32),
        tensors={
            "target_tokens": np.array(targets, np.int64),
            **{name: np.array(values, np.float32) for name, values in tensors.items()},
        },
    )


def test_targets_that_follow_the_input_make_an_ordinary_row() -> None:
    data = [datum([1, 2, 3], [2, 3, 4], weights=[0, 0, 1]), datum([1, 2], [2, 5], weights=[0, 1])]
    found = rows_of(data, "cross_entropy", KINDS["cross_entropy"], LIMITS)
    assert found.num_targets == [0, 0]
    first, second = found.rows
    assert (first.prompt_token_ids.tolist(), first.token_ids.tolist()) == ([1], [2, 3, 4])
    assert first.columns["weights"].tolist() == [0, 0, 1]
    assert second.columns["datum"].tolist() == [1, 1]
    assert first.group_id != second.group_id  # other prompts
    assert found.shapes == [(3,), (2,)]


def test_rows_of_one_prompt_are_a_group() -> None:
    data = [
        datum([1, 2, last], [2, last, 9], logprobs=[0, -1, -1], advantages=[0, 1, 1])
        for last in (3, 4)
    ]
    first, second = rows_of(data, "ppo", KINDS["ppo"], LIMITS).rows
    assert first.group_id == second.group_id
    assert sorted(first.columns) == ["advantages", "datum", "sampler_logprobs"]


def test_other_targets_become_candidates() -> None:
    data = [datum([1, 2], [[5, 6], [7, 8]], weights=[[1, 2], [3, 4]]), datum([3], [4], weights=[1])]
    found = rows_of(data, "cross_entropy", KINDS["cross_entropy"], LIMITS)
    assert (found.num_targets, found.shapes) == ([2, 1], [(2, 2), (1,)])
    first, second = found.rows
    assert first.token_ids.tolist() == [2, 0]
    assert first.columns["targets"].reshape(2, 5)[:, :2].tolist() == [[5, 6], [7, 8]]
    assert first.columns["weights"].tolist() == [1, 2, 3, 4]
    assert second.columns["targets"].tolist() == [4, 0, 0]  # not padded to the largest K
    assert second.columns["weights"].tolist() == [1]


def test_numbers_of_candidates_are_rounded_up_to_a_power_of_two() -> None:
    data = [datum([1], [list(range(k))], weights=[[1] * k]) for k in (1, 2, 3, 4, 5)]
    found = rows_of(data, "cross_entropy", KINDS["cross_entropy"], LIMITS)
    assert found.num_targets == [1, 2, 4, 4, 8]
    assert found.rows[2].columns["weights"].tolist() == [1, 1, 1, 0]
    assert found.rows[2].columns["targets"][:4].tolist() == [0, 1, 2, 0]


def sparse(shape: tuple[int, int], dtype: Any = np.int64) -> SparseArray:
    """Return an array of the shape with 7 in its first place."""
    starts = np.array([0] + [1] * shape[0])
    return SparseArray(
        shape=shape, values=np.array([7], dtype), row_starts=starts, columns=np.array([0])
    )


def sparse_datum(shape: tuple[int, int]) -> WireDatum:
    tokens = np.zeros(shape[0], np.int32)
    return WireDatum(token_ids=tokens, tensors={"target_tokens": sparse(shape)})


def test_sparse_targets_and_weights_are_expanded() -> None:
    tensors = {"target_tokens": sparse((2, 3)), "weights": sparse((2, 3), np.float32)}
    one = WireDatum(token_ids=np.array([1, 2], np.int32), tensors=tensors)
    (row,) = rows_of([one], "cross_entropy", KINDS["cross_entropy"], LIMITS).rows
    assert row.columns["targets"].reshape(2, 9)[:, :4].tolist() == [[7, 0, 0, 0], [0, 0, 0, 0]]
    assert row.columns["weights"].tolist() == [7, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("vocabulary", "most"), [(10, 10), (10**6, MAX_TARGETS)])
def test_a_position_has_as_many_targets_as_the_vocabulary_or_fewer(
    vocabulary: int, most: int
) -> None:
    limits = ModelLimits(vocab_size=vocabulary, max_context=4)
    kind = KINDS["cross_entropy"]
    assert rows_of([sparse_datum((1, most))], "cross_entropy", kind, limits).shapes == [(1, most)]
    dense = datum([1], np.zeros((1, most + 1)))
    # The last one cannot be expanded in any memory.
    for wrong in (dense, sparse_datum((1, most + 1)), sparse_datum((1, 2**60))):
        with refused("data[0].target_tokens"):
            rows_of([wrong], "cross_entropy", kind, limits)


def test_targets_of_a_request_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datum_rows, "MAX_REQUEST_TARGETS", 12)
    data = [sparse_datum((2, 3)), sparse_datum((3, 2)), datum([1, 2], [5, 5])]
    kind = KINDS["cross_entropy"]
    assert len(rows_of(data, "cross_entropy", kind, LIMITS).rows) == 3
    with refused("data"):
        rows_of([*data, sparse_datum((1, 1))], "cross_entropy", kind, LIMITS)


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4, 9]))), st.booleans())
def test_turns_have_few_tokens_few_targets_and_one_number_of_candidates(
    sizes: list[tuple[int, int]], is_aligned: bool
) -> None:
    data = [
        datum([1] * n, [1] * n if is_aligned else np.full((n, k), 2)) for n, k in [(1, 1), *sizes]
    ]
    found = rows_of(data, "cross_entropy", KINDS["cross_entropy"], LIMITS)
    seen = []
    for num_targets, part in turns(found, max_tokens=7, max_targets=12):
        numbers = [int(row.columns["datum"][0]) for row in part]
        assert {found.num_targets[number] for number in numbers} == {num_targets}
        assert numbers == sorted(numbers)
        num_tokens = sum(1 + len(row.token_ids) for row in part)
        num_all = sum(len(row.token_ids) * num_targets for row in part)
        assert len(part) == 1 or (num_tokens <= 7 and num_all <= 12)
        seen += numbers
    assert sorted(seen) == list(range(len(data)))


def test_a_turn_is_as_long_as_the_limits_allow() -> None:
    data = [datum([1, 1], np.full((2, k), 2)) for k in (4, 1, 4, 1, 1)]
    found: DataRows = rows_of(data, "cross_entropy", KINDS["cross_entropy"], LIMITS)
    for max_targets, expected in ((16, [(1, 3), (4, 2)]), (8, [(1, 3), (4, 1), (4, 1)])):
        parts = turns(found, max_tokens=9, max_targets=max_targets)
        assert [(num_targets, len(part)) for num_targets, part in parts] == expected
    assert len(list(turns(found, max_tokens=6, max_targets=16))) == 3


@pytest.mark.parametrize(
    ("data", "loss", "field"),
    [
        ([], "ppo", "data"),
        ([datum([], [])], "ppo", "data[0]"),
        ([datum([1] * 5, [1] * 5)], "ppo", "data[0]"),
        ([datum([1, 1], [1])], "ppo", "data[0].target_tokens"),
        ([datum([1], [1], logprobs=[0])], "ppo", "data[0].advantages"),
        ([datum([1], [1], weights=[0, 1])], "cross_entropy", "data[0].weights"),
        ([datum([1], [1], weights=[np.nan])], "cross_entropy", "data[0].weights"),
        (
            [datum([1], [[1, 2]], logprobs=[[0, 0]], advantages=[[0, 0]])],
            "ppo",
            "data[0].target_tokens",
        ),
        ([datum([1], [1], logprobs=[0], advantages=[1])], "gspo", "data[0].sequence_ratio_mask"),
    ],
)
def test_data_that_does_not_fit_is_refused(data: list[WireDatum], loss: str, field: str) -> None:
    with refused(field):
        rows_of(data, loss, KINDS[loss], LIMITS)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    for one, field, value in (
        (datum([1, 10], [1, 1]), "tokens", 10),
        (datum([1, 1], [1, -100]), "target_tokens", -100),
    ):
        with refused(f"data[0].{field}", value):
            rows_of([one], "cross_entropy", KINDS["cross_entropy"], LIMITS)


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
def test_inputs_that_the_loss_does_not_have_are_refused(loss: str) -> None:
    inputs = {"logprobs": [0], "advantages": [1]} if loss == "ppo" else {}
    with refused("data[1].weigths"):
        rows_of(
            [datum([1], [1], **inputs), datum([1], [1], **inputs, weigths=[0])],
            loss,
            KINDS[loss],
            LIMITS,
        )


@pytest.mark.parametrize("bad", [0.5, 2, -1])
def test_a_mask_has_zeros_and_ones(bad: float) -> None:
    inputs = {"logprobs": [0, 0], "advantages": [1, 1]}
    whole = datum([1, 2], [2, 3], **inputs, sequence_ratio_mask=[0, 1])
    wrong = datum([1, 2], [2, 3], **inputs, sequence_ratio_mask=[1, bad])
    assert len(rows_of([whole], "gspo", KINDS["gspo"], LIMITS).rows) == 1
    with refused("data[1].sequence_ratio_mask", bad):
        rows_of([whole, wrong], "gspo", KINDS["gspo"], LIMITS)


def test_targets_are_whole_numbers() -> None:
    def found(targets: list[float]) -> list[int]:
        inputs = {"target_tokens": np.array(targets, np.float32)}
        one = WireDatum(token_ids=np.array([1, 2], np.int32), tensors=inputs)
        (row,) = rows_of([one], "cross_entropy", KINDS["cross_entropy"], LIMITS).rows
        return [int(token) for token in row.token_ids]

    assert found([2.0, 3.0]) == [2, 3]
    # 1e30 does not fit int64, 16 is not in the vocabulary.
    for bad in (2.5, np.inf, -np.inf, float(np.float32(1e30)), -(2.0**70), 16.0):
        with refused("data[0].target_tokens", bad), warnings.catch_warnings():
            warnings.simplefilter("error")
            found([2.0, bad])


def test_data_without_targets_is_refused() -> None:
    bare = WireDatum(token_ids=np.array([1], np.int32), tensors={})
    with refused("data[0]"):
        rows_of([bare], "cross_entropy", KINDS["cross_entropy"], LIMITS)
