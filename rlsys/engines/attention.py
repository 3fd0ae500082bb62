"""Attention of both engines, plugged into Hugging Face models under the name "rlsys".

    query, key, value [B, heads, T, D] ──► attended values [B, T, heads, D]

Without a cache the rows are whole sequences, right-padded, and attention is causal: padding needs
no mask, because no real token looks at what stands behind it. With a packing (the trainer's) whole
sequences stand in one row, one after another. With a cache (the sampler's) the keys and values go
there, and the cache answers.

transformers hands a model's keyword arguments through to its attention function; that is how the
cache gets here.

Shape legend: B rows, T tokens, H key/value heads, G query heads per key/value head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from rlsys.engines.packing import Packing

ATTENTION = "rlsys"


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """How one layer attends."""

    scaling: float  # of query · key
    sliding_window: int | None = None  # a token sees itself and the window − 1 tokens before it
    softcap: float | None = None  # scores are squashed into (−softcap, softcap)


class KeyValueCache(Protocol):
    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Keep key and value [B, H, T, D] of a layer; returns attended values [B, T, H·G, D]."""


def register_attention() -> None:
    """Make `attn_implementation="rlsys"` known to transformers. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    *,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention within whole sequences that begin at position 0; differentiable.

    query [B, H·G, T, D], key and value [B, H, T, D]; returns [B, T, H·G, D].
    """
    num_tokens, window = query.shape[2], rule.sliding_window
    if window is not None and window >= num_tokens:
        window = None
    if rule.softcap is None:
        visible = None if window is None else causal_mask(num_tokens, window, query.device)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            is_causal=visible is None,
            dropout_p=dropout,
            scale=rule.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.transpose(1, 2)
    # torch's fused attention knows no soft cap.
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, H, G, T, D]
    scores = soft_cap(grouped @ key.unsqueeze(2).mT * rule.scaling, rule.softcap)
    hidden = ~causal_mask(num_tokens, window, query.device)  # [T, T]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
    weights = F.dropout(weights.to(query.dtype), dropout)  # [B, H, G, T, T]
    return (weights @ value.unsqueeze(2)).flatten(1, 2).transpose(1, 2)


def causal_mask(num_tokens: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[T, T] bool: True where the row's token sees the column's."""
    position = torch.arange(num_tokens, device=device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Squash into (−cap, cap), as Gemma 2 does (2408.00118, section 2)."""
    return torch.tanh(scores / cap) * cap


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kv_cache: KeyValueCache | None = None,
    packing: Packing | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature."""
    assert attention_mask is None, "rlsys attention is causal over whole sequences; pass no mask"
    rule = AttentionRule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    if packing is not None:
        query, key, value = (packing.pad(heads) for heads in (query, key, value))
        attended = packing.unpad(causal_attention(query, key, value, rule, dropout=dropout))
    elif kv_cache is None:
        attended = causal_attention(query, key, value, rule, dropout=dropout)
    else:
        layer: Any = module.layer_idx
        attended = kv_cache.attend(layer, query, key, value, rule)
    return attended.contiguous(), None
