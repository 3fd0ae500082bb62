"""Sampling of one token per row: a random stream for each request, inverse-CDF sampling.

    logits [N, V], uniforms [N] ──► tokens [N], log-probabilities [N]

A request's stream depends only on its seed and the token's index in the completion. So a token does
not depend on other rows of its batch, and a continued request draws the same numbers as an
uninterrupted one.

Shape legend: N rows, V vocabulary, C rows truncated by top-k or top-p, M rows with a mask of
allowed tokens, W = ceil(V / 32) words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlsys.types import Float32Array

UInt64Array = npt.NDArray[np.uint64]

# SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

# A lower temperature equals 0 in effect, and dividing by it would overflow float32.
SMALLEST_TEMPERATURE = 1e-20


def stream_key(seed: int) -> int:
    """Return the key, in [0, 2^64), of the random stream of a request's seed (any integer)."""
    return int(mixed(np.array([seed & _MASK], dtype=np.uint64))[0])


def uniforms(keys: UInt64Array, indices: npt.NDArray[Any]) -> Float32Array:
    """Return number `indices[i]` of stream `keys[i]`: [N] in [0, 1), multiples of 2^-24."""
    counters = keys + indices.astype(np.uint64) * np.uint64(_GOLDEN_GAMMA)
    return (mixed(counters) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def mixed(counters: UInt64Array) -> UInt64Array:
    """Return one SplitMix64 output per counter."""
    z = counters + np.uint64(_GOLDEN_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * _FIRST_FACTOR
    z = (z ^ (z >> np.uint64(27))) * _SECOND_FACTOR
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True)
class Cut:
    """Rows truncated to top_k tokens (0: off), then to top_p (1: off)."""

    rows: torch.Tensor  # [C]
    top_k: torch.Tensor  # [C]
    top_p: torch.Tensor  # [C]


@dataclass(frozen=True)
class Allowed:
    """Rows whose next token is restricted to some tokens."""

    rows: torch.Tensor  # [M]
    tokens: torch.Tensor  # [M, V] bool

    @classmethod
    def of(cls, rows: torch.Tensor, masks: torch.Tensor, num_tokens: int) -> Allowed:
        """Create it from masks [M, W] int32: bit b of word w is for token 32 w + b."""
        bits = torch.arange(32, dtype=torch.int32, device=masks.device)
        unpacked = (masks[:, :, None] >> bits) & 1  # [M, W, 32]
        return cls(rows, unpacked.flatten(1)[:, :num_tokens].bool())


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    temperature: torch.Tensor,
    cut: Cut | None = None,
    allowed: Allowed | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from softmax(logits / temperature), masked and truncated; logits [N, V], others [N].

    Returns tokens [N] int64 and their float32 log-probabilities [N] before masking and truncation,
    like those that a trainer computes.
    """
    scaled = logits.float() / temperature.clamp(min=SMALLEST_TEMPERATURE)[:, None]
    logprobs = scaled.log_softmax(-1)  # [N, V]
    tokens = draw(logprobs, uniforms, cut, allowed)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def draw(
    logprobs: torch.Tensor,
    uniforms: torch.Tensor,
    cut: Cut | None = None,
    allowed: Allowed | None = None,
) -> torch.Tensor:
    """Return tokens [N] int64 from distributions [N, V], masked and truncated.

    `uniforms` [N] are numbers in [0, 1), one for each draw. A row that is not finite gets any
    token that it may sample; the token's log-probability is not finite either, by which engines
    recognize it (Generation.until_failure). Other rows do not depend on such a row.
    """
    if allowed is not None:
        return _draw_allowed(logprobs, uniforms, cut, allowed)
    weights = logprobs.exp()  # [N, V]
    if cut is not None:
        weights[cut.rows] = cut_tail(weights[cut.rows], top_k=cut.top_k, top_p=cut.top_p)
    cumulative = weights.cumsum(-1)  # [N, V]
    total = cumulative[:, -1]
    # Rounding may raise uniforms · total to total, which is in no token's interval.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms * total, below_total)[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True)  # first token above target
    return tokens.squeeze(1).clamp(max=logprobs.shape[1] - 1)  # beyond the last for NaN


def _draw_allowed(
    logprobs: torch.Tensor, uniforms: torch.Tensor, cut: Cut | None, allowed: Allowed
) -> torch.Tensor:
    within = logprobs[allowed.rows].masked_fill(~allowed.tokens, -torch.inf)  # [M, V]
    within = within.log_softmax(-1)  # otherwise all might underflow
    restricted = logprobs.clone()
    restricted[allowed.rows] = within
    tokens = draw(restricted, uniforms, cut)
    drawn = tokens[allowed.rows]
    # A parallel sum may round so that a token of weight 0 is drawn, and a row may be NaN.
    is_allowed = allowed.tokens.gather(1, drawn[:, None]).squeeze(1)
    likeliest = within.masked_fill(~allowed.tokens, -torch.inf).argmax(-1)
    tokens[allowed.rows] = torch.where(is_allowed, drawn, likeliest)
    return tokens


def cut_tail(weights: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero all but each row's top_k largest weights, then all but the fewest that sum to top_p.

    Tokens as likely as the last kept one are kept too, so the order of equal weights does not
    matter. weights [C, V], the others [C].
    """
    num_tokens = weights.shape[1]
    descending = weights.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k.clamp(max=num_tokens), num_tokens)[:, None] - 1
    rank = torch.arange(num_tokens, device=weights.device)
    descending = descending.masked_fill(rank > last, 0)
    cumulative = descending.cumsum(-1)
    wanted = top_p[:, None] * cumulative[:, -1:]
    last_wanted = (cumulative < wanted).sum(-1, keepdim=True)
    threshold = descending.gather(1, torch.minimum(last_wanted, last))
    return weights.masked_fill(weights < threshold, 0)
