"""From a model's config.json, or its name, to its architecture.

    config.json as a dict ─► architecture_from_config ─┐
    "Qwen/Qwen3-8B"       ─► named_model (data/models) ─┴► Architecture

Keys differ between families: `_number` reads the first that exists. Facts that no key states (norms
per layer, biases, tied heads by default) are in `_FAMILIES`. Its model types are those whose number
of parameters a test compares with transformers. Others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from rlsys.common.safe_json import parse_json
from rlsys.errors import InvalidValue
from rlsys.planner.architecture import Architecture
from rlsys.planner.config_fields import number_field, text_fields

DATA: Final = Path(__file__).parent / "data"
Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Facts of a model type that its config.json does not state.

    Attributes:
        norms: Norms of width h per layer.
        layer_norm: Whether norms have a bias.
        qk_norm: Norms of queries and keys: none, head (width d), or full (width of all heads).
        attention_bias: Biases by default: none, qkv, or all.
        network_bias: Whether feed-forward networks have biases.
        gated: Whether feed-forward networks have a gate.
        tied: Whether embeddings are tied if the configuration does not say so.
        positions: Whether positions are a learned embedding.
        sinks: Whether each head has a sink value.
        head_bias: Whether the head has a bias.
        attention_gate: Whether attention has a gate as wide as its queries.
    """

    norms: int = 2
    layer_norm: bool = False
    qk_norm: str = "none"
    attention_bias: str = "none"
    network_bias: bool = False
    gated: bool = True
    tied: bool = False
    positions: bool = False
    sinks: bool = False
    head_bias: bool = False
    attention_gate: bool = False


_GPT: Final = _Family(
    layer_norm=True,
    attention_bias="all",
    network_bias=True,
    gated=False,
    tied=True,
    positions=True,
)
_PLAIN: Final = _Family()
_QK: Final = _Family(qk_norm="head")
_GATED: Final = _Family(qk_norm="head", attention_gate=True)
_UNGATED: Final = _Family(gated=False)
_GPTJ: Final = _Family(norms=1, layer_norm=True, network_bias=True, gated=False, head_bias=True)
_FAMILIES: Final[dict[str, _Family]] = {
    "qwen2": _Family(attention_bias="qkv"),
    "qwen2_moe": _Family(attention_bias="qkv"),
    "qwen3": _QK,
    "qwen3_moe": _QK,
    "qwen3_5_text": _GATED,
    "qwen3_5_moe_text": _GATED,
    "qwen3_next": _GATED,
    "hunyuan_v1_dense": _QK,
    "glm4_moe": _Family(),
    "olmo2": _Family(qk_norm="full"),
    "olmo3": _Family(qk_norm="full"),
    "olmoe": _Family(qk_norm="full"),
    "minimax_m2": _Family(qk_norm="full"),
    "gemma": _Family(tied=True),
    "gemma2": _Family(norms=4, tied=True),
    "gemma3_text": _Family(norms=4, qk_norm="head", tied=True),
    "phi": _Family(
        norms=1,
        layer_norm=True,
        attention_bias="all",
        network_bias=True,
        gated=False,
        head_bias=True,
    ),
    "gpt_oss": _Family(attention_bias="all", network_bias=True, sinks=True),
    "gpt2": _GPT,
    "opt": _GPT,
    "gpt_neox": _Family(layer_norm=True, attention_bias="all", network_bias=True, gated=False),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "gpt_bigcode": _GPT,
    "arcee": _UNGATED,
    "nanochat": _Family(norms=0, gated=False),
    "apertus": _Family(qk_norm="head", gated=False),
    "persimmon": _Family(
        layer_norm=True, qk_norm="bias", attention_bias="all", network_bias=True, gated=False
    ),
    "mpt": _Family(layer_norm=True, gated=False, tied=True, positions=True),
    "falcon": _Family(norms=1, layer_norm=True, gated=False, tied=True),
    "nemotron": _Family(layer_norm=True, gated=False),
    "nemotron_h": _Family(norms=1, gated=False),
    "stablelm": _Family(layer_norm=True),
    "starcoder2": replace(_GPT, positions=False),
    "cohere": _Family(norms=1, tied=True),
    "cohere2": _Family(norms=1, tied=True),
    "ernie4_5": _Family(tied=True),
    "ernie4_5_moe": _Family(tied=True),
    "smollm3": _Family(tied=True),
    "vaultgemma": _Family(tied=True),
    "youtu": _Family(tied=True),
    "bloom": _Family(
        layer_norm=True, attention_bias="all", network_bias=True, gated=False, tied=True
    ),
    "glm": _Family(attention_bias="qkv"),
    "glm4": _Family(norms=4, attention_bias="qkv"),
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "ministral3",
            "phi3",
            "olmo",
            "mixtral",
            "deepseek_v2",
            "deepseek_v3",
            "kimi_k2",
            "glm4_moe_lite",
            "granite",
            "granitemoe",
            "granitemoeshared",
            "exaone4",
            "seed_oss",
            "llama4_text",
            "phimoe",
            "flex_olmo",
            "helium",
            "bitnet",
            "diffllama",
            "solar_open",
            "olmo_hybrid",
            "cwm",
        ),
        _PLAIN,
    ),
}

