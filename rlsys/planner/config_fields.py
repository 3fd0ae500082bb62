"""Fields of a model's config.json: the file, and one rule for each kind of field.

    config.json ─► read_config ─► text_fields ─► config ─► number_field ─► sizes and counts

A field that is missing or null counts as not given. A field that is given must be valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlsys.common.append_only_file import regular_file
from rlsys.common.safe_json import parse_json
from rlsys.errors import InvalidValue, require

MAX_NUMBER: Final = 10**9  # of any size or count in a config.json

# Numbers whose 0 means that the model has no such part. All others are positive.
MAY_BE_ZERO: Final = frozenset(
    {
        "attention_chunk_size",
        "first_k_dense_replace",
        "kv_lora_rank",
        "moe_latent_size",
        "moe_layer_start_index",
        "moe_num_experts",
        "moe_num_shared_experts",
        "moe_shared_expert_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts",
        "num_local_experts",
        "num_shared_experts",
        "q_lora_rank",
        "qk_rope_head_dim",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "sliding_window",
    }
)

LAST_EXPERTS: Final = "moe_layer_end_index"  # -1: the last layer

FLAGS: Final = (
    "attention_bias",
    "attention_out_bias",
    "do_layer_norm_before",
    "enable_bias",
    "gated",
    "layer_norm_elementwise_affine",
    "lm_head_bias",
    "mlp_bias",
    "multi_query",
    "new_decoder_architecture",
    "parallel_attn",
    "qk_layernorm",
    "qkv_bias",
    "tie_word_embeddings",
    "use_bias",
    "use_conv_bias",
    "use_parallel_residual",
    "use_qk_norm",
    "use_qkv_bias",
    "use_sliding_window",
)

NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

# Lists with one entry for each layer, and the entries that the planner can count.
LAYER_LISTS: Final = {
    "layer_types": frozenset(
        {
            "attention",
            "chunked_attention",
            "full_attention",
            "linear_attention",
            "mamba",
            "sliding_attention",
        }
    ),
    "mlp_layer_types": frozenset({"dense", "sparse"}),
}

# Letters of hybrid_override_pattern: Mamba, attention, dense network, experts.
PATTERN_LETTERS: Final = frozenset("M*-E")

# The same layers in layers_block_type, which replaces the letters in newer files.
BLOCK_LETTERS: Final = {
    "attention": "*",
    "full_attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "mlp": "-",
    "moe": "E",
}

CORRECT: Final = "Correct the model's config.json."


def read_config(file: Path) -> dict[str, Any]:
    """Return the content of a config.json.

    Raises:
        InvalidValue: The file cannot be read, or is not a JSON object.
    """
    try:
        config = parse_json(regular_file(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidValue(
            str(file),
            rule=f"cannot be read as JSON ({error})",
            fix="Restore the file, for example from the place where the model came from.",
        ) from None
    return _object(config, str(file))


def text_fields(config: object) -> dict[str, Any]:
    """Return the fields of the language model in a config.json.

    Flags, texts and lists are checked here, numbers when they are read (`number_field`). Lists of
    layers end with the last layer.

    Raises:
        InvalidValue: A flag, a text or a list is invalid.
    """
    outer = _object(config, "model.config.json")
    inner = outer.get("text_config")
    fields = dict(outer if inner is None else _object(inner, "model.text_config"))
    for name in ("model_type", "tie_word_embeddings"):
        if fields.get(name) is None:
            fields[name] = outer.get(name)
    for name in FLAGS:
        _check(fields, name, bool, "must be true or false")
    _check(fields, "model_type", str, "must be the name of a model type")
    if fields["model_type"] == "nemotron_h" and fields.get("hybrid_override_pattern") is None:
        fields["hybrid_override_pattern"] = _pattern_of_blocks(fields.get("layers_block_type"))
    layers = next((n for name in NUM_LAYERS if (n := number_field(fields, name)) is not None), None)
    layers = _layers_of_pattern(fields, layers)
    if layers is not None:
        for name, known in LAYER_LISTS.items():
            if fields.get(name) is not None:
                fields[name] = _of_layers(name, fields[name], known, layers)
        if fields.get("mlp_only_layers") is not None:
            fields["mlp_only_layers"] = _layer_numbers(fields["mlp_only_layers"], layers)
    return fields


def number_field(config: Mapping[str, Any], name: str) -> int | None:
    """Return a size or a count. None if the field is missing or null.

    Raises:
        InvalidValue: The field is not an integer, or out of range.
    """
    value = config.get(name)
    if value is None:
        return None
    least = -1 if name == LAST_EXPERTS else 0 if name in MAY_BE_ZERO else 1
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise InvalidValue(
            f"model.{name}",
            value,
            rule=f"must be {kind} and at most {MAX_NUMBER:,}",
            fix=CORRECT,
        )
    return value


def first_number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of these numbers that the configuration has.

    Raises:
        InvalidValue: It has none and there is no default, or the number is invalid.
    """
    for name in names:
        if (value := number_field(config, name)) is not None:
            return value
    if default is None:
        raise InvalidValue(
            f"model.{names[0]}",
            rule="is missing in the model's config.json",
            fix="Use the config.json of a decoder-only language model.",
        )
    return default


