"""Training data that names the sampled sequences it comes from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.protobuf_messages import DatumSpan, WireDatum, dense
from rlsys.tinker_server.provenance import with_records
from rlsys.tinker_server.stability import RecordedSequence, StabilityRecords
from tests.tinker_server.clocks import Clock


def sequence(prompt: list[int], tokens: list[int], logprobs: list[float]) -> RecordedSequence:
    return RecordedSequence(
        prompt=np.array(prompt, np.int32),
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array(logprobs, np.float32),
    )


FIRST = sequence([1, 2], [3, 4], [-0.5, -0.25])
SECOND = sequence([1, 2, 3, 4, 5], [6], [-2.0])  # the next turn


def prompt(name: str, length: int, offset: int = 0) -> DatumSpan:
    return DatumSpan(is_sampled=False, sequence_id=name, offset=offset, length=length)


def sampled(name: str, length: int, offset: int = 0) -> DatumSpan:
    return DatumSpan(is_sampled=True, sequence_id=name, offset=offset, length=length)


# Two turns in one datum: input 1 2 3 4 5, targets 2 3 4 5 6; padding where nothing was sampled.
DATUM = WireDatum(
    token_ids=np.array([1, 2, 3, 4, 5], np.int32),
    tensors={
        "target_tokens": np.array([0, 3, 4, 0, 6]),
        "advantages": np.array([0.0, 1.0, 1.0, 0.0, -1.0], np.float32),
    },
    input_spans=[prompt("a", 2), sampled("a", 2), prompt("b", 1, offset=4)],
    target_spans=[prompt("a", 1, offset=1), sampled("a", 2), prompt("b", 1, 4), sampled("b", 1)],
)


def records() -> StabilityRecords:
    found = StabilityRecords(Clock())
    found.add("s", "a", FIRST)
    found.add("s", "b", SECOND)
    return found


def test_recorded_log_probabilities_replace_those_of_the_client() -> None:
    claimed = {**DATUM.tensors, "logprobs": np.full(5, -9.0, np.float32)}
    (found,) = with_records([replace(DATUM, tensors=claimed)], records(), "s")
    assert dense(found.tensors["logprobs"]).tolist() == [0.0, -0.5, -0.25, 0.0, -2.0]
    assert dense(found.tensors["sampled"]).tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ({"target_spans": None, "input_spans": None}, "provenance"),
        ({"token_ids": np.array([1, 2, 3, 9, 5], np.int32)}, "tokens=9"),
        ({"target_spans": [sampled("a", 2)]}, "2 positions of 5"),
        ({"target_spans": [*DATUM.target_spans[:3], sampled("b", 1, 1)]}, "'b'"),  # type: ignore[index]
        ({"target_spans": [prompt("a", 2), sampled("c", 3)]}, "'c'"),
        (
            {"tensors": {**DATUM.tensors, "target_tokens": np.array([0, 3, 7, 0, 6])}},
            "target_tokens=7",
        ),
        ({"tensors": {**DATUM.tensors, "advantages": np.ones(5, np.float32)}}, "position 0"),
    ],
)
def test_data_that_contradicts_the_records_is_refused(
    changed: dict[str, object], value: str
) -> None:
    with pytest.raises(ApiError) as refused:
        with_records([DATUM, replace(DATUM, **changed)], records(), "s")  # type: ignore[arg-type]
    if "'c'" not in value:
        assert "data[1]" in str(refused.value)
    assert value in str(refused.value)


def test_sequences_of_another_session_are_unknown() -> None:
    with pytest.raises(ApiError):
        with_records([DATUM], records(), "other")


def test_records_are_kept_for_a_day_after_their_last_use() -> None:
    clock = Clock()
    found = StabilityRecords(clock, keep_s=10)
    found.add("s", "a", FIRST)
    found.add("s", "b", SECOND)
    clock.now += 6
    found.get("s", "a")
    clock.now += 6
    found.expire()
    assert found.get("s", "a") is FIRST
    with pytest.raises(ApiError):
        found.get("s", "b")
    found.drop_all_of("s")
    with pytest.raises(ApiError):
        found.get("s", "a")


def test_the_least_recently_used_records_make_room() -> None:
    size = FIRST.num_bytes
    assert size == 8 + 8 + 8
    found = StabilityRecords(Clock(), max_bytes=2 * size)
    found.add("s", "a", FIRST)
    found.add("s", "b", FIRST)
    found.get("s", "a")
    found.add("s", "c", FIRST)
    assert found.get("s", "a") is found.get("s", "c")
    with pytest.raises(ApiError):
        found.get("s", "b")
