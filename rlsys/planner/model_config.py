"""From a model's config.json, or its name, to its architecture.

    config.json as a dict ─► architecture_from_config ─┐
    "Qwen/Qwen3-8B"       ─► named_model (data/models) ─┴► Architecture

Keys differ between families: `first_number` reads the first that exists. Facts that no key states
(norms per layer, biases, tied heads by default) are in model_families.py. Other model types than
its are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from rlsys.common.safe_json import parse_json
from rlsys.errors import InvalidValue
from rlsys.planner.architecture import Architecture
from rlsys.planner.config_fields import first_number, text_fields
from rlsys.planner.model_families import FAMILIES, Family
from rlsys.planner.small_parameters import qk_norm, small_parameters

DATA: Final = Path(__file__).parent / "data"
Config = Mapping[str, Any]

# Model types with networks of width 4 h, which their config.json need not state.
_QUADRUPLE: Final = {"codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj"}


def architecture_from_config(config: Config, *, name: str = "") -> Architecture:
    """Return the architecture that a model's config.json describes.

    Raises:
        InvalidValue: A field is missing or invalid, or the model type is not supported.
    """
    text = text_fields(config)
    kind = text["model_type"] or ""
    family = FAMILIES.get(kind)
    if family is None:
        raise InvalidValue(
            "model.model_type",
            kind,
            rule="is not described by the planner, which would count wrong parameters",
            fix=f"Use a model of one of the types {', '.join(model_types())}.",
        )
    return _build(text, kind, family, name or kind)


def model_types() -> tuple[str, ...]:
    """Return the model types (config.json) that the planner describes."""
    return tuple(sorted(FAMILIES))


def _build(config: Config, kind: str, family: Family, name: str) -> Architecture:
    hidden = first_number(config, "hidden_size", "n_embd", "d_model")
    embedded = first_number(config, "word_embed_proj_dim", default=hidden)
    heads = first_number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _kv_heads(config, kind, heads) if family.grouped else heads
    head_dim = first_number(config, "head_dim", default=hidden // max(heads, 1))
    kv_lora = first_number(config, "kv_lora_rank", default=0)
    rope_dim = first_number(config, "qk_rope_head_dim", default=0) if kv_lora else 0
    if kv_lora:
        head_dim = first_number(config, "qk_nope_head_dim") + rope_dim
    value_dim = first_number(config, "v_head_dim", default=head_dim) if kv_lora else head_dim
    attention, dense, moe, linear = _layer_counts(config, kind)
    window, window_layers = _windows(config, kind, attention)
    tied = config.get("tie_word_embeddings")
    expert_ffn = first_number(config, "moe_intermediate_size", "intermediate_size") if moe else 0
    linear_gemms, linear_state = _linear_mixer(config, kind, hidden) if linear else ((), 0)
    positions = first_number(
        config, "max_position_embeddings", "n_positions", "max_seq_len", default=0
    )
    built = Architecture(
        name=name,
        hidden=hidden,
        vocab=first_number(config, "vocab_size"),
        embedding_width=embedded if kind == "opt" and embedded != hidden else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        attention_layers=attention,
        dense_layers=dense,
        moe_layers=moe,
        linear_layers=linear,
        ffn=_ffn(config, kind, hidden) if dense else 0,
        gated=bool(config.get("gated", family.gated)),
        tied=family.tied if tied is None else bool(tied),
        experts=_experts(config) if moe else 0,
        attention_gate=family.attention_gate,
        qk_norm=qk_norm(config, family) != "none",
        top_k=first_number(config, "num_experts_per_tok", "experts_per_token", "moe_k")
        if moe
        else 0,
        expert_ffn=expert_ffn,
        expert_hidden=first_number(config, "moe_latent_size", default=0) if moe else 0,
        shared_ffn=_shared_ffn(config, kind, expert_ffn) if moe else 0,
        q_lora=first_number(config, "q_lora_rank", default=0) if kv_lora else 0,
        kv_lora=kv_lora,
        rope_dim=rope_dim,
        window=window,
        window_layers=window_layers,
        linear_gemms=linear_gemms,
        linear_state=linear_state,
        max_context=positions or 1 << 20,
        learned_positions=(positions + (2 if kind == "opt" else 0)) if family.positions else 0,
    )
    return replace(built, small_parameters=small_parameters(config, kind, family, built))


def _kv_heads(config: Config, kind: str, heads: int) -> int:
    if kind == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    if kind == "falcon":
        if config.get("new_decoder_architecture"):
            return first_number(config, "num_kv_heads", default=heads)
        return 1 if config.get("multi_query", True) else heads
    return first_number(config, "num_key_value_heads", "num_kv_heads", "kv_n_heads", default=heads)


def _ffn(config: Config, kind: str, hidden: int) -> int:
    if kind == "llama4_text":
        return first_number(config, "intermediate_size_mlp", "intermediate_size")
    if kind in ("bloom", "mpt"):  # they ignore n_inner and expansion_ratio
        return 4 * hidden
    if kind == "falcon":
        return first_number(config, "ffn_hidden_size", default=4 * hidden)
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if kind not in _QUADRUPLE:
        return first_number(config, *names)
    return first_number(config, *names, default=4 * hidden)


def _experts(config: Config) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    return first_number(config, *names, default=0)


def _layer_counts(config: Config, kind: str) -> tuple[int, int, int, int]:
    """Return the layers with attention, dense networks, experts and linear mixers."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern.count("*"), pattern.count("-"), pattern.count("E"), pattern.count("M")
    layers = first_number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    kinds = config.get("layer_types")
    linear = (
        sum(one in ("linear_attention", "mamba") for one in kinds) if isinstance(kinds, list) else 0
    )
    if not _experts(config):
        return layers - linear, layers, 0, linear
    dense = min(layers, first_number(config, "first_k_dense_replace", default=0))
    if "moe_layer_start_index" in config:  # ernie4_5_moe
        return layers - linear, *_ernie_layers(config, layers), linear
    if isinstance(only := config.get("mlp_only_layers"), list) and only:
        dense = len(only)
    every = first_number(config, "interleave_moe_layer_step", "decoder_sparse_step", default=1)
    if every > 1:
        dense = layers - layers // every
    if isinstance(sparse := config.get("mlp_layer_types"), list):
        dense = sum(one == "dense" for one in sparse)
    return layers - linear, dense, layers - dense, linear


