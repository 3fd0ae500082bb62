"""Conversion between the API's protobuf messages and arrays.

Shape legend: N input tokens of a datum, K targets of each, V requested places.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from rlsys.tinker_server import protobuf_schema
from rlsys.tinker_server.api_errors import ApiError
from rlsys.types import Float32Array, Int32Array

Array = npt.NDArray[np.generic]

PROTOBUF = "application/x-protobuf"

# Log-probability of places without top-k, as the client expects it.
MASK_LOGPROB = -99999.0


@dataclass(frozen=True, kw_only=True)
class SparseArray:
    """A checked sparse array of two dimensions (CSR): nonzero values row by row.

    It may be far larger when it is expanded, so check its shape before.
    """

    shape: tuple[int, int]
    values: Array
    row_starts: npt.NDArray[np.int64]  # [rows + 1] into `values`
    columns: npt.NDArray[np.int64]  # of each value

    @property
    def dense(self) -> Array:
        """The whole array, expanded anew at each access."""
        found: Array = np.zeros(self.shape, self.values.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.row_starts))
        found[rows, self.columns] = self.values
        return found


@dataclass(frozen=True, kw_only=True)
class DatumSpan:
    """A range of the tokens of one sampled sequence, or of its prompt.

    It is the range [offset, offset + length).
    """

    is_sampled: bool
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class WireDatum:
    """A datum as it was sent, not yet checked against a model or a loss.

    The spans name the origin of input tokens and targets. They are None without provenance.
    """

    token_ids: Int32Array  # [N]
    tensors: Mapping[str, Array | SparseArray]  # [N] or [N, K], float32 or int64
    input_spans: Sequence[DatumSpan] | None = None
    target_spans: Sequence[DatumSpan] | None = None


@dataclass(frozen=True, kw_only=True)
class WirePass:
    """A forward_backward request. `problem` is the error if its data cannot be read."""

    model_id: str
    seq_id: int
    data: Sequence[WireDatum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool
    problem: ApiError | None = None


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The most likely tokens at each of some places."""

    token_ids: Int32Array  # [V, K]
    logprobs: Float32Array  # [V, K]


@dataclass(frozen=True, kw_only=True)
class WireSequence:
    """A sampled sequence for an answer."""

    token_ids: Int32Array
    logprobs: Float32Array
    is_stopped: bool  # by a stop token or string, not by its length
    top_k: TopK | None = None


def decode_pass(body: bytes) -> WirePass:
    """Return the request in a body. Errors in its data are returned as its `problem`.

    The command counts even if its data cannot be read, because it has a number.

    Raises:
        ApiError: 400, the bytes are not such a message.
    """
    message = protobuf_schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ApiError(
            "body",
            rule=f"its {len(body)} bytes are not a ForwardBackwardRequest ({error})",
            fix="Use the tinker client 0.38.",
            status=400,
        ) from None
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.HasField("text") else value.number
    data: list[WireDatum] = []
    problem: ApiError | None = None
    try:
        for number, datum in enumerate(message.data):
            data.append(_datum(number, datum))
    except ApiError as error:
        data, problem = [], error
    return WirePass(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss=message.loss_fn,
        config=config,
        forward_only=message.forward_only,
        problem=problem,
    )


def _datum(number: int, datum: Any) -> WireDatum:
    chunks = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            is_other = chunk.HasField("image") or chunk.HasField("dmel")
            what = "an image or sound" if is_other else "a chunk without encoded text"
            raise ApiError(
                f"data[{number}]",
                rule=f"it has {what}, and this server's models only read tokens",
                fix="Send encoded text.",
            )
        chunks.append(_array(chunk.encoded_text.tokens, np.int32, f"data[{number}].tokens"))
    return WireDatum(
        token_ids=np.concatenate(chunks) if chunks else np.zeros(0, np.int32),
        tensors={
            name: _tensor(tensor, f"data[{number}].{name}")
            for name, tensor in datum.loss_fn_inputs.items()
        },
        input_spans=_spans(datum.model_input_spans),
        target_spans=_spans(datum.loss_fn_input_spans),
    )


def _spans(messages: Any) -> list[DatumSpan] | None:
    """Return the spans of a field, or None if it has none."""
    found = []
    for one in messages:
        is_sampled = one.HasField("sampled_tokens")
        tokens = one.sampled_tokens if is_sampled else one.prompt_tokens
        found.append(
            DatumSpan(
                is_sampled=is_sampled,
                sequence_id=tokens.sequence_id,
                offset=tokens.offset,
                length=tokens.length,
            )
        )
    return found or None


