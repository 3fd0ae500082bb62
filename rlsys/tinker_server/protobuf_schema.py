"""Protobuf messages of the API, by field number.

Only numbers and types matter on the wire. The names are those of the client
(`tinker.proto.tinker_public_pb2` of 0.38). The messages have their own descriptor pool, because a
process may also load the client's.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "rlsys_tinker"

_SCALARS = {
    "double": 1,
    "float": 2,
    "int64": 3,
    "uint64": 4,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "bytes": 12,
    "uint32": 13,
}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3

# Fields of each message as "number name type". A type is a scalar or a message. `*` marks a
# repeated field, `?` an optional one with presence, and `map:type` a map from strings.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "SampleResponse": (
        "1 sequences *SampledSequence",
        "2 prompt_logprobs ?bytes",
        "3 topk_prompt_logprobs TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
    ),
    "SampledSequence": (
        "1 stop_reason int32",
        "2 tokens bytes",
        "3 logprobs ?bytes",
        "4 topk_sampled_logprobs TopkLogprobs",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense ?bytes", "2 sparse_csr SparseCsr", "3 dtype int32", "4 shape *int64"),
    "BatchedTensor": (
        "1 data bytes",
        "2 offsets bytes",
        "3 dtype int32",
        "4 trailing_shape *int64",
    ),
    "ArrayRecord": ("1 type_tag string", "2 fields map:BatchedTensor", "3 num_datums int64"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs *ArrayRecord",
        "3 metrics map:double",
    ),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data *Datum",
        "4 loss_fn string",
        "5 loss_fn_config map:double",
        "6 forward_only bool",
        "7 loss_fn_config_v2 map:LossFnConfigValue",
    ),
    "LossFnConfigValue": ("1 number ?double", "2 text ?string"),
    "Datum": (
        "1 model_input *Chunk",
        "2 loss_fn_inputs map:Tensor",
        "3 model_input_spans *ProvenanceSpan",
        "4 loss_fn_input_spans *ProvenanceSpan",
    ),
    "ProvenanceSpan": ("1 prompt_tokens TokenSpan", "2 sampled_tokens TokenSpan"),
    "TokenSpan": ("1 sequence_id string", "2 offset int64", "3 length int64"),
    "Chunk": ("1 encoded_text EncodedTextChunk", "2 image Other", "3 dmel Other"),
    "EncodedTextChunk": ("1 tokens bytes",),
    "Other": (),
}

# Enumerations, sent as numbers.
STOP, LENGTH = 0, 1
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in fields:
            _add_field(message, *line.split())
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, number: str, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=int(number), label=_OPTIONAL)
    if kind.startswith("map:"):
        entry = message.nested_type.add(name=f"{_camel(name)}Entry")
        entry.options.map_entry = True
        _add_field(entry, "1", "key", "string")
        _add_field(entry, "2", "value", kind.removeprefix("map:"))
        field.label, field.type = _REPEATED, _MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.startswith("*"):
        field.label, kind = _REPEATED, kind[1:]
    elif kind.startswith("?"):
        kind = kind[1:]
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


_POOL = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(_file().SerializeToString())


def message_class(name: str) -> Any:
    """Return the class of a message in the schema."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = message_class("ForwardBackwardRequest")
ForwardBackwardOutput = message_class("ForwardBackwardOutput")
SampleResponse = message_class("SampleResponse")
