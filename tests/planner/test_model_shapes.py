"""Matrices and parameters of architectures, by hand and against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlsys.common.safe_json import dump_json, parse_json
from rlsys.planner.architecture import Gemm
from rlsys.planner.model_config import (
    architecture_from_config,
    model_names,
    model_types,
    named_model,
)
from tests.errors import invalid
from tests.planner.small_configs import DEEPSEEK, GPT, QWEN_MOE, SIZES

DENSE: dict[str, Any] = {**SIZES, "model_type": "llama", "num_hidden_layers": 3}
MOE = {**DENSE, **QWEN_MOE, "head_dim": 16, "mlp_only_layers": []}
MLA = {**DENSE, **DEEPSEEK, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "llama-tied": {**DENSE, "tie_word_embeddings": True},
    "llama-biases": {**DENSE, "attention_bias": True, "mlp_bias": True},
    "mistral": {**DENSE, "model_type": "mistral", "sliding_window": 32},
    "qwen2": {**DENSE, "model_type": "qwen2"},
    "qwen3": {**DENSE, "model_type": "qwen3", "head_dim": 32},
    "gemma": {**DENSE, "model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {**DENSE, "model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {
        **DENSE,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "olmo2": {**DENSE, "model_type": "olmo2"},
    "phi": {**DENSE, "model_type": "phi", "num_key_value_heads": 4},
    "gpt2": GPT,
    "gpt_neox": {**DENSE, "model_type": "gpt_neox", "num_key_value_heads": 4},
    "qwen3_moe": MOE,
    "mixtral": {
        **DENSE,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "olmoe": {**DENSE, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        **DENSE,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
    },
    "deepseek_v3": MLA,
}


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
HYBRID = {
    **MAMBA,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
# Settings of a type, besides its name, that change its parameters outside the matrices.
FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("apertus", {"attention_bias": True, "mlp_bias": True}),
    ("bitnet", {}),
    ("bloom", {}),
    ("cohere", {"use_qk_norm": True}),
    ("diffllama", {}),
    ("ernie4_5", {"use_bias": True}),
    ("exaone4", {}),
    ("falcon", {}),
    ("falcon", {"bias": True, "parallel_attn": False, "multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("helium", {"attention_bias": True, "mlp_bias": True}),
    ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3}),
    ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3, "expansion_ratio": 2, "no_bias": False}),
    ("nanochat", {}),
    ("nemotron_h", {"hybrid_override_pattern": "M-M*E", **HYBRID}),
    ("nemotron_h", {"hybrid_override_pattern": "M-M*E", **HYBRID, "use_bias": True}),
    ("nemotron_h", {"hybrid_override_pattern": "M-E", **HYBRID, "mlp_bias": True}),
    ("nemotron_h", {"hybrid_override_pattern": "M*", **HYBRID, "use_conv_bias": False}),
    ("olmo", {}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": False}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "layer_norm_elementwise_affine": False}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "tie_word_embeddings": False}),
    ("persimmon", {"qk_layernorm": False}),
    ("phi", {"qk_layernorm": True}),
    ("phimoe", EXPERTS),
    ("phimoe", {**EXPERTS, "attention_bias": True, "lm_head_bias": True}),
    ("qwen2_moe", {**QWEN_MOE, "qkv_bias": False, "shared_expert_intermediate_size": 48}),
    ("seed_oss", {"attention_out_bias": True, "attention_bias": False, "mlp_bias": True}),
    ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": True}),
    ("starcoder2", {"use_bias": False}),
]


# Fields that these types derive from others.
DERIVED = {
    "falcon": ("head_dim",),
    "mpt": ("num_hidden_layers",),
    "nemotron_h": ("num_hidden_layers",),
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [pytest.param(kind, changes, id=f"{kind}-{'-'.join(changes)}"[:60]) for kind, changes in FLAGS],
)
@pytest.mark.parametrize("is_whole", [True, False], ids=["all fields", "given fields"])
def test_flags_change_the_parameters_as_in_transformers(
    kind: str, changes: dict[str, Any], is_whole: bool
) -> None:
    """The parameters are exact, from a file with all fields and from one with those given."""
    own = {key: value for key, value in changes.items() if key != "model_type"}
    config = {**SIZES, "num_hidden_layers": 3, "head_dim": 16, "pad_token_id": 0, **own}
    for name in DERIVED.get(kind, ()):
        del config[name]
    built = AutoConfig.for_model(kind, **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    expected = sum(parameter.numel() for parameter in model.parameters())
    stored = parse_json(dump_json(built.to_dict())) if is_whole else config
    assert architecture_from_config({**stored, "model_type": kind}).parameters == expected


def test_layers_of_a_hybrid_model_by_name() -> None:
    letters = {**SIZES, **HYBRID, "model_type": "nemotron_h"}
    blocks = ["mamba", "mlp", "linear_attention", "attention", "full_attention", "moe"]
    named = architecture_from_config({**letters, "layers_block_type": blocks})
    assert named == architecture_from_config({**letters, "hybrid_override_pattern": "M-M**E"})
    assert (named.linear_layers, named.attention_layers, named.moe_layers) == (2, 2, 1)
    with invalid("model.layers_block_type[1]", "conv"):
        architecture_from_config({**letters, "layers_block_type": ["mamba", "conv"]})
    with invalid("model.layers_block_type", "mamba"):
        architecture_from_config({**letters, "layers_block_type": "mamba"})


def test_a_narrow_embedding_has_projections() -> None:
    """16 wide, with matrices to and from the hidden size of 64, as in OPT-350M."""
    config = {**SIZES, "model_type": "opt", "num_hidden_layers": 3, "ffn_dim": 96}
    wide = architecture_from_config({**config, "word_embed_proj_dim": 64})
    narrow = architecture_from_config({**config, "word_embed_proj_dim": 16})
    assert narrow.head == Gemm("head", 128, 16, "columns")
    projections = 2 * 16 * 64
    head = 128 * (64 - 16)  # the embedding has as many, which a token does not pass
    assert wide.active_parameters - narrow.active_parameters == head - projections
    assert wide.parameters - narrow.parameters == 2 * head - projections


def test_the_matrices_of_a_dense_model() -> None:
    model = architecture_from_config(DENSE)
    assert model.attention == (
        Gemm("qkv", (4 + 2 * 2) * 16, 64, "columns"),
        Gemm("attention_output", 64, 64, "rows"),
    )
    assert model.dense == (
        Gemm("ffn_up", 2 * 96, 64, "columns"),
        Gemm("ffn_down", 64, 96, "rows"),
    )
    assert (model.dense_layers, model.moe_layers, model.expert) == (3, 0, ())
    matrices = 3 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96)
    assert model.layer_parameters == matrices
    assert model.parameters == matrices + 2 * 128 * 64 + 3 * 2 * 64 + 64
    assert model.active_parameters == matrices + 128 * 64


@pytest.mark.parametrize("tied", [False, True])
def test_a_scalar_head_has_a_matrix_of_its_own(tied: bool) -> None:
    model = architecture_from_config({**DENSE, "tie_word_embeddings": tied})
    critic = replace(model, has_scalar_head=True)
    assert critic.head == Gemm("head", 1, 64, "none")
    embeddings = 128 * 64 * (1 if tied else 2)
    assert critic.parameters == model.parameters - embeddings + 128 * 64 + 64
    assert critic.active_parameters == critic.layer_parameters + 64


def test_the_matrices_of_a_model_with_experts() -> None:
    model = architecture_from_config(MOE)
    assert model.moe_common == (Gemm("router", 8, 64, "none"),)
    assert model.expert == (
        Gemm("expert_up", 2 * 32, 64, "columns"),
        Gemm("expert_down", 64, 32, "rows"),
    )
    assert model.expert_parameters == 8 * 3 * 32 * 64
    attention = 128 * 64 + 64 * 64
    assert model.active_parameters == 3 * (attention + 8 * 64 + 2 * 3 * 32 * 64) + 128 * 64


def test_the_matrices_of_latent_attention() -> None:
    model = architecture_from_config(MLA)
    assert [(one.name, one.n, one.k, one.split) for one in model.attention] == [
        ("query_down", 24, 64, "none"),
        ("query_up", 4 * 24, 24, "columns"),
        ("kv_down", 16 + 8, 64, "none"),
        ("kv_up", 4 * (16 + 16), 16, "columns"),
        ("attention_output", 64, 4 * 16, "rows"),
    ]
    assert (model.dense_layers, model.moe_layers, model.shared_ffn) == (1, 2, 32)
    assert model.kv_bytes_per_token(2.0, tp=4) == 3 * 24 * 2


def test_tensor_parallelism_splits_outputs_or_inputs() -> None:
    assert Gemm("a", 10, 8, "columns").local(4) == (3, 8)
    assert Gemm("a", 10, 8, "rows").local(4) == (10, 2)
    assert Gemm("a", 10, 8, "none").local(4) == (10, 8)


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    model = architecture_from_config(DENSE)
    one = model.kv_bytes_per_token(2.0)
    assert one == 3 * 2 * (16 + 16) * 2
    assert model.kv_bytes_per_token(2.0, tp=2) == one / 2
    assert model.kv_bytes_per_token(2.0, tp=4) == one / 2


def test_windows_bound_the_pairs_of_tokens() -> None:
    config = {**DENSE, "model_type": "mistral", "sliding_window": 10}
    model = architecture_from_config(config)
    assert (model.window, model.window_layers) == (10, 3)
    assert model.attended(10) == 50
    assert model.attended(100) == 10 * 100 - 50
    assert (model.seen(5), model.seen(100)) == (5, 10)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_transformers(name: str) -> None:
    config = FAMILIES[name]
    rest = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest))
    expected = sum(parameter.numel() for parameter in built.parameters())
    assert architecture_from_config(config).parameters == expected


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-8B", 8.19),
        ("meta-llama/Llama-3.1-405B", 405.85),
        ("Qwen3-235B-A22B", 235.09),
        ("deepseek-ai/DeepSeek-V3", 671.03),
        ("gpt-oss-120b", 116.83),
        ("HuggingFaceTB/SmolLM2-135M", 0.1345),
    ],
)
def test_named_models_have_their_published_size(name: str, billions: float) -> None:
    assert named_model(name).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_every_named_model_can_be_built() -> None:
    names = model_names()
    assert len(names) > 80
    assert all(named_model(name).parameters > 1e8 for name in names)


def test_a_hybrid_model_counts_its_parts() -> None:
    model = named_model("Nemotron-3-Nano-30B-A3B")
    assert (model.attention_layers, model.moe_layers, model.linear_layers) == (6, 23, 23)


def test_an_unknown_model_is_refused() -> None:
    with invalid("model", "Qwen3-9000B"):
        named_model("Qwen3-9000B")


def test_a_configuration_without_sizes_is_refused() -> None:
    with invalid("model.hidden_size"):
        architecture_from_config({"model_type": "llama"})
    with invalid("model.hidden_size", 0):
        architecture_from_config({**DENSE, "hidden_size": 0, "head_dim": 4})
    with invalid("model.top_k", 9):
        architecture_from_config({**MOE, "num_experts_per_tok": 9})


@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2", "gemma3n_text", "afmoe", "new_one"])
def test_an_architecture_that_is_not_described_is_refused(kind: str) -> None:
    with invalid("model.model_type", kind):
        architecture_from_config({**DENSE, "model_type": kind})


# Settings of types whose defaults in transformers do not build a model, or lack experts.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*-E",
        "n_routed_experts": 8,
        "moe_intermediate_size": 64,
    },
}
# Types with the classes of another type.
SAME_AS = {"kimi_k2": "deepseek_v3"}
# A few types for the default tier: mixers, experts and networks of different kinds.
FIRST = ("apertus", "ernie4_5_moe", "gpt_bigcode", "nanochat", "persimmon", "qwen3_5_text")


@pytest.mark.parametrize(
    "kind",
    [
        *FIRST,
        *(pytest.param(one, marks=pytest.mark.slow) for one in model_types() if one not in FIRST),
    ],
)
def test_each_accepted_type_has_the_parameters_of_transformers(kind: str) -> None:
    changes = CHANGES.get(kind, {})
    config = AutoConfig.for_model(SAME_AS.get(kind, kind), **changes)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in built.parameters())
    stored = {**parse_json(dump_json(config.to_dict())), **changes, "model_type": kind}
    assert architecture_from_config(stored).parameters == pytest.approx(expected, rel=0.005)


def test_windows_by_pattern() -> None:
    """Every fourth layer of Cohere2 sees all tokens."""
    config = {**DENSE, "num_hidden_layers": 8, "sliding_window": 10, "model_type": "cohere2"}
    model = architecture_from_config({**config, "sliding_window_pattern": 4})
    assert (model.window, model.window_layers) == (10, 6)
