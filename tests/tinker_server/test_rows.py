"""From data to rows: what the engine is given, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.api_losses import KINDS
from rlsys.tinker_server.datum_rows import ModelLimits, rows_of
from rlsys.tinker_server.protobuf_messages import WireDatum

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


def test_other_targets_are_asked_for_beside() -> None:
    data = [datum([1, 2], [[5, 6], [7, 8]], weights=[[1, 2], [3, 4]]), datum([3], [4], weights=[1])]
    found = rows_of(data, "cross_entropy", KINDS["cross_entropy"], LIMITS)
    assert (found.num_targets, found.shapes) == (2, [(2, 2), (1,)])
    first, second = found.rows
    assert first.token_ids.tolist() == [2, 0]
    assert first.columns["targets"].reshape(2, 5)[:, :2].tolist() == [[5, 6], [7, 8]]
    assert first.columns["weights"].tolist() == [1, 2, 3, 4]
    assert second.columns["weights"].tolist() == [1, 0]  # the second target has no weight


@pytest.mark.parametrize(
    ("data", "loss", "told"),
    [
        ([], "ppo", "got no data"),
        ([datum([], [])], "ppo", "datum 0 has no input token"),
        ([datum([1] * 5, [1] * 5)], "ppo", "has 5 tokens; the model's context ends at 4"),
        ([datum([1, 10], [1, 1])], "cross_entropy", "datum 0 has a token 10.*0 to 9"),
        ([datum([1, 1], [1, -100])], "cross_entropy", "datum 0 has a target -100"),
        ([datum([1, 1], [1])], "ppo", r"shape \(1,\) for 2 input tokens"),
        ([datum([1], [1], logprobs=[0])], "ppo", "datum 0 lacks advantages"),
        (
            [datum([1], [1], weights=[0, 1])],
            "cross_entropy",
            r"weights of datum 0 has shape \(2,\)",
        ),
        ([datum([1], [1], weights=[np.nan])], "cross_entropy", "not finite"),
        (
            [datum([1], [[1, 2]], logprobs=[[0, 0]], advantages=[[0, 0]])],
            "ppo",
            "ppo takes one target",
        ),
        (
            [datum([1], [1], logprobs=[0], advantages=[1])],
            "gspo",
            "lacks sequence_ratio_mask",
        ),
    ],
)
def test_what_does_not_fit_is_refused(data: list[WireDatum], loss: str, told: str) -> None:
    with pytest.raises(ApiError, match=told):
        rows_of(data, loss, KINDS[loss], LIMITS)


def test_data_without_targets_is_refused() -> None:
    bare = WireDatum(token_ids=np.array([1], np.int32), tensors={})
    with pytest.raises(ApiError, match="every loss needs target_tokens"):
        rows_of([bare], "cross_entropy", KINDS["cross_entropy"], LIMITS)