def _ernie_layers(config: Config, layers: int) -> tuple[int, int]:
    """Return the dense layers and those with experts of a range that begins and ends somewhere."""
    first, every = (
        first_number(config, "moe_layer_start_index"),
        first_number(config, "moe_layer_interval"),
    )
    last = first_number(config, "moe_layer_end_index", default=-1)
    end = layers if last == -1 else min(last + 1, layers)
    moe = max(0, end // every - first // every)  # numbers n with first < n <= end, every divides n
    return layers - moe, moe


def _windows(config: Config, kind: str, attention: int) -> tuple[int, int]:
    window = first_number(config, "sliding_window", "attention_chunk_size", default=0)
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window, sum("sliding" in one or "chunked" in one for one in kinds)
    if kind == "llama4_text":
        return window, attention - attention // 4
    if kind == "gemma2":
        return window, attention // 2
    if every := first_number(
        config, "sliding_window_pattern", default=6 if "gemma3" in kind else 0
    ):
        return window, attention - attention // every
    return window, attention


def _shared_ffn(config: Config, kind: str, expert_ffn: int) -> int:
    if kind == "llama4_text":
        return expert_ffn
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    if width := first_number(config, *names, "shared_intermediate_size", default=0):
        return width
    counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return first_number(config, *counts, default=0) * expert_ffn


def _linear_mixer(
    config: Config, kind: str, hidden: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the matrices of a Mamba-2 or gated delta-net layer, and its state per token."""
    if "mamba_num_heads" in config:
        heads = first_number(config, "mamba_num_heads")
        width = heads * first_number(config, "mamba_head_dim")
        state = first_number(config, "ssm_state_size")
        groups = first_number(config, "n_groups", default=8)
        return (
            (2 * width + 2 * groups * state + heads, hidden),
            (hidden, width),
        ), width * state
    keys = first_number(config, "linear_num_key_heads") * first_number(
        config, "linear_key_head_dim"
    )
    heads = first_number(config, "linear_num_value_heads")
    value_dim = first_number(config, "linear_value_head_dim")
    values = heads * value_dim
    return (
        (2 * keys + 2 * values + 2 * heads, hidden),
        (hidden, values),
    ), values * first_number(config, "linear_key_head_dim")


@lru_cache(maxsize=1)
def _named() -> dict[str, dict[str, Any]]:
    """Return the configurations of the built-in models by plain name."""
    table = parse_json((DATA / "models.json").read_text())
    return {plain_name(name): {"name": name, **config} for name, config in table.items()}


def plain_name(name: str) -> str:
    """Return a model's name without its owner, case and punctuation."""
    last = name.rsplit("/", 1)[-1].lower()
    return "".join(one for one in last if one.isalnum() or one == ".")


def model_names() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    return tuple(config["name"] for config in _named().values())


@lru_cache(maxsize=1024)
def named_model(name: str) -> Architecture:
    """Return the architecture of a built-in model, such as Qwen/Qwen3-8B.

    Raises:
        InvalidValue: The table has no such model.
    """
    config = _named().get(plain_name(name))
    if config is None:
        raise InvalidValue(
            "model",
            name,
            rule="is not in the table of models",
            fix=f"Give a folder with a config.json, or one of {', '.join(model_names())}.",
        )
    return architecture_from_config(config, name=config["name"])
