"""Attention function of both engines, registered with Hugging Face transformers as "rlsys".

    query, key, value [B, heads, T, D] ──► attended values [B, T, heads, D]

    no cache   whole sequences, right-padded, causal. Padding needs no mask, because real tokens
               never attend to the tokens after them.
    packing    (trainer) whole sequences in one row, each shared prefix stored once
    cache      (sampler) keys and values go into the cache, and the cache computes attention

transformers passes a model's keyword arguments on to its attention function, which gives this
module the packing or the cache. Instead of a mask tensor it passes a Band, which limits a layer's
causal attention to a window or a chunk.

Shape legend: B rows, T tokens, C slots of a cache, H key/value heads, G query heads per key/value
head, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from rlsys.engines.models import block_attention
from rlsys.engines.models.row_packing import Packing
from rlsys.engines.models.tree_attention import takes, tree_attention

ATTENTION = "rlsys"


class UnknownComputation(ValueError):
    """A computation of a model that rlsys does not implement.

    The message's subject is "it", the model.
    """


@dataclass(frozen=True, kw_only=True)
class Band:
    """The part of a token's past that a layer's causal attention can see."""

    window: int | None = None  # a token attends to itself and the window − 1 tokens before it
    chunk: int | None = None  # a token attends to its own chunk of a row only (Llama 4)


@dataclass(frozen=True)
class UnknownMask:
    """A mask that no Band describes. A layer that uses it raises UnknownComputation."""

    kinds: frozenset[str]  # functions of transformers.masking_utils


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRule:
    """Parameters of one layer's attention."""

    scaling: float  # factor of query · key
    sliding_window: int | None = None  # as Band.window
    chunk: int | None = None  # as Band.chunk
    softcap: float | None = None  # scores are squashed into (−softcap, softcap)
    # [H·G]: one extra score per head in the softmax, without a value (GPT-OSS).
    sinks: torch.Tensor | None = None


class KeyValueCache(Protocol):
    """Keys and values of the tokens before, as the sampler keeps them."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Store key and value [B, H, T, D] of a layer and return attended values [B, T, H·G, D]."""


class Shards(Protocol):
    """Ranks that share the tokens of a micro-batch."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        scaling: float | None,
    ) -> torch.Tensor:
        """Return `attend` over the tokens of all ranks, for part of this rank's heads.

        `scaling` is set if `attend` is tree_attention.
        """

    def own_heads(self, per_head: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Return the part of `per_head` [all heads] that belongs to the heads of this rank.

        `num_heads` is the number of this rank's heads before ranks exchange heads.
        """


