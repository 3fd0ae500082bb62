"""Attention of both engines, plugged into Hugging Face models under the name "rlsys".

    query, key, value [B, heads, T, D] ──► attended values [B, T, heads, D]

Without a cache the rows are whole sequences, right-padded, and attention is causal: padding needs
no mask, because no real token looks at what stands behind it. With a packing (the trainer's) whole
sequences stand in one row, what they begin with alike only once. With a cache (the sampler's) the
keys and values go there, and the cache answers.

transformers hands a model's keyword arguments through to its attention function; that is how the
cache gets here. Instead of a mask it gets a Band: which tokens a layer's tokens see besides those
that causality hides.

Shape legend: B rows, T tokens, C places of a cache, H key/value heads, G query heads per key/value
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
    """What a model computes and rlsys does not; the message says it of an "it"."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """What a causal mask hides of a token's past."""

    window: int | None = None  # a token sees itself and the window − 1 tokens before it
    chunk: int | None = None  # a token sees its own chunk of a row only: Llama 4


@dataclass(frozen=True)
class UnknownMask:
    """A mask that no Band can say; raises UnknownComputation if a layer attends by it."""

    kinds: frozenset[str]  # functions of transformers.masking_utils


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRule:
    """How one layer attends."""

    scaling: float  # of query · key
    sliding_window: int | None = None  # as Band.window
    chunk: int | None = None  # as Band.chunk
    softcap: float | None = None  # scores are squashed into (−softcap, softcap)
    # [H·G]: a score of each head that takes its share of the weight and has no value (GPT-OSS).
    sinks: torch.Tensor | None = None


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


class Shards(Protocol):
    """Ranks that share the tokens of a pass."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        scaling: float | None,
    ) -> torch.Tensor:
        """`attend` over all tokens, for some of the heads that this rank has. With `scaling`, that
        is tree_attention.
        """

    def own_heads(self, per_head: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Those of all heads' values that this rank attends with, where it has `num_heads` before
        ranks exchange them.
        """


def register_attention() -> None:
    """Make `attn_implementation="rlsys"` known to transformers. Idempotent."""
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
    """Attention within whole sequences that begin at position 0; differentiable.

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
    """Causal attention of each row's tokens `first` .. `first` + T − 1, with first [B], to all that
    stand in the row's places: the token at position i in place i.

    query [B, H·G, T, D], key and value [B, H, C, D]; returns [B, T, H·G, D].
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
    """With soft caps and sinks, of which torch's fused attention knows neither; `visible` is
    broadcast to [B, H, G, T, C].
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
    """The same within each of the rows of a packing: query [1, H·G, M, D], key and value
    [1, H, M, D]; returns [1, M, H·G, D].
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
    """Whether tree_attention computes it: tokens see all of their past, and nothing else."""
    is_plain = rule.softcap is None and rule.sinks is None and not dropout
    bounds = (rule.sliding_window, rule.chunk)
    sees_all = all(bound is None or bound >= packing.longest for bound in bounds)
    return is_plain and sees_all and takes(query, value)


def causal_mask(
    num_tokens: int, window: int | None, chunk: int | None, device: torch.device
) -> torch.Tensor:
    """[T, T] bool: True where the row's token sees the column's."""
    position = torch.arange(num_tokens, device=device)
    return _visible(position[:, None], position, window, chunk)


def _visible(
    position: torch.Tensor, place: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor:
    """Does a token at `position` [..., 1] see those at `place` [C]?"""
    distance = position - place
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if chunk is not None:
        visible &= position // chunk == place // chunk
    return visible


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Float32 weights of `scores` [..., T]; the sinks, broadcast to [...], take the rest of the
    weight.
    """
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.cat((scores, column), -1).softmax(-1, dtype=torch.float32)[..., :-1]


def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Squash into (−cap, cap), as Gemma 2 does (2408.00118, section 2)."""
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
    """Transformers' attention signature. Raises UnknownComputation for what a model asks for
    beyond it.
    """
    if not (attention_mask is None or isinstance(attention_mask, Band)):
        raise UnknownComputation(
            f"it brings an attention mask of its own, {_described(attention_mask)}"
        )
    if others.get("position_bias") is not None:
        raise UnknownComputation("it adds a bias of positions to attention scores")
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
    """Transformers' mask signature."""
    kinds = frozenset(map(_kind, _conjuncts(mask_function)))
    # That rows are packed, transformers concludes from the positions; Packing knows it by itself.
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
    """The function of transformers.masking_utils that it is or that made it."""
    return mask_function.__qualname__.partition(".")[0]


def _described(mask: object) -> str:
    if isinstance(mask, UnknownMask):
        return ", ".join(sorted(mask.kinds)) or "with functions of its own"
    return f"a {type(mask).__name__}"
