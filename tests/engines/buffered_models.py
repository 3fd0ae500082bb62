"""Tiny models of families that keep part of themselves in persistent buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlsys.launcher.tiny_models import build_tokenizer

# Each routes by e_score_correction_bias, scales by layer_scalar.
BUFFERED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "topk_method": "noaux_tc",  # as on the hub, for vLLM
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "num_key_value_heads": 2,
    },
    "glm4_moe": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "head_dim": 32,
    },
    "gemma4_text": {
        "head_dim": 32,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
}


def build_buffered(directory: Path, family: str, *, seed: int = 0) -> Path:
    """A model of two layers with random parameters and buffers that make a difference."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = build_tokenizer()
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            **BUFFERED[family],
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith(("e_score_correction_bias", "layer_scalar")):
                    buffer.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