def register_attention() -> None:
    """Register `attn_implementation="rlsys"` with transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _band)


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    *,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return attention within whole sequences that begin at position 0; differentiable.

    query [B, H·G, T, D], key and value [B, H, T, D]; returns [B, T, H·G, D].
    """
    num_tokens, window, chunk = query.shape[2], rule.sliding_window, rule.chunk
    if window is not None and window >= num_tokens:
        window = None
    if chunk is not None and chunk >= num_tokens:
        chunk = None
    if rule.softcap is None and rule.sinks is None:
        is_plain = window is None and chunk is None
        fused = partial(
            F.scaled_dot_product_attention,
            attn_mask=None if is_plain else causal_mask(num_tokens, window, chunk, query.device),
            is_causal=is_plain,
            dropout_p=dropout,
            scale=rule.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return fused(query, key, value).transpose(1, 2)
    visible = causal_mask(num_tokens, window, chunk, query.device)
    return _grouped_attention(query, key, value, rule, visible, dropout)


def attention_behind(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    first: torch.Tensor,
) -> torch.Tensor:
    """Return causal attention of new tokens to all cached tokens of their rows.

    Row b has new tokens at positions first[b] .. first[b] + T − 1. The token at position i is in
    slot i of the cache.

    query [B, H·G, T, D], key and value [B, H, C, D], first [B]; returns [B, T, H·G, D].
    """
    place = torch.arange(key.shape[2], device=key.device)
    position = first[:, None] + torch.arange(query.shape[2], device=key.device)  # [B, T]
    visible = _visible(position[:, :, None], place, rule.sliding_window, rule.chunk)  # [B, T, C]
    if rule.softcap is not None or rule.sinks is not None:
        return _grouped_attention(query, key, value, rule, visible[:, None, None], 0.0)
    fused = partial(
        F.scaled_dot_product_attention,
        attn_mask=visible[:, None],
        scale=rule.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return fused(query, key, value).transpose(1, 2)


def _grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    visible: torch.Tensor,
    dropout: float,
) -> torch.Tensor:
    """Return attention with soft caps or sinks, which torch's fused attention does not support.

    `visible` is broadcast to [B, H, G, T, C].
    """
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, H, G, T, D]
    scores = grouped @ key.unsqueeze(2).mT * rule.scaling
    if rule.softcap is not None:
        scores = soft_cap(scores, rule.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    sinks = None if rule.sinks is None else rule.sinks.view(key.shape[1], -1, 1)  # [H, G, 1]
    weights = softmax_with_sinks(scores, sinks)
    weights = F.dropout(weights.to(query.dtype), dropout)  # [B, H, G, T, C]
    return (weights @ value.unsqueeze(2)).flatten(1, 2).transpose(1, 2)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    packing: Packing,
    *,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return causal attention within each row of a packing.

    query [1, H·G, M, D], key and value [1, H, M, D]; returns [1, M, H·G, D].
    """
    if packing.calls and _follows_tree(query, value, rule, packing, dropout):
        along = partial(tree_attention, calls=packing.calls, scaling=rule.scaling)
        return along(query, key, value)
    if block_attention.takes(query, value) and not dropout:
        return block_attention.block_attention(
            query,
            key,
            value,
            packing.mask(rule.sliding_window, rule.chunk),
            scaling=rule.scaling,
            softcap=rule.softcap,
            sinks=rule.sinks,
        )
    query, key, value = (packing.pad(heads) for heads in (query, key, value))
    return packing.unpad(causal_attention(query, key, value, rule, dropout=dropout))


def _follows_tree(
    query: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    packing: Packing,
    dropout: float,
) -> bool:
    """Return whether tree_attention applies: tokens attend to all of their past, without extras."""
    is_plain = rule.softcap is None and rule.sinks is None and not dropout
    bounds = (rule.sliding_window, rule.chunk)
    sees_all = all(bound is None or bound >= packing.longest for bound in bounds)
    return is_plain and sees_all and takes(query, value)


def causal_mask(
    num_tokens: int, window: int | None, chunk: int | None, device: torch.device
) -> torch.Tensor:
    """Return a mask [T, T] bool, True where the token of the row sees the token of the column."""
    position = torch.arange(num_tokens, device=device)
    return _visible(position[:, None], position, window, chunk)


def _visible(
    position: torch.Tensor, place: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor:
    """Return whether a token at `position` [..., 1] sees tokens at `place` [C]."""
    distance = position - place
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if chunk is not None:
        visible &= position // chunk == place // chunk
    return visible


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return float32 softmax weights of `scores` [..., T].

    The sinks, broadcast to [...], receive the rest of the weight.
    """
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.cat((scores, column), -1).softmax(-1, dtype=torch.float32)[..., :-1]


def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Squash scores into (−cap, cap), as Gemma 2 does (2408.00118, section 2)."""
    return torch.tanh(scores / cap) * cap


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Band | UnknownMask | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kv_cache: KeyValueCache | None = None,
    packing: Packing | None = None,
    shards: Shards | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the signature that transformers expects.

    Raises UnknownComputation if a model passes arguments that change the result and are not known.
    """
    if not (attention_mask is None or isinstance(attention_mask, Band)):
        raise UnknownComputation(f"it uses its own attention mask, {_describe(attention_mask)}")
    if others.get("position_bias") is not None:
        raise UnknownComputation("it adds a position bias to attention scores")
    band = attention_mask or Band()
    rule = AttentionRule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window or band.window,
        chunk=band.chunk,
        softcap=softcap,
        sinks=s_aux,
    )
    if shards is not None:
        attended = _sharded_attention(query, key, value, rule, packing, shards, dropout)
    elif packing is not None:
        attended = packed_attention(query, key, value, rule, packing, dropout=dropout)
    elif kv_cache is None:
        attended = causal_attention(query, key, value, rule, dropout=dropout)
    else:
        layer: Any = module.layer_idx
        attended = kv_cache.attend(layer, query, key, value, rule)
    return attended.contiguous(), None


def _sharded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    packing: Packing | None,
    shards: Shards,
    dropout: float,
) -> torch.Tensor:
    if rule.sinks is not None:
        rule = replace(rule, sinks=shards.own_heads(rule.sinks, query.shape[1]))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if packing is None:
            return causal_attention(query, key, value, rule, dropout=dropout)
        return packed_attention(query, key, value, rule, packing, dropout=dropout)

    is_tree = packing is not None and _follows_tree(query, value, rule, packing, dropout)
    return shards.attend(query, key, value, attend, rule.scaling if is_tree else None)


def _band(
    *, mask_function: Callable[..., Any], use_vmap: bool, local_size: int | None = None, **_: Any
) -> Band | UnknownMask | None:
    """Return a layer's Band, with the mask signature that transformers expects."""
    kinds = frozenset(map(_kind, _conjuncts(mask_function)))
    # transformers infers packed rows from the positions; Packing already describes them.
    kinds -= {"causal_mask_function", "packed_sequence_mask_function"}
    if use_vmap or kinds - {"sliding_window_overlay", "chunked_overlay"}:
        return UnknownMask(kinds)
    if not kinds:
        return None
    return Band(chunk=local_size) if "chunked_overlay" in kinds else Band(window=local_size)


def _conjuncts(mask_function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if _kind(mask_function) != "and_masks":
        yield mask_function
        return
    (functions,) = (cell.cell_contents for cell in mask_function.__closure__ or ())
    for one in functions:
        yield from _conjuncts(one)


def _kind(mask_function: Callable[..., Any]) -> str:
    """Return the function of transformers.masking_utils that `mask_function` is or that made it."""
    return mask_function.__qualname__.partition(".")[0]


def _describe(mask: object) -> str:
    if isinstance(mask, UnknownMask):
        return ", ".join(sorted(mask.kinds)) or "with functions of its own"
    return f"a {type(mask).__name__}"
