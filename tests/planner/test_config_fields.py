"""A model's config.json with broken fields: refused with field and value, never guessed."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.common.safe_json import dump_json
from rlsys.errors import InvalidValue
from rlsys.planner.architecture import Architecture
from rlsys.planner.config_fields import MAX_NUMBER, text_fields
from rlsys.planner.model_config import architecture_from_config
from rlsys.planner.plan_request import read_architecture
from tests.errors import invalid
from tests.planner.json_damage import damaged
from tests.planner.small_configs import DEEPSEEK, GPT, QWEN_MOE, SIZES

DENSE: dict[str, Any] = {
    **SIZES,
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "attention_bias": True,
    "mlp_bias": False,
}
MOE = {**DENSE, **QWEN_MOE, "mlp_only_layers": [0], "shared_expert_intermediate_size": 32}
MLA = {**DENSE, **DEEPSEEK}
WINDOWS = {
    **DENSE,
    "model_type": "gemma3_text",
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "use_sliding_window": True,
}
MIXED = {
    **WINDOWS,
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "sliding_attention", "full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
HYBRID = {
    **MOE,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*-E",
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "moe_latent_size": 16,
    "layer_types": ["mamba", "attention", "attention", "attention"],
    "sliding_window": 32,
}
FALCON = {
    **{name: DENSE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    "model_type": "falcon",
    "num_kv_heads": 2,
    "new_decoder_architecture": True,
    "multi_query": True,
    "vocab_size": 128,
}
VISION = {"model_type": "qwen3_5", "text_config": MIXED, "tie_word_embeddings": True}
ERNIE = {
    **DENSE,
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 8,
    "moe_num_shared_experts": 0,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 2,
}
CONFIGS = (ERNIE, DENSE, MOE, MLA, WINDOWS, MIXED, HYBRID, {**GPT, "n_inner": None}, FALCON, VISION)

# Fields that every reading of DENSE needs, or uses if they are there.
NUMBERS = [name for name, value in DENSE.items() if type(value) is int]
WRONG_NUMBERS = [0, -1, 1.5, 8.0, "8", True, [8], {}, math.nan, math.inf, MAX_NUMBER + 1]


def check(model: Architecture) -> None:
    """Assert that a model's counts are what a plan can divide by and multiply with."""
    for field in fields(model):
        value = getattr(model, field.name)
        assert type(value) is not float
        assert type(value) is not int or value >= 0, field.name
    for count in (model.hidden, model.layers, model.heads, model.kv_heads, model.max_context):
        assert count > 0
    assert model.parameters >= model.active_parameters > 0
    for gemm in (*model.attention, *model.dense, *model.expert, *model.moe_common, *model.linear):
        assert gemm.n > 0
        assert gemm.k > 0
    for number in (model.kv_bytes_per_token(2.0), model.model_flops(100.0), model.seen(1e4)):
        assert 0 <= number < math.inf


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_the_examples_are_valid(config: dict[str, Any]) -> None:
    check(architecture_from_config(config))


@given(data=st.data())
def test_any_damage_gives_a_model_or_an_error_about_a_value(data: st.DataObject) -> None:
    damage = data.draw(st.sampled_from(CONFIGS).flatmap(damaged))
    try:
        model = architecture_from_config(damage)
    except InvalidValue as error:
        field = error.field
    else:
        check(model)
        return
    assert field.startswith("model.")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_wrong_number_is_refused_with_its_value(name: str) -> None:
    for value in WRONG_NUMBERS:
        with invalid(f"model.{name}") as found:
            architecture_from_config({**DENSE, name: value})
        assert found.value.value is value


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (MOE, "num_experts", -4),
        (MOE, "num_experts_per_tok", 0),
        (MOE, "moe_intermediate_size", 0),
        (MOE, "decoder_sparse_step", 0),
        (MOE, "mlp_only_layers", ["x"]),
        (MOE, "mlp_only_layers", 3),
        (MLA, "kv_lora_rank", 1.5),
        (MLA, "v_head_dim", "16"),
        (WINDOWS, "sliding_window", "x"),
        (WINDOWS, "sliding_window_pattern", 0),
        (WINDOWS, "use_sliding_window", "no"),
        (WINDOWS, "tie_word_embeddings", 0),
        (MIXED, "layer_types", []),
        (MIXED, "layer_types", "full_attention"),
        (MIXED, "mlp_layer_types", ["dense"]),
        (HYBRID, "hybrid_override_pattern", "M*"),
        (HYBRID, "hybrid_override_pattern", "M*X?"),
        (HYBRID, "hybrid_override_pattern", 5),
        (DENSE, "model_type", 0),
        (DENSE, "text_config", [1]),
    ],
)
def test_every_kind_of_field_has_a_rule(config: dict[str, Any], name: str, value: object) -> None:
    with invalid(f"model.{name}", value):
        architecture_from_config({**config, name: value})


