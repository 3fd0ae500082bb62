"""Parameters of a model outside its matrices: norms, biases, sinks and gates.

A `Family` has the facts of a model type and the flags that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsys.planner.architecture import Architecture
from rlsys.planner.config_fields import first_number
from rlsys.planner.model_families import Family

Config = Mapping[str, Any]


def small_parameters(config: Config, kind: str, family: Family, built: Architecture) -> int:
    """Return the parameters of norms, biases, sinks and gates."""
    attention = _qk_norms(config, family, built)
    attention += _attention_biases(config, kind, family, built)
    attention += (built.kv_lora + built.q_lora) if built.kv_lora else 0
    attention += built.heads if family.sinks else 0
    attention += 4 * built.head_dim if kind == "diffllama" else 0  # its lambdas
    count = _norms(config, kind, family, built)
    count += built.attention_layers * attention
    count += built.linear_layers * _linear_mixer(config, built)
    count += _network_biases(config, family, built)
    if kind in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next") and built.shared_ffn:
        count += built.moe_layers * built.hidden
    if kind == "ernie4_5_moe":  # corrections of the router's scores
        count += built.moe_layers * built.experts
    if kind == "apertus":  # both slopes of its activation
        count += 2 * built.dense_layers
    if family.head_bias or _head_bias(config, kind, family):
        count += built.vocab
    return count


def _norms(config: Config, kind: str, family: Family, built: Architecture) -> int:
    norm = built.hidden * family.norm_values
    if kind == "opt" and config.get("layer_norm_elementwise_affine") is False:
        norm = 0
    parts = built.attention_layers + built.linear_layers
    if isinstance(config.get("hybrid_override_pattern"), str):
        parts += built.dense_layers + built.moe_layers
    per_layer = family.norms
    if kind == "falcon":
        per_layer = _falcon_norms(config)
    if kind == "stablelm" and config.get("use_parallel_residual") is True:
        per_layer = 1
    others = 1 + family.embedding_norm  # the last norm
    if kind == "opt" and (
        config.get("do_layer_norm_before") is False or config.get("_remove_final_layer_norm")
    ):
        others -= 1
    count = (parts * per_layer + others) * norm
    if kind == "bitnet":  # before the output of attention and of the network
        count += built.attention_layers * built.hidden + built.dense_layers * built.ffn
    return count


def _falcon_norms(config: Config) -> int:
    if config.get("parallel_attn") is False:
        return 2
    default = 2 if config.get("new_decoder_architecture") else 1
    return 2 if first_number(config, "num_ln_in_parallel_attn", default=default) == 2 else 1


def _qk_norms(config: Config, family: Family, built: Architecture) -> int:
    """Return the parameters of a layer's norms of queries and keys."""
    d, norm = built.head_dim, qk_norm(config, family)
    full = (built.heads + built.kv_heads) * d
    return {"none": 0, "bare": 0, "head": 2 * d, "bias": 4 * d, "full": full}[norm]


def qk_norm(config: Config, family: Family) -> str:
    """Return the kind of a model's norms of queries and keys (`Family.qk_norm`)."""
    flag, flagged = family.qk_flag
    stated = config.get(flag)
    if stated is None:
        return family.qk_norm
    return flagged if stated else "none"


def _attention_biases(config: Config, kind: str, family: Family, built: Architecture) -> int:
    """Return the biases of a layer's products of attention."""
    bias = family.attention_bias
    stated = config.get("attention_bias")
    if family.bias_flag:
        bias = "all" if _has_biases(config, family) else "none"
    elif kind == "stablelm":
        bias = "qkv" if config.get("use_qkv_bias") is True else "none"
    elif kind == "qwen2_moe" and config.get("qkv_bias") is False:
        bias = "none"
    elif stated is not None and family.attention_flag != "none":
        bias = family.attention_flag if stated else "none"
    qkv = (built.heads + 2 * built.kv_heads) * built.head_dim
    latent = built.q_lora + built.kv_lora + built.rope_dim + built.hidden if built.kv_lora else 0
    count = {"none": 0, "qkv": qkv, "all": qkv + built.hidden, "latent": latent}[bias]
    if kind == "seed_oss" and config.get("attention_out_bias") is True:
        count += built.hidden
    return count


def _has_biases(config: Config, family: Family) -> bool:
    """Return whether the flag of a type switches its biases on."""
    stated = config.get(family.bias_flag)
    return family.network_bias if stated is None else stated is True


def _network_biases(config: Config, family: Family, built: Architecture) -> int:
    h, sides = built.hidden, 2 if built.gated else 1
    has_biases = family.network_bias
    if family.bias_flag:
        has_biases = _has_biases(config, family)
    elif family.network_flag:
        has_biases = config.get("mlp_bias") is True
    if not has_biases:
        return 0
    count = built.dense_layers * (sides * built.ffn + h)
    if family.network_bias:  # of experts and of the router too
        expert = sides * built.expert_ffn + h
        return count + built.moe_layers * (built.experts * expert + built.experts)
    shared = sides * built.shared_ffn + h if built.shared_ffn else 0
    latent = built.expert_hidden + h if built.expert_hidden else 0
    return count + built.moe_layers * (shared + latent)


def _head_bias(config: Config, kind: str, family: Family) -> bool:
    if kind == "ernie4_5_moe":
        return _has_biases(config, family)
    return kind == "phimoe" and config.get("lm_head_bias") is True


def _linear_mixer(config: Config, built: Architecture) -> int:
    """Return the parameters of a Mamba-2 or gated delta-net layer outside its matrices."""
    if "mamba_num_heads" in config:
        heads = first_number(config, "mamba_num_heads")
        width = heads * first_number(config, "mamba_head_dim")
        groups = first_number(config, "n_groups", default=8)
        channels = width + 2 * groups * first_number(config, "ssm_state_size")
        kernel = first_number(config, "conv_kernel", default=4)
        bias = 0 if config.get("use_conv_bias") is False else channels
        projections = sum(n for n, _ in built.linear_gemms)
        projections = projections if config.get("use_bias") is True else 0
        return channels * kernel + bias + 3 * heads + width + projections
    if "linear_conv_kernel_dim" not in config:
        return 0
    keys = first_number(config, "linear_num_key_heads")
    keys *= first_number(config, "linear_key_head_dim")
    heads = first_number(config, "linear_num_value_heads")
    width = first_number(config, "linear_value_head_dim")
    kernel = first_number(config, "linear_conv_kernel_dim")
    return (2 * keys + heads * width) * kernel + 2 * heads + width
