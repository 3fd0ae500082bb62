"""Messages as the real client writes and reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from rlsys.tinker_server import protobuf_schema
from rlsys.tinker_server.protobuf_messages import (
    DatumSpan,
    TopK,
    WireSequence,
    decode_pass,
    dense,
    encode_pass,
    encode_sample,
)
from tests.tinker_server.refusals import refused


def sent(data: list[types.Datum], **options: object) -> bytes:
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.75, "mode": "text"}
        ),
        model_id="session-1:train:0",
        seq_id=7,
    )
    message = forward_backward_request_to_proto(request)
    for name, value in options.items():
        setattr(message, name, value)
    body: bytes = message.SerializeToString()
    return body


def datum(tokens: list[int], **inputs: object) -> types.Datum:
    chunks = [
        types.EncodedTextChunk(tokens=tokens[:1]),
        types.EncodedTextChunk(tokens=tokens[1:]),
    ]
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def test_a_request_of_the_client_is_read_as_it_was_meant() -> None:
    logprobs = np.array([-0.5, -1.5, 0.0], np.float32)
    body = sent(
        [
            datum([5, 6, 7], target_tokens=[6, 7, 8], logprobs=logprobs),
            datum([1], target_tokens=torch.tensor([[2, 3]]), weights=torch.tensor([[0.5, 0.0]])),
        ]
    )
    found = decode_pass(body)
    assert (found.model_id, found.seq_id, found.loss) == ("session-1:train:0", 7, "ppo")
    assert found.config == {"clip_low_threshold": 0.75, "mode": "text"}
    assert (found.forward_only, found.problem) == (False, None)
    first, second = found.data
    assert first.token_ids.tolist() == [5, 6, 7]
    assert dense(first.tensors["target_tokens"]).tolist() == [6, 7, 8]
    assert dense(first.tensors["logprobs"]).tolist() == logprobs.tolist()
    assert dense(second.tensors["target_tokens"]).tolist() == [[2, 3]]
    assert dense(second.tensors["weights"]).tolist() == [[0.5, 0.0]]
    assert decode_pass(sent([], forward_only=True)).forward_only


def test_the_schema_has_the_clients_numbers_and_types() -> None:
    """Every field that the server knows has the client's number, type and label."""
    pairs: list[tuple[Any, Any]] = [
        (protobuf_schema.ForwardBackwardRequest, pb.ForwardBackwardRequest),
        (protobuf_schema.ForwardBackwardOutput, pb.ForwardBackwardOutput),
        (protobuf_schema.SampleResponse, pb.SampleResponse),
    ]
    seen: set[str] = set()
    messages = [(ours.DESCRIPTOR, theirs.DESCRIPTOR) for ours, theirs in pairs]
    while messages:
        ours, theirs = messages.pop()
        if ours.full_name in seen:
            continue
        seen.add(ours.full_name)
        known = {one.number: one for one in theirs.fields}
        for field in ours.fields:
            same = known[field.number]
            # Enumerations are read as numbers.
            kind = field.TYPE_INT32 if same.type == same.TYPE_ENUM else same.type
            assert (field.name, field.type) == (same.name, kind), ours.full_name
            assert field.is_repeated == same.is_repeated, (ours.full_name, field.name)
            if field.message_type is not None:
                messages.append((field.message_type, same.message_type))
    assert len(seen) > 15


def test_provenance_is_read() -> None:
    plain = datum([5, 6, 7], target_tokens=[6, 7, 8])
    known = plain.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id="a", offset=4, length=2),
            types.SampledProvenanceSpan(sequence_id="a", length=1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id="a", offset=5, length=1),
            types.SampledProvenanceSpan(sequence_id="a", length=2),
        ],
    )
    first, second = decode_pass(sent([plain, known])).data
    assert (first.input_spans, first.target_spans) == (None, None)
    assert second.input_spans == [
        DatumSpan(is_sampled=False, sequence_id="a", offset=4, length=2),
        DatumSpan(is_sampled=True, sequence_id="a", offset=0, length=1),
    ]
    assert second.target_spans == [
        DatumSpan(is_sampled=False, sequence_id="a", offset=5, length=1),
        DatumSpan(is_sampled=True, sequence_id="a", offset=0, length=2),
    ]


def test_sparse_tensors_are_filled_with_zeros() -> None:
    weights = torch.zeros(3, 8)
    weights[0, 2], weights[2, 7] = 1.5, -2.0
    sparse = types.TensorData.from_torch_sparse(weights)
    assert sparse.sparse_crow_indices is not None
    found = decode_pass(sent([datum([1, 2, 3], target_tokens=[1, 2, 3], weights=sparse)]))
    assert dense(found.data[0].tensors["weights"]).tolist() == weights.tolist()
    assert found.data[0].tensors["weights"].shape == (3, 8)