def test_a_layer_of_an_unknown_type_is_named() -> None:
    with invalid("model.layer_types[1]", "x"):
        architecture_from_config({**MIXED, "layer_types": ["full_attention", "x", "x", "x"]})


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"]
)
def test_a_missing_size_is_not_guessed(name: str) -> None:
    for config in (
        {key: value for key, value in DENSE.items() if key != name},
        {**DENSE, name: None},
    ):
        with invalid(f"model.{name}"):
            architecture_from_config(config)


def test_null_is_the_default_of_a_size_that_has_one() -> None:
    model = architecture_from_config({**DENSE, "num_key_value_heads": None, "head_dim": None})
    assert (model.kv_heads, model.head_dim) == (4, 64 // 4)
    assert architecture_from_config({**GPT, "n_inner": None}).ffn == 4 * 64


def test_counts_contradict_each_other() -> None:
    with invalid("model.kv_heads", 3):
        architecture_from_config({**DENSE, "num_key_value_heads": 3})
    with invalid("model.head_dim", 0):
        architecture_from_config({**DENSE, "hidden_size": 2, "head_dim": None})


def test_ranges_of_layers_with_experts_end_with_the_last_layer() -> None:
    for end in (-1, 3, 10**9):  # layers 1 and 3
        model = architecture_from_config({**ERNIE, "moe_layer_end_index": end})
        assert (model.dense_layers, model.moe_layers) == (2, 2)
    last = architecture_from_config({**ERNIE, "moe_layer_end_index": 2})
    assert (last.dense_layers, last.moe_layers) == (3, 1)


def test_layers_of_drafts_do_not_count() -> None:
    types = ["linear_attention", *["full_attention"] * 3, "sliding_attention"]
    assert text_fields({**MIXED, "layer_types": types})["layer_types"] == types[:4]
    assert text_fields({**MOE, "mlp_only_layers": [7, 1, 1]})["mlp_only_layers"] == [1]
    assert architecture_from_config({**MLA, "first_k_dense_replace": 9}).dense_layers == 4


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\x00\x01", b"\xff\xfe\xfa", b'{"a": "\xff"}', b"[" * 9999, b"\xef\xbb\xbf{}"],
)
def test_a_file_that_is_not_json_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with invalid(str(file)):
        read_architecture(str(tmp_path))


@pytest.mark.parametrize("value", [[], None, 5, "x", True])
def test_a_file_that_is_no_object_is_named(value: object, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(dump_json(value))
    with invalid(str(file), value):
        read_architecture(str(tmp_path))
    with invalid("model.config.json", value):
        architecture_from_config(value)  # type: ignore[arg-type]


def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in ("empty", "loop", "missing", "empty/config.json", "a" * 5000, "\0"):
        with invalid("model.path", str(tmp_path / path)):
            read_architecture(str(tmp_path / path))
    with invalid("model.path", "~nobody-has-this-name/model"):
        read_architecture("~nobody-has-this-name/model")


@pytest.mark.parametrize("kind", ["directory", "device", "nowhere"])
def test_a_config_that_is_no_file_is_named(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nowhere")
    with invalid(str(file)):
        read_architecture(str(tmp_path))
