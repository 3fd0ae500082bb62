"""Small models of the families that layouts are tried on, with heads and widths that divide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlsys.tiny_models import build_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 8},
    "olmo2": {"head_dim": None},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": {**WINDOWS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **EXPERTS,
        "head_dim": None,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def build_model(directory: Path, family: str) -> Path:
    """Of random weights, norms too, in float32, with a tokenizer of as many characters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {name: value for name, value in (SIZES | OWN[family]).items() if value is not None}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.15 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    model.save_pretrained(directory)
    build_tokenizer("0123456789+-*/=. #abc").save_pretrained(directory)
    return directory
