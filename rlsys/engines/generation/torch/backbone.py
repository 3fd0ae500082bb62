"""A Hugging Face model as the sampler runs it: whole prompts, then one token per sequence.

    prefill(token_ids [U, T], first [U]) ─► [U, T, D] ─┐
    decode(token_ids [N]) ────► [N, D] ────────────────┴─► logits [N, V]

Keys and values are in a SlotCache. Prompts use transformers' own forward pass; single tokens use
FusedDecoder if it supports the architecture. Both are first compared with whole passes on a
miniature of the model.

Shape legend: U prompts, T tokens of the longest, N sequences, D hidden width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rlsys.engines.devices.offload import OffloadedMemory
from rlsys.engines.generation.torch.adapter_bank import AdapterBank
from rlsys.engines.generation.torch.fused_decoder import FusedDecoder, is_llama_like
from rlsys.engines.generation.torch.kv_cache import ROW_BLOCK, TOKEN_BLOCK, SlotCache, slot_capacity
from rlsys.engines.generation.torch.weight_buffers import Exchange, WeightBuffers, exchange
from rlsys.engines.models.architecture_probe import (
    TOLERANCE,
    Architecture,
    check_architecture,
    difference,
)
from rlsys.engines.models.attention import AttentionRule, causal_attention
from rlsys.engines.models.attention_context import context_length
from rlsys.engines.models.causal_lm import Head, backbone
from rlsys.engines.models.expert_layout import Routing
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.models.routing import RoutingRecorder, routing_of
from rlsys.errors import InvalidValue
from rlsys.reallocation.transport.tensor_copies import copy_parts
from rlsys.reallocation.transport.weight_views import Tensors, Weights
from rlsys.types import ExpertArray

logger = logging.getLogger(__name__)

Decode = Callable[[torch.Tensor, torch.Tensor, SlotCache], torch.Tensor]


class Backbone:
    """A model with a KV cache.

    Raises ValueError for an architecture that rlsys does not compute correctly, or whose decoding
    needs more than keys and values; with `records_routing`, for one without experts.
    """

    def __init__(self, model: Any, *, records_routing: bool = False) -> None:
        architecture = check_architecture(model)
        plain = _Decoder(architecture.miniature)
        reason = _fault(architecture, plain, plain.decode)
        if reason is not None:
            raise InvalidValue(
                "model.path",
                rule=f"{type(model).__name__} gives other log-probabilities token by token than in "
                f"one pass ({reason}); the torch engine supports only models whose layers keep "
                "nothing but keys and values",
                fix='Use rollout.engine="vllm".',
            )
        self._decoder = _Decoder(model)
        self._decode: Decode = self._decoder.decode
        self._model = model
        self._fused: FusedDecoder | None = None
        self._recorder: RoutingRecorder | None = None
        self._released: OffloadedMemory | None = None  # on GPUs
        self._device = next(model.parameters()).device
        self.routing: Routing | None = None
        fault = _resume_fault(architecture, plain)
        self.resumes = fault is None  # a prompt can run after cached keys and values
        if fault is not None:
            logger.warning(
                "%s cannot run a prompt after cached keys and values of its first tokens (%s): "
                "every turn of a conversation runs its whole prompt.",
                type(model).__name__,
                fault,
            )
        self.logits = Head(model)
        with torch.no_grad():
            self.bytes_per_token = self._measure()
            if is_llama_like(model) and _is_right_when_fused(architecture):
                self._fused = FusedDecoder(model, _attention_rules(model))
                self._decode = self._fused
        tensors = model_tensors(model)
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._shapes = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
        fused = [] if self._fused is None else self._fused.buffers
        in_fused = {id(parameter) for one in fused for parameter in one.parameters}
        others = [WeightBuffers([t]) for t in tensors.values() if id(t) not in in_fused]
        self._buffers = [*fused, *others]
        self.adapters: AdapterBank | None = None  # from `open_adapters` on
        if records_routing:
            self.routing = routing_of(model)
            self._recorder = RoutingRecorder(model)

    @property
    def is_fused(self) -> bool:
        """True if FusedDecoder decodes."""
        return self._fused is not None

    def prefill(
        self, token_ids: torch.Tensor, cache: SlotCache, first: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return hidden states [U, T, D] of right-padded prompts [U, T].

        With `first` [U] the tokens are those from these positions on; see SlotCache.begin_prefill.
        """
        return self._decoder.prefill(token_ids, cache, first)

    def decode(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Return hidden states [N, D] of one token [N] of each sequence; see begin_decode."""
        return self._decode(token_ids, positions, cache)

    def open_adapters(self) -> AdapterBank:
        """Return the bank of the model's adapters, created by the first call."""
        if self.adapters is None:
            self.adapters = AdapterBank(self._model)
            if self._fused is not None:
                self._fused.use(self.adapters)
        return self.adapters

    def take_experts(self) -> ExpertArray:
        """Return experts [U·T, L·K] or [N, L·K] of the last pass, if routing is recorded."""
        assert self._recorder is not None
        assert self.routing is not None
        experts: ExpertArray = self._recorder.take().cpu().numpy().astype(self.routing.dtype)
        return experts

    @property
    def tensors(self) -> Tensors:
        """Tensors of the model as meta tensors."""
        return self._shapes

    def release(self) -> None:
        """Free the memory of the weights until the next `load`."""
        self.logits.release()
        if self._device.type == "cpu":
            for one in self._buffers:
                one.release()
            self._refresh()
        else:
            self._released = OffloadedMemory(model_tensors(self._model).values())

    def prepare(self, weights: Weights) -> Exchange | None:
        """Prepare an update while the model runs, on any thread; `weights` fit `tensors`.

        Returns None on GPUs, which have no memory for two versions.
        """
        if self._device.type != "cpu":
            return None
        return exchange(self._buffers, self._names, weights)

    def load(self, weights: Weights, prepared: Exchange | None) -> list[torch.Tensor]:
        """Replace the weights with the result of `prepare`; return the old ones, slow to free."""
        replaced = []
        if prepared is not None:
            replaced = prepared.switch()
        else:
            self._overwrite(weights)
        self._refresh()
        return replaced

    def _refresh(self) -> None:
        """Discard what was computed from other weights."""
        self.logits.release()
        if self._fused is not None:
            with torch.no_grad():
                self._fused.refresh()

    def _overwrite(self, weights: Weights) -> None:
        if self._released is not None:
            self._released.take_back()
            self._released = None
        tensors = model_tensors(self._model)
        copy_parts((tensors[name][box.slices], part) for name, box, part in weights.parts())

    def _measure(self) -> int:
        """Return the bytes of the cache per token."""
        device = next(self._model.parameters()).device
        cache = SlotCache(max_slots=1, max_tokens=ROW_BLOCK * slot_capacity(1), device=str(device))
        cache.reserve(1, 1)
        cache.begin_prefill(0, torch.zeros(1, dtype=torch.long, device=device))
        self.prefill(torch.zeros(1, 1, dtype=torch.long, device=device), cache)
        return cache.bytes_per_token


class _Decoder:
    """A model's own forward pass with a cache."""

    def __init__(self, model: Any) -> None:
        self._backbone = backbone(model)
        self._last_position = context_length(model.config) - 1

    def prefill(
        self, token_ids: torch.Tensor, cache: SlotCache, first: torch.Tensor | None = None
    ) -> torch.Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
        if first is not None:
            positions = first[:, None] + positions
        # Padding may exceed the context, where a model may have no position.
        return self._run(token_ids, positions.clamp(max=self._last_position), cache)

    def decode(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        return self._run(token_ids[:, None], positions[:, None], cache)[:, 0]

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        output = self._backbone(
            input_ids=token_ids, position_ids=positions, use_cache=False, kv_cache=cache
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden


def _is_right_when_fused(architecture: Architecture) -> bool:
    small = architecture.miniature
    fused = FusedDecoder(small, _attention_rules(small))
    return _fault(architecture, _Decoder(small), fused) is None


@torch.no_grad()
def _fault(architecture: Architecture, decoder: _Decoder, decode: Decode) -> str | None:
    """Return what is wrong with decoding the architecture's rows token by token.

    Each row has a slot of its own and is decoded to its end after a prompt of at most two tokens.
    Returns None if all log-probabilities are as expected.
    """
    rows, head = architecture.rows, Head(architecture.miniature)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))  # longest first
    longest = len(rows[order[0]])
    device = rows[0].device
    cache = SlotCache(
        max_slots=len(rows),
        max_tokens=ROW_BLOCK * slot_capacity(longest + TOKEN_BLOCK),
        device=str(device),
    )
    num_prompt = min(2, longest)
    prompts = torch.stack(
        [
            torch.cat((rows[i][:num_prompt], rows[i].new_zeros(num_prompt)))[:num_prompt]
            for i in order
        ]
    )
    worst = 0.0

    def compare(hidden: torch.Tensor, numbers: list[int], position: int) -> None:
        nonlocal worst
        found = head(hidden).float().log_softmax(-1)
        for one, index in zip(found, numbers, strict=True):
            worst = max(worst, difference(one, architecture.expected[index][position]))

    try:
        cache.reserve(len(rows), longest)
        cache.begin_prefill(0, torch.arange(len(rows), device=device))
        hidden = decoder.prefill(prompts, cache)
        for position in range(longest):
            running = [index for index in order if len(rows[index]) > position]
            if position < num_prompt:
                compare(hidden[: len(running), position], running, position)
                continue
            positions = torch.full((len(running),), position, device=device)
            cache.begin_decode(positions)
            tokens = torch.stack([rows[index][position] for index in running])
            compare(decode(tokens, positions, cache), running, position)
    except Exception as error:  # noqa: BLE001 - the caller reports it
        return f"{type(error).__name__}: {error}"
    if cache.bytes_per_token == 0:
        return "no layer gives its keys and values to the cache"
    return None if worst <= TOLERANCE else f"they differ by {worst:.1g} nats"


@torch.no_grad()
def _resume_fault(architecture: Architecture, decoder: _Decoder) -> str | None:
    """Return what is wrong with running the architecture's rows in two parts, using the cache.

    Returns None if all log-probabilities are as expected.
    """
    head = Head(architecture.miniature)
    worst = 0.0
    try:
        for row, expected in zip(architecture.rows, architecture.expected, strict=True):
            for num_first in {1, len(row) // 2, len(row) - 1} - {0, -1, len(row)}:
                cache = SlotCache(
                    max_slots=2,
                    max_tokens=ROW_BLOCK * slot_capacity(len(row)),
                    device=str(row.device),
                )
                cache.reserve(2, len(row))
                source = torch.zeros(1, dtype=torch.long, device=row.device)
                cache.begin_prefill(1, source)
                decoder.prefill(row[None, :num_first], cache)
                first = torch.full((1,), num_first, device=row.device)
                cache.begin_prefill(1, source, first, num_places=len(row))
                hidden = decoder.prefill(row[None, num_first:], cache, first)
                found = head(hidden[0]).float().log_softmax(-1)
                worst = max(worst, difference(found, expected[num_first:]))
    except Exception as error:  # noqa: BLE001 - the caller disables the feature
        return f"{type(error).__name__}: {error}"
    return None if worst <= TOLERANCE else f"they differ by {worst:.1g} nats"


class _RuleRecorder:
    """A KeyValueCache that only records the attention rule of each layer."""

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
    with torch.no_grad():
        backbone(model)(input_ids=token_ids, use_cache=False, kv_cache=recorder)
    return recorder.rules
