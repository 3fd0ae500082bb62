"""Constrained decoding: the tokens that a structural tag allows next, for both engines.

    structural tag ──► Grammars.matcher ──► Matcher ── next_mask() ──► tokens that may be sampled
                                              ▲                              │
                                              └────────── accept(token) ◄────┘

Structural tags: rlsys.common.structural_tags. The torch engine applies the masks itself. vLLM
applies its own; `forced_tokens` then determines which tokens had no alternative.

Shape legend: V vocabulary, W = ceil(V / 32) words of a mask, T completion tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlsys.common.structural_tags import check_structure, xgrammar_module
from rlsys.errors import InvalidValue
from rlsys.types import INJECTED, BoolArray, Generation, GenerationRequest, Int32Array

BITS = 32


def check_request_structure(request: GenerationRequest, *, has_end: bool) -> None:
    """Raise ValueError for a request whose structure cannot be enforced.

    `has_end` is true if a token ends its completion.
    """
    field = f"request {request.request_id!r}: structure"
    if not has_end:
        raise InvalidValue(
            field,
            rule="the model has no end-of-sequence token",
            fix="Use a model with one, or leave the structure out.",
        )
    try:
        check_structure(request.sampling.structure)
    except ValueError as error:
        raise InvalidValue(
            field, rule=f"cannot be compiled ({error})", fix="Pass a valid structural tag."
        ) from error


class Grammars:
    """Compiled structural tags for one model's tokens. Safe to use from several threads.

    `vocab_size` is the width of the model's logits, which may exceed the tokenizer's vocabulary.
    """

    def __init__(self, model_path: str | Path, vocab_size: int) -> None:
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def matcher(
        self, structure: str, stop_token_ids: Sequence[int], prior: Sequence[int] = ()
    ) -> Matcher:
        """Return the state of a completion that already has the tokens `prior`.

        One of `stop_token_ids` ends it.
        """
        with self._lock:
            compiled = self._compiler.compile_structural_tag(structure)
        state = xgrammar_module().GrammarMatcher(
            compiled, override_stop_tokens=list(stop_token_ids)
        )
        matcher = Matcher(state, self._vocab_size)
        for token in prior:
            matcher.accept(token)
        return matcher

    @cached_property
    def _compiler(self) -> Any:
        """Compiler, created on first use because it reads the tokenizer, as vLLM's own is."""
        from transformers import AutoTokenizer

        xgrammar = xgrammar_module()
        tokenizer = AutoTokenizer.from_pretrained(self._model_path)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocab_size)
        return xgrammar.GrammarCompiler(info, cache_limit_bytes=256 * 2**20)


class Matcher:
    """State of one constrained completion."""

    def __init__(self, state: Any, vocab_size: int) -> None:
        self._state = state
        self._num_tail_bits = -vocab_size % BITS
        self._mask = np.zeros((1, -(-vocab_size // BITS)), np.int32)

    def next_mask(self) -> Int32Array:
        """Return a bit for each token, [W]: 1 if it may come next. At least one may."""
        self._state.fill_next_token_bitmask(self._mask)
        if self._num_tail_bits:  # beyond the vocabulary
            self._mask[0, -1] &= np.int32((1 << (BITS - self._num_tail_bits)) - 1)
        mask: Int32Array = self._mask[0].copy()
        return mask

    def accept(self, token: int) -> None:
        """Append a token. Raises ValueError if it may not come next."""
        if not self._state.accept_token(int(token)):
            raise ValueError(f"token {token} does not fit the structure of its completion.")


def num_allowed(mask: Int32Array) -> int:
    """Return the number of tokens that a mask [W] allows."""
    return int(np.bitwise_count(mask.view(np.uint32)).sum())


def forced_tokens(matcher: Matcher, token_ids: Sequence[int]) -> BoolArray:
    """Return True for each of the tokens, [T], that was the only one allowed."""
    forced = np.zeros(len(token_ids), np.bool_)
    for i, token in enumerate(token_ids):
        forced[i] = num_allowed(matcher.next_mask()) == 1
        matcher.accept(token)
    return forced


def with_forced(generation: Generation, forced: BoolArray) -> Generation:
    """Mark the forced tokens [T] of a generation as INJECTED: the policy did not choose them."""
    versions = np.where(forced, np.int32(INJECTED), generation.policy_versions)
    return replace(generation, policy_versions=versions.astype(np.int32))
