"""Provenance of training data: the sampled sequence that each token of a datum comes from.

    spans of a datum + recorded sequences ──► the same datum with "logprobs" and "sampled"

Spans tile the input tokens and the targets of a datum. A span of sampled tokens names a sequence
and a range of its tokens. A span of prompt tokens names a range of the sequence's prompt. Only
sampled targets have a recorded log-probability, and only they may have an advantage.

Shape legend: N input tokens of a datum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlsys.tinker_server.api_errors import ApiError
from rlsys.tinker_server.protobuf_messages import DatumSpan, WireDatum
from rlsys.tinker_server.stability import RecordedSequence, StabilityRecords

# Added columns: whether a target was sampled, and its recorded log-probability.
SAMPLED, LOGPROBS = "sampled", "logprobs"


def with_records(
    data: Sequence[WireDatum], records: StabilityRecords, session: str
) -> list[WireDatum]:
    """Return the data with recorded log-probabilities of all sampled targets.

    Raises:
        ApiError: Provenance is missing or contradicts the recorded tokens.
    """
    return [_with_records(number, datum, records, session) for number, datum in enumerate(data)]


def _with_records(
    number: int, datum: WireDatum, records: StabilityRecords, session: str
) -> WireDatum:
    if datum.input_spans is None or datum.target_spans is None:
        raise ApiError(
            f"data[{number}]",
            rule="it has no provenance, which stable_reinforce needs",
            fix="Add it with Datum.with_provenance.",
        )
    targets = datum.tensors.get("target_tokens")
    size = len(datum.token_ids)
    if not isinstance(targets, np.ndarray) or targets.shape != (size,):
        raise ApiError(
            f"data[{number}].target_tokens",
            rule=f"must have shape ({size},), one for each input token",
            fix="Change the targets.",
        )
    for start, span, sequence in _placed(
        number, "model_input", datum.input_spans, size, records, session
    ):
        known = sequence.token_ids if span.is_sampled else sequence.prompt
        _check_tokens(number, "tokens", datum.token_ids[start : start + span.length], span, known)
    sampled, logprobs = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for start, span, sequence in _placed(
        number, "loss_fn_inputs", datum.target_spans, size, records, session
    ):
        if not span.is_sampled:  # targets of prompts are padding
            continue
        place = slice(start, start + span.length)
        _check_tokens(number, "target_tokens", targets[place], span, sequence.token_ids)
        sampled[place] = 1.0
        logprobs[place] = sequence.logprobs[span.offset : span.offset + span.length]
    _check_advantages(number, datum, sampled)
    return replace(datum, tensors={**datum.tensors, SAMPLED: sampled, LOGPROBS: logprobs})


def _placed(
    number: int,
    field: str,
    spans: Sequence[DatumSpan],
    size: int,
    records: StabilityRecords,
    session: str,
) -> Iterator[tuple[int, DatumSpan, RecordedSequence]]:
    """Yield each span with its start in the datum and its sequence, and check the tiling."""
    total = sum(one.length for one in spans)
    if total != size or any(one.length < 0 or one.offset < 0 for one in spans):
        raise ApiError(
            f"data[{number}].{field}",
            rule=f"the spans cover {total} positions of {size}",
            fix="Spans must tile them exactly.",
        )
    start = 0
    for span in spans:
        sequence = records.get(session, span.sequence_id)
        known = sequence.token_ids if span.is_sampled else sequence.prompt
        if span.offset + span.length > len(known):
            raise ApiError(
                f"data[{number}].{field}",
                rule=f"a span ends at {span.offset + span.length} of {len(known)} tokens of "
                f"{span.sequence_id!r}",
                fix="Name a range within the sequence.",
            )
        yield start, span, sequence
        start += span.length


def _check_tokens(number: int, what: str, tokens: Any, span: DatumSpan, known: Any) -> None:
    expected = known[span.offset : span.offset + span.length]
    if (different := np.flatnonzero(np.asarray(tokens) != expected)).size:
        place = int(different[0])
        raise ApiError(
            f"data[{number}].{what}",
            int(tokens[place]),
            rule=f"{span.sequence_id!r} has {int(expected[place])} at this place",
            fix="Name the sequence that the tokens come from.",
        )


def _check_advantages(number: int, datum: WireDatum, sampled: Any) -> None:
    advantages = datum.tensors.get("advantages")
    if advantages is None or advantages.shape != sampled.shape:
        return  # checked with the other inputs of the loss
    if (wrong := np.flatnonzero((np.asarray(advantages) != 0) & (sampled == 0))).size:
        raise ApiError(
            f"data[{number}].advantages",
            rule=f"must be 0 at position {int(wrong[0])}, which was not sampled",
            fix="Set advantages to 0 there.",
        )
