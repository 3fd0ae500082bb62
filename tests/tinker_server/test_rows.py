"""Conversion of data to rows of the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlsys.tinker_server.api_losses import KINDS
from rlsys.tinker_server.datum_rows import ModelLimits, rows_of
from rlsys.tinker_server.protobuf_messages import WireDatum
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
    assert found.num_targets == 0
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
    assert (found.num_targets, found.shapes) == (2, [(2, 2), (1,)])
    first, second = found.rows
    assert first.token_ids.tolist() == [2, 0]
    assert first.columns["targets"].reshape(2, 5)[:, :2].tolist() == [[5, 6], [7, 8]]
    assert first.columns["weights"].tolist() == [1, 2, 3, 4]
    assert second.columns["weights"].tolist() == [1, 0]  # the second target has no weight


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
    for bad in (2.5, np.inf, -np.inf):
        with refused("data[0].target_tokens", bad):
            found([2.0, bad])


def test_data_without_targets_is_refused() -> None:
    bare = WireDatum(token_ids=np.array([1], np.int32), tensors={})
    with refused("data[0]"):
        rows_of([bare], "cross_entropy", KINDS["cross_entropy"], LIMITS)