def dense(tensor: Array | SparseArray) -> Array:
    """Return a tensor as an array."""
    return tensor.dense if isinstance(tensor, SparseArray) else tensor


def _tensor(tensor: Any, what: str) -> Array | SparseArray:
    dtypes: dict[int, Any] = {protobuf_schema.FLOAT32: np.float32, protobuf_schema.INT64: np.int64}
    if tensor.dtype not in dtypes:
        raise ApiError(
            what, tensor.dtype, rule="the dtype is not supported", fix="Send float32 or int64."
        )
    dtype, shape = dtypes[tensor.dtype], tuple(tensor.shape)
    if tensor.HasField("sparse_csr"):
        return _sparse(tensor.sparse_csr, dtype, shape, what)
    values = _array(tensor.dense, dtype, what)
    if not shape:
        return _typed(values)
    if min(shape) >= 0 and math.prod(shape) == len(values):
        # numpy also refuses many dimensions, and huge sizes in an empty array
        with contextlib.suppress(ValueError):
            return _typed(values.reshape(shape))
    raise ApiError(
        what,
        rule=f"it has {len(values)} values, which do not fit the shape {shape}",
        fix="Send one value per element.",
    )


def _typed(array: Any) -> Array:
    found: Array = array
    return found


def _sparse(sparse: Any, dtype: Any, shape: tuple[int, ...], what: str) -> SparseArray:
    values = _array(sparse.values, dtype, what)
    rows = _array(sparse.crow_indices, np.int64, what)
    columns = _array(sparse.col_indices, np.int64, what)
    is_right = (
        len(shape) == 2
        and min(shape) >= 0
        and len(rows) == shape[0] + 1
        and len(columns) == len(values)
        and rows[0] == 0
        and rows[-1] == len(values)
        and bool((np.diff(rows) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_right:
        raise ApiError(
            what, rule=f"it is not a sparse array (CSR) of shape {shape}", fix="Check its indices."
        )
    return SparseArray(shape=(shape[0], shape[1]), values=values, row_starts=rows, columns=columns)


def _array(data: bytes, dtype: Any, what: str) -> Any:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise ApiError(
            what,
            rule=f"it has {len(data)} bytes, which is not a multiple of {size}",
            fix="Send whole numbers of the dtype.",
        )
    return np.frombuffer(data, dtype)


def encode_pass(logprobs: Sequence[Float32Array], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput.

    Args:
        logprobs: Log-probabilities of each datum's targets, [N] or [N, K].
        metrics: Numbers. The end of a name says how the client merges those of several parts
            (":sum").
    """
    message = protobuf_schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    start = 0
    while start < len(logprobs):  # one record for neighbours of the same trailing shape
        trailing = logprobs[start].shape[1:]
        stop = start
        while stop < len(logprobs) and logprobs[stop].shape[1:] == trailing:
            stop += 1
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        arrays = [np.ascontiguousarray(one, np.float32) for one in logprobs[start:stop]]
        field = record.fields["logprobs"]
        field.data = b"".join(one.tobytes() for one in arrays)
        field.offsets = np.cumsum([0, *(one.nbytes for one in arrays)], dtype=np.int64).tobytes()
        field.dtype = protobuf_schema.FLOAT32
        field.trailing_shape.extend(trailing)
        start = stop
    encoded: bytes = message.SerializeToString()
    return encoded


def encode_sample(
    sequences: Sequence[WireSequence],
    *,
    prompt_logprobs: Float32Array | None = None,
    prompt_top_k: TopK | None = None,
) -> bytes:
    """Return a SampleResponse. `prompt_logprobs` [P] is NaN where nothing was scored."""
    message = protobuf_schema.SampleResponse()
    for one in sequences:
        sequence = message.sequences.add(
            stop_reason=protobuf_schema.STOP if one.is_stopped else protobuf_schema.LENGTH,
            tokens=one.token_ids.astype(np.int32).tobytes(),
            logprobs=one.logprobs.astype(np.float32).tobytes(),
        )
        if one.top_k is not None:
            _set_top_k(sequence.topk_sampled_logprobs, one.top_k)
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if prompt_top_k is not None:
        _set_top_k(message.topk_prompt_logprobs, prompt_top_k)
    encoded: bytes = message.SerializeToString()
    return encoded


def _set_top_k(message: Any, top_k: TopK) -> None:
    message.token_ids = np.ascontiguousarray(top_k.token_ids, np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(top_k.logprobs, np.float32).tobytes()
    message.length, message.k = top_k.token_ids.shape
