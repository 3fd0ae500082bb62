"""A Hugging Face model as the sampler runs it: whole prompts, then one token a sequence.

    prefill(token_ids [U, T]) ─► [U, T, D] ─┐
    decode(token_ids [N]) ────► [N, D] ─────┴─► logits [N, V]

Keys and values stand in a SlotCache. Prompts go through transformers' own forward pass, single
tokens through FusedDecoder where it knows the architecture and agrees in numbers.

Shape legend: U prompts, T tokens of the longest, N sequences, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlsys.engines.attention import AttentionRule, causal_attention
from rlsys.engines.causal_lm import Head, check_head
from rlsys.engines.generation.fused_decoder import FusedDecoder, is_llama_like
from rlsys.engines.generation.kv_cache import SlotCache, room
from rlsys.engines.generation.manifest_check import check_manifest
from rlsys.engines.model_tensors import model_tensors
from rlsys.layout.transport.shm import open_weights
from rlsys.types import WeightManifest

Decode = Callable[[torch.Tensor, torch.Tensor, SlotCache], torch.Tensor]

# Largest difference between decoding and a whole forward pass, as a share of the largest value.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class Backbone:
    """Raises ValueError for an architecture that cannot be decoded from keys and values alone."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits = Head(model)
        self._fused: FusedDecoder | None = None
        with torch.no_grad():
            check_head(model)
            difference, self.bytes_per_token = self._check(self._decode_by_model)
            if difference > TOLERANCE[model.dtype]:
                raise ValueError(
                    f"{type(model).__name__} decodes token by token to other hidden states than at "
                    f"once (relative difference {difference:.1g}), so it keeps more than keys and "
                    'values, which the torch engine does not know; use rollout.engine="vllm".'
                )
            if is_llama_like(model):
                fused = FusedDecoder(model, _attention_rules(model))
                difference, _ = self._check(fused)
                self._fused = fused if difference <= TOLERANCE[model.dtype] else None

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    def prefill(self, token_ids: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Hidden states [U, T, D] of right-padded prompts [U, T]; see SlotCache.begin_prefill."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        return self._run(token_ids, positions, cache)

    def decode(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Hidden states [N, D] of one token [N] of each sequence; see SlotCache.begin_decode."""
        return (self._fused or self._decode_by_model)(token_ids, positions, cache)

    def load(self, manifest: WeightManifest) -> None:
        """Overwrite the weights in place.

        Raises ValueError, and changes nothing, if names or shapes do not fit the model or the bytes
        are not those that were published.
        """
        tensors = model_tensors(self._model)
        check_manifest(manifest, {name: tuple(t.shape) for name, t in tensors.items()})
        with torch.no_grad():
            for name, tensor in open_weights(manifest).items():
                tensors[name].copy_(tensor)
            if self._fused is not None:
                self._fused.refresh()

    def _decode_by_model(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        return self._run(token_ids[:, None], positions[:, None], cache)[:, 0]

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        output = self._model.get_decoder()(
            input_ids=token_ids, position_ids=positions, use_cache=False, kv_cache=cache
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _check(self, decode: Decode) -> tuple[float, int]:
        """Relative difference of hidden states, decoding the last tokens of two sequences or
        running all at once; and the bytes that the cache takes for a token."""
        device = next(self._model.parameters()).device
        token_ids = torch.arange(12, device=device).view(2, 6)
        expected = self._model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
        cache = SlotCache(max_slots=2, max_tokens=2 * room(6), device=str(device))
        cache.reserve(2, 6)
        cache.begin_prefill(0, torch.arange(2, device=device))
        self.prefill(token_ids[:, :5], cache)
        positions = torch.full((2,), 5, device=device)
        cache.begin_decode(positions)
        found = decode(token_ids[:, 5], positions, cache)
        difference = (found - expected[:, 5]).abs().max() / expected.abs().max()
        return float(difference), cache.bytes_per_token


class _RuleRecorder:
    """A KeyValueCache that keeps nothing but how each layer attends."""

    def __init__(self) -> None:
        self.rules: dict[int, AttentionRule] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        self.rules[layer] = rule
        return causal_attention(query, key, value, rule)


def _attention_rules(model: Any) -> dict[int, AttentionRule]:
    recorder = _RuleRecorder()
    token_ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    model.get_decoder()(input_ids=token_ids, use_cache=False, kv_cache=recorder)
    return recorder.rules