def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidValue(field, value, rule="must be a JSON object with fields", fix=CORRECT)
    return dict(value)


def _check(fields: Mapping[str, Any], name: str, kind: type, rule: str) -> None:
    value = fields.get(name)
    require(value is None or type(value) is kind, f"model.{name}", value, rule=rule, fix=CORRECT)


def _pattern_of_blocks(blocks: object) -> str | None:
    """Return the letters of a hybrid model's layers for their names."""
    if blocks is None:
        return None
    if not isinstance(blocks, list):
        raise InvalidValue(
            "model.layers_block_type", blocks, rule="must be a list of layers", fix=CORRECT
        )
    for number, block in enumerate(blocks):
        require(
            isinstance(block, str) and block in BLOCK_LETTERS,
            f"model.layers_block_type[{number}]",
            block,
            rule="is not a layer that the planner can describe",
            fix=f"It describes {', '.join(sorted(BLOCK_LETTERS))}.",
        )
    return "".join(BLOCK_LETTERS[block] for block in blocks)


def _layers_of_pattern(fields: Mapping[str, Any], layers: int | None) -> int | None:
    """Return the number of layers, after a check of the letters of a hybrid model's layers."""
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return layers
    is_pattern = isinstance(pattern, str) and bool(pattern) and PATTERN_LETTERS.issuperset(pattern)
    require(
        is_pattern and layers in (None, len(pattern)),
        "model.hybrid_override_pattern",
        pattern,
        rule=f"must have one of the letters M, *, - and E for each of {layers or 'the'} layers",
        fix=CORRECT,
    )
    return len(pattern)


def _of_layers(name: str, value: object, known: frozenset[str], layers: int) -> list[str]:
    """Return the entries of a list for the model's layers. Layers of drafts may follow them."""
    if not isinstance(value, list) or len(value) < layers:
        raise InvalidValue(
            f"model.{name}", value, rule=f"must list the {layers:,} layers", fix=CORRECT
        )
    for number, entry in enumerate(value[:layers]):
        require(
            isinstance(entry, str) and entry in known,
            f"model.{name}[{number}]",
            entry,
            rule="is not a layer that the planner can describe",
            fix=f"It describes {', '.join(sorted(known))}.",
        )
    return value[:layers]


def _layer_numbers(value: object, layers: int) -> list[int]:
    """Return the numbers of a list that belong to layers, each once."""
    if not isinstance(value, list) or any(type(one) is not int or one < 0 for one in value):
        raise InvalidValue(
            "model.mlp_only_layers", value, rule="must be a list of numbers of layers", fix=CORRECT
        )
    return sorted({one for one in value if one < layers})