def test_a_sparse_tensor_is_not_expanded_when_it_is_read() -> None:
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(sent([datum([1], target_tokens=[1])]))
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.sparse_csr.values = np.array([7]).tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1]).tobytes()
    tensor.sparse_csr.col_indices = np.array([2**50]).tobytes()
    tensor.shape[:] = [1, 2**60]
    found = decode_pass(message.SerializeToString())
    assert found.problem is None
    assert found.data[0].tensors["target_tokens"].shape == (1, 2**60)
    tensor.shape[:] = [1, 2**50]  # the column is outside
    problem = decode_pass(message.SerializeToString()).problem
    assert problem is not None
    assert problem.field == "data[0].target_tokens"


@pytest.mark.parametrize("shape", [[0, 2**62], [2**32, 2**32], [1] * 65 + [0], [-1, 0], [0]])
def test_an_empty_tensor_of_any_shape_is_an_array_or_refused(shape: list[int]) -> None:
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(sent([datum([1], target_tokens=[1])]))
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.dense = b""
    tensor.shape[:] = shape
    found = decode_pass(message.SerializeToString())
    if shape == [0]:
        assert found.data[0].tensors["target_tokens"].shape == (0,)
    else:
        assert found.problem is not None
        assert found.problem.field == "data[0].target_tokens"


def test_data_that_cannot_be_read_keeps_its_number() -> None:
    image = types.ImageChunk(data=b"x", format="png")
    picture = types.Datum(
        model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={"target_tokens": [1]}
    )
    found = decode_pass(sent([picture]))
    assert (found.seq_id, found.data) == (7, [])
    assert found.problem is not None
    assert found.problem.field == "data[0]"
    assert "image" in found.problem.rule
    message = pb.ForwardBackwardRequest()
    message.data.add().model_input.add()  # a chunk of no kind
    empty = decode_pass(message.SerializeToString()).problem
    assert empty is not None
    assert empty.field == "data[0]"
    assert "image" not in empty.rule
    with refused("body", status=400):
        decode_pass(b"\xff\xff\xff")


def test_a_tensor_of_a_wrong_shape_is_refused() -> None:
    message = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(
                data=[datum([1, 2], target_tokens=[1, 2])], loss_fn="ppo"
            ),
            model_id="m",
            seq_id=1,
        )
    )
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    tensor.shape[:] = [3]
    problem = decode_pass(message.SerializeToString()).problem
    assert problem is not None
    assert problem.field == "data[0].target_tokens"
    assert "2 values" in problem.rule
    assert "(3,)" in problem.rule
    tensor.dense += b"1"
    problem = decode_pass(message.SerializeToString()).problem
    assert problem is not None
    assert "17 bytes" in problem.rule


def test_the_client_reads_log_probabilities_of_all_shapes() -> None:
    logprobs = [
        np.array([-1.0, -2.0], np.float32),
        np.array([-3.0], np.float32),
        np.array([[-4.0, -5.0]], np.float32),
        np.array([-6.0], np.float32),
    ]
    found = deserialize_forward_backward_output(encode_pass(logprobs, {"loss:sum": 1.5}))
    assert found.metrics == {"loss:sum": 1.5}
    values = [one["logprobs"].to_numpy().tolist() for one in found.loss_fn_outputs]
    assert values == [[-1.0, -2.0], [-3.0], [[-4.0, -5.0]], [-6.0]]


def test_the_client_reads_samples() -> None:
    top = TopK(
        token_ids=np.array([[1, 2], [3, 4]], np.int32),
        logprobs=np.array([[-0.1, -2.0], [-0.2, -3.0]], np.float32),
    )
    sequences = [
        WireSequence(
            token_ids=np.array([1, 3], np.int32),
            logprobs=np.array([-0.1, -0.2], np.float32),
            is_stopped=True,
            top_k=top,
        ),
        WireSequence(
            token_ids=np.array([9], np.int32), logprobs=np.zeros(1, np.float32), is_stopped=False
        ),
    ]
    prompt = np.array([np.nan, -0.5], np.float32)
    found = deserialize_sample_response(encode_sample(sequences, prompt_logprobs=prompt))
    first, second = found.sequences
    assert (first.tokens, first.stop_reason) == ([1, 3], "stop")
    assert first.logprobs == pytest.approx([-0.1, -0.2])
    assert [[token for token, _ in row or []] for row in first.topk_logprobs or []] == [
        [1, 2],
        [3, 4],
    ]
    assert (second.tokens, second.stop_reason, second.topk_logprobs) == ([9], "length", None)
    assert found.prompt_logprobs == [None, -0.5]