# Model types with networks of width 4 h, which their config.json need not state.
_QUADRUPLE: Final = {"codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt"}


def _number(config: Config, *names: str, default: int | None = None) -> int:
    """Return the first of these numbers that the configuration has."""
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


def architecture_from_config(config: Config, *, name: str = "") -> Architecture:
    """Return the architecture that a model's config.json describes.

    Raises:
        InvalidValue: A field is missing or invalid, or the model type is not supported.
    """
    text = text_fields(config)
    kind = text["model_type"] or ""
    family = _FAMILIES.get(kind)
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
    return tuple(sorted(_FAMILIES))


def _build(config: Config, kind: str, family: _Family, name: str) -> Architecture:
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    heads = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _kv_heads(config, kind, heads)
    head_dim = _number(config, "head_dim", default=hidden // max(heads, 1))
    kv_lora = _number(config, "kv_lora_rank", default=0)
    rope_dim = _number(config, "qk_rope_head_dim", default=0) if kv_lora else 0
    if kv_lora:
        head_dim = _number(config, "qk_nope_head_dim") + rope_dim
    value_dim = _number(config, "v_head_dim", default=head_dim) if kv_lora else head_dim
    attention, dense, moe, linear = _layer_counts(config, kind)
    window, window_layers = _windows(config, kind, attention)
    tied = config.get("tie_word_embeddings")
    expert_ffn = _number(config, "moe_intermediate_size", "intermediate_size") if moe else 0
    linear_gemms, linear_state = _linear_mixer(config, kind, hidden) if linear else ((), 0)
    positions = _number(config, "max_position_embeddings", "n_positions", "max_seq_len", default=0)
    built = Architecture(
        name=name,
        hidden=hidden,
        vocab=_number(config, "vocab_size"),
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
        qk_norm=family.qk_norm != "none",
        top_k=_number(config, "num_experts_per_tok", "experts_per_token", "moe_k") if moe else 0,
        expert_ffn=expert_ffn,
        expert_hidden=_number(config, "moe_latent_size", default=0) if moe else 0,
        shared_ffn=_shared_ffn(config, kind, expert_ffn) if moe else 0,
        q_lora=_number(config, "q_lora_rank", default=0) if kv_lora else 0,
        kv_lora=kv_lora,
        rope_dim=rope_dim,
        window=window,
        window_layers=window_layers,
        linear_gemms=linear_gemms,
        linear_state=linear_state,
        max_context=positions or 1 << 20,
        learned_positions=(positions + (2 if kind == "opt" else 0)) if family.positions else 0,
    )
    return replace(built, small_parameters=_small_parameters(config, kind, family, built))


def _kv_heads(config: Config, kind: str, heads: int) -> int:
    if kind == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    if kind == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else heads
    return _number(config, "num_key_value_heads", "num_kv_heads", "kv_n_heads", default=heads)


def _ffn(config: Config, kind: str, hidden: int) -> int:
    if kind == "llama4_text":
        return _number(config, "intermediate_size_mlp", "intermediate_size")
    if kind == "bloom":  # its config.json may have an n_inner that the model ignores
        return 4 * hidden
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if kind not in _QUADRUPLE:
        return _number(config, *names)
    return _number(config, *names, default=_number(config, "expansion_ratio", default=4) * hidden)


def _experts(config: Config) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    return _number(config, *names, default=0)


def _layer_counts(config: Config, kind: str) -> tuple[int, int, int, int]:
    """Return the layers with attention, dense networks, experts and linear mixers."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern.count("*"), pattern.count("-"), pattern.count("E"), pattern.count("M")
    layers = _number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    kinds = config.get("layer_types")
    linear = (
        sum(one in ("linear_attention", "mamba") for one in kinds) if isinstance(kinds, list) else 0
    )
    if not _experts(config):
        return layers - linear, layers, 0, linear
    dense = min(layers, _number(config, "first_k_dense_replace", default=0))
    if "moe_layer_start_index" in config:  # ernie4_5_moe
        return layers - linear, *_ernie_layers(config, layers), linear
    if isinstance(only := config.get("mlp_only_layers"), list) and only:
        dense = len(only)
    every = _number(config, "interleave_moe_layer_step", "decoder_sparse_step", default=1)
    if every > 1:
        dense = layers - layers // every
    if isinstance(sparse := config.get("mlp_layer_types"), list):
        dense = sum(one == "dense" for one in sparse)
    return layers - linear, dense, layers - dense, linear


def _ernie_layers(config: Config, layers: int) -> tuple[int, int]:
    """Return the dense layers and those with experts of a range that begins and ends somewhere."""
    first, every = _number(config, "moe_layer_start_index"), _number(config, "moe_layer_interval")
    last = _number(config, "moe_layer_end_index", default=-1)
    end = layers if last == -1 else min(last + 1, layers)
    moe = max(0, end // every - first // every)  # numbers n with first < n <= end, every divides n
    return layers - moe, moe


def _windows(config: Config, kind: str, attention: int) -> tuple[int, int]:
    window = _number(config, "sliding_window", "attention_chunk_size", default=0)
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return window, sum("sliding" in one or "chunked" in one for one in kinds)
    if kind == "llama4_text":
        return window, attention - attention // 4
    if kind == "gemma2":
        return window, attention // 2
    if every := _number(config, "sliding_window_pattern", default=6 if "gemma3" in kind else 0):
        return window, attention - attention // every
    return window, attention


def _shared_ffn(config: Config, kind: str, expert_ffn: int) -> int:
    if kind == "llama4_text":
        return expert_ffn
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    if width := _number(config, *names, "shared_intermediate_size", default=0):
        return width
    counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return _number(config, *counts, default=0) * expert_ffn


def _linear_mixer(
    config: Config, kind: str, hidden: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the matrices of a Mamba-2 or gated delta-net layer, and its state per token."""
    if "mamba_num_heads" in config:
        heads = _number(config, "mamba_num_heads")
        width = heads * _number(config, "mamba_head_dim")
        state = _number(config, "ssm_state_size")
        groups = _number(config, "n_groups", default=1)
        return (
            (2 * width + 2 * groups * state + heads, hidden),
            (hidden, width),
        ), width * state
    keys = _number(config, "linear_num_key_heads") * _number(config, "linear_key_head_dim")
    heads = _number(config, "linear_num_value_heads")
    value_dim = _number(config, "linear_value_head_dim")
    values = heads * value_dim
    return (
        (2 * keys + 2 * values + 2 * heads, hidden),
        (hidden, values),
    ), values * _number(config, "linear_key_head_dim")


def _small_parameters(config: Config, kind: str, family: _Family, built: Architecture) -> int:
    """Return the parameters of norms, biases, sinks and gates."""
    h, d = built.hidden, built.head_dim
    norm = h * (2 if family.layer_norm and not config.get("no_bias") else 1)
    queries, keys = built.heads * d, built.kv_heads * d
    parts = built.attention_layers + built.linear_layers
    if isinstance(config.get("hybrid_override_pattern"), str):
        parts += built.dense_layers + built.moe_layers
    count = parts * family.norms * norm + norm
    if kind == "falcon" and config.get("new_decoder_architecture"):
        count += built.attention_layers * norm
    qk_norm = "head" if config.get("use_qk_norm") is True and kind == "glm4_moe" else family.qk_norm
    count += (
        built.attention_layers
        * {
            "none": 0,
            "head": 2 * d,
            "bias": 4 * d,
            "full": queries + keys,
        }[qk_norm]
    )
    count += built.linear_layers * _linear_mixer_parameters(config)
    count += built.attention_layers * _attention_biases(config, kind, family, built)
    if built.kv_lora:
        count += built.attention_layers * (built.kv_lora + built.q_lora)
    if family.sinks:
        count += built.attention_layers * built.heads
    up = (2 if built.gated else 1) * built.ffn
    has_bias = family.network_bias or config.get("mlp_bias") is True
    if has_bias and built.dense_layers:
        count += built.dense_layers * (up + h)
    if has_bias and built.moe_layers:
        up = (2 if built.gated else 1) * built.expert_ffn
        count += built.moe_layers * (built.experts * (up + h) + built.experts)
    if kind in ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next") and built.shared_ffn:
        count += built.moe_layers * h
    if family.head_bias:
        count += built.vocab
    return count


def _linear_mixer_parameters(config: Config) -> int:
    """Return the parameters of a gated delta-net layer outside its matrices."""
    if "linear_conv_kernel_dim" not in config:
        return 0
    keys = _number(config, "linear_num_key_heads") * _number(config, "linear_key_head_dim")
    heads = _number(config, "linear_num_value_heads")
    width, kernel = _number(config, "linear_value_head_dim"), config["linear_conv_kernel_dim"]
    return int((2 * keys + heads * width) * kernel + 2 * heads + width)


def _attention_biases(config: Config, kind: str, family: _Family, built: Architecture) -> int:
    bias = family.attention_bias
    stated = config.get("attention_bias")
    if stated is False or config.get("no_bias"):
        bias = "none"
    elif stated is True:
        bias = "qkv" if kind in ("glm", "glm4", "glm4_moe", "seed_oss") else "all"
    qkv = (built.heads + 2 * built.kv_heads) * built.head_dim
    if built.kv_lora:
        if stated is not True:
            return 0
        return built.q_lora + built.kv_lora + built.rope_dim + built.hidden
    return {"none": 0, "qkv": qkv, "all": qkv + built.hidden}[bias]


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
