"""Small random models of every class that transformers maps for causal language modelling.

    name ─► default configuration, CHANGES ─► small sizes (probe_model.py) ─► model

A name is a model type of transformers, or one of VARIANTS. Every window, chunk and limit of the
models is shorter than 30 tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from rlsys.engines.models.probe_model import Widths, miniature_config, random_model

# Changes that a class needs to be built at all, or to use its special features.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.05,
        "logits_scaling": 4.0,
    },
    "olmo": {"clip_qkv": 8.0},
    "olmoe": {"clip_qkv": 8.0},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": [2] * 32},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16, "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "xlstm": {"hidden_size": 256, "embedding_dim": 256, "num_heads": 4},
    "xmod": {"default_language": "en_XX"},
}
CHANGES["qwen4_exp"] = {"text_config": CHANGES["qwen4_exp_text"]}
CHANGES["granitemoe"] = CHANGES["granitemoeshared"] = CHANGES["granitemoehybrid"] = CHANGES[
    "granite"
]

# Families with a configuration that uses other code.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic NTK": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, Llama 3 rotary": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 65536,
        },
    ),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 16,
            },
            "max_position_embeddings": 32,
        },
    ),
    "llama, vocabulary of 5": ("llama", {"vocab_size": 5, "bos_token_id": 1, "eos_token_id": 2}),
    "llama4_text, no temperature": ("llama4_text", {"attn_temperature_tuning": False}),
    "phi3, longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4096,
                "short_factor": [1.0 + 0.02 * i for i in range(48)],
                "long_factor": [1.0 + 0.6 * i for i in range(48)],
            },
        },
    ),
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "gemma4_text, shared keys": ("gemma4_text", {"num_kv_shared_layers": 12}),
}


def names() -> list[str]:
    """Return the names of all models of the table."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]


def build(name: str) -> tuple[Any, Any]:
    """Return a model and the configuration of its checkpoint.

    The model is small and random, in float32, with transformers' eager attention. The configuration
    is its own, or one around it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    family, changes = VARIANTS.get(name, (name, {}))
    config = AutoConfig.for_model(family, **(CHANGES.get(family, {}) | changes))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    is_nested = kind.config_class == config.sub_configs.get("text_config")
    _add_windows(config.get_text_config())
    outer, config = config, config.get_text_config() if is_nested else config
    failure: Exception | None = None
    for widths in Widths:
        try:
            model = random_model(kind, miniature_config(config, widths), seed=1)
            model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False)
            if is_nested:
                return model, type(outer)(text_config=model.config.to_dict())
            return model, model.config
        except Exception as error:  # noqa: BLE001 - raised below if no width works
            failure = failure or error
    assert failure is not None
    raise failure


def _add_windows(config: Any) -> None:
    """Give sliding windows to layers that can have them and have none by default."""
    settings = config.to_dict()
    if "sliding_window" not in settings:
        return
    config.sliding_window = settings["sliding_window"] or 4096
    layers = settings.get("layer_types") or []
    if layers and set(layers) == {"full_attention"}:
        config.layer_types = ["full_attention", "sliding_attention"] * (len(layers) // 2)
        config.layer_types += layers[len(config.layer_types) :]
        config.use_sliding_window = True
