"""Facts of each model type that its config.json does not state, and the flags that it reads.

A test compares the parameters of all these types with transformers. Others are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of a model type. A flag that a type does not read changes nothing.

    Attributes:
        norms: Norms of width h per layer.
        norm_values: Parameters of a norm per width: 0, a weight, or a weight and a bias.
        embedding_norm: Whether the embedding has a norm.
        qk_norm: Norms of queries and keys: none, bare (without parameters), head (width d), bias
            (width d, with a bias), or full (width of all heads).
        qk_flag: Flag that switches these norms on or off, and their kind if it is on.
        attention_bias: Biases of attention by default: none, qkv, or all.
        attention_flag: Biases that the flag attention_bias adds: none if the type does not read it,
            qkv, all, or latent (both compressions and the output).
        network_bias: Whether feed-forward networks have biases.
        network_flag: Whether the flag mlp_bias adds biases to dense networks and shared experts.
        bias_flag: Flag that switches all biases on or off. `network_bias` is its default.
        gated: Whether feed-forward networks have a gate.
        tied: Whether embeddings are tied if the configuration does not say so.
        positions: Whether positions are a learned embedding.
        sinks: Whether each head has a sink value.
        head_bias: Whether the head has a bias.
        attention_gate: Whether attention has a gate as wide as its queries.
        grouped: Whether several heads may share keys and values.
    """

    norms: int = 2
    norm_values: int = 1
    embedding_norm: bool = False
    qk_norm: str = "none"
    qk_flag: tuple[str, str] = ("", "")
    attention_bias: str = "none"
    attention_flag: str = "none"
    network_bias: bool = False
    network_flag: bool = False
    bias_flag: str = ""
    gated: bool = True
    tied: bool = False
    positions: bool = False
    sinks: bool = False
    head_bias: bool = False
    attention_gate: bool = False
    grouped: bool = True


_PLAIN: Final = Family()
_FLAG: Final = Family(attention_flag="all")
_FLAGS: Final = Family(attention_flag="all", network_flag=True)
_LATENT: Final = Family(attention_flag="latent")
_NORMED: Final = Family(qk_norm="head", attention_flag="all")
_NORMED_FULLY: Final = Family(qk_norm="full", attention_flag="all")
_GATED: Final = replace(_NORMED, attention_gate=True)
_GLM: Final = Family(attention_bias="qkv", attention_flag="qkv")
_GPT: Final = Family(
    norm_values=2,
    attention_bias="all",
    network_bias=True,
    gated=False,
    tied=True,
    positions=True,
    grouped=False,
)
_GPTJ: Final = Family(
    norms=1, norm_values=2, network_bias=True, gated=False, head_bias=True, grouped=False
)
_PHI: Final = Family(
    norms=1,
    norm_values=2,
    qk_flag=("qk_layernorm", "bias"),
    attention_bias="all",
    network_bias=True,
    gated=False,
    head_bias=True,
)
_PERSIMMON: Final = Family(
    norm_values=2,
    qk_norm="bias",
    qk_flag=("qk_layernorm", "bias"),
    attention_bias="all",
    network_bias=True,
    gated=False,
    grouped=False,
)

FAMILIES: Final[dict[str, Family]] = {
    "apertus": replace(_NORMED, gated=False),
    "arcee": replace(_FLAGS, gated=False),
    "bitnet": _FLAG,
    "bloom": replace(_GPT, positions=False, embedding_norm=True),
    "codegen": _GPTJ,
    "cohere": replace(_FLAG, norms=1, tied=True, qk_flag=("use_qk_norm", "full")),
    "cohere2": replace(_FLAG, norms=1, tied=True),
    "cwm": _FLAGS,
    "deepseek_v2": replace(_LATENT, network_flag=True),
    "deepseek_v3": _LATENT,
    "diffllama": _FLAG,
    "ernie4_5": Family(tied=True, bias_flag="use_bias"),
    "ernie4_5_moe": Family(tied=True, bias_flag="use_bias"),
    "exaone4": Family(qk_norm="head"),
    "falcon": Family(norms=1, norm_values=2, gated=False, tied=True, bias_flag="bias"),
    "flex_olmo": _FLAG,
    "gemma": replace(_FLAG, tied=True),
    "gemma2": replace(_FLAG, norms=4, tied=True),
    "gemma3_text": replace(_NORMED, norms=4, tied=True),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm4_moe": Family(attention_flag="qkv", qk_flag=("use_qk_norm", "head")),
    "glm4_moe_lite": _LATENT,
    "gpt2": _GPT,
    "gpt_bigcode": replace(_GPT, grouped=True),
    "gpt_neox": replace(_GPT, attention_flag="all", tied=False, positions=False),
    "gpt_oss": replace(_FLAG, attention_bias="all", network_bias=True, sinks=True),
    "gptj": _GPTJ,
    "granite": _FLAGS,
    "granitemoe": _FLAG,
    "granitemoeshared": _FLAG,
    "helium": Family(attention_flag="qkv", network_flag=True),
    "hunyuan_v1_dense": _NORMED,
    "kimi_k2": _LATENT,
    "llama": _FLAGS,
    "llama4_text": _FLAG,
    "minimax_m2": Family(qk_norm="full"),
    "ministral3": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": _PLAIN,
    "mpt": Family(gated=False, tied=True, grouped=False),
    "nanochat": replace(_FLAG, norm_values=0, qk_norm="bare", gated=False),
    "nemotron": replace(_FLAGS, norm_values=2, gated=False),
    "nemotron_h": Family(norms=1, gated=False, network_flag=True),
    "olmo": replace(_FLAG, norm_values=0),
    "olmo2": _NORMED_FULLY,
    "olmo3": _NORMED_FULLY,
    "olmo_hybrid": _FLAG,
    "olmoe": _NORMED_FULLY,
    "opt": replace(_GPT, bias_flag="enable_bias"),
    "persimmon": _PERSIMMON,
    "phi": _PHI,
    "phi3": _PLAIN,
    "phimoe": replace(_FLAG, norm_values=2),
    "qwen2": Family(attention_bias="qkv"),
    "qwen2_moe": Family(attention_bias="qkv"),
    "qwen3": _NORMED,
    "qwen3_5_moe_text": _GATED,
    "qwen3_5_text": _GATED,
    "qwen3_moe": _NORMED,
    "qwen3_next": _GATED,
    "seed_oss": Family(attention_flag="qkv", network_flag=True),
    "smollm3": replace(_FLAGS, tied=True),
    "solar_open": Family(attention_flag="qkv"),
    "stablelm": Family(norm_values=2, qk_flag=("qk_layernorm", "full")),
    "starcoder2": replace(_GPT, positions=False, grouped=True, bias_flag="use_bias"),
    "vaultgemma": replace(_FLAG, tied=True),
    "youtu": replace(_LATENT, tied=True),
}
