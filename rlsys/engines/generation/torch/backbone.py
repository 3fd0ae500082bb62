"""A Hugging Face model as the sampler runs it: whole prompts, then one token a sequence.

    prefill(token_ids [U, T], first [U]) ─► [U, T, D] ─┐
    decode(token_ids [N]) ────► [N, D] ────────────────┴─► logits [N, V]

Keys and values stand in a SlotCache. Prompts go through transformers' own forward pass, single
tokens through FusedDecoder where it knows the architecture and agrees in numbers. Both agree with
whole passes on a miniature of the model before they run.

Shape legend: U prompts, T tokens of the longest, N sequences, D hidden width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from rlsys.engines.devices.offload import OffloadedMemory
from rlsys.engines.generation.torch.fused_decoder import FusedDecoder, is_llama_like
from rlsys.engines.generation.torch.kv_cache import ROW_BLOCK, TOKEN_BLOCK, SlotCache, room
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
from rlsys.engines.models.model_tensors import model_tensors
from rlsys.engines.models.routing import Routing, RoutingRecorder, routing_of
from rlsys.reallocation.transport.staging import copy_parts
from rlsys.reallocation.transport.weight_views import Tensors, Weights
from rlsys.types import ExpertArray

logger = logging.getLogger(__name__)

Decode = Callable[[torch.Tensor, torch.Tensor, SlotCache], torch.Tensor]


class Backbone:
    """Raises ValueError for an architecture that rlsys gets wrong, or that cannot be decoded from
    keys and values alone; with `records_routing`, for one without experts.
    """

    def __init__(self, model: Any, *, records_routing: bool = False) -> None:
        architecture = check_architecture(model)
        plain = _Decoder(architecture.miniature)
        reason = _fault(architecture, plain, plain.decode)
        if reason is not None:
            raise ValueError(
                f"{type(model).__name__} decodes token by token to other log-probabilities than at "
                f"once ({reason}), and the torch engine knows only models whose layers keep keys "
                'and values, nothing else; use rollout.engine="vllm".'
            )
        self._decoder = _Decoder(model)
        self._decode: Decode = self._decoder.decode
        self._model = model
        self._fused: FusedDecoder | None = None
        self._recorder: RoutingRecorder | None = None
        self._released: OffloadedMemory | None = None  # on GPUs
        self._device = next(model.parameters()).device
        self.routing: Routing | None = None
        # Can a prompt be run behind keys and values of its first tokens?
        fault = _fault_of_resuming(architecture, plain)
        self.resumes = fault is None
        if fault is not None:
            logger.warning(
                "%s cannot run a prompt behind keys and values of its beginning (%s): every turn "
                "of a conversation runs its whole prompt.",
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
        together = [] if self._fused is None else self._fused.rows
        joined = {id(parameter) for one in together for parameter in one.parameters}
        alone = [WeightBuffers([tensor]) for tensor in tensors.values() if id(tensor) not in joined]
        self._rows = [*together, *alone]
        if records_routing:
            self.routing = routing_of(model)
            self._recorder = RoutingRecorder(model)

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    def prefill(
        self, token_ids: torch.Tensor, cache: SlotCache, first: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [U, T, D] of right-padded prompts [U, T], or of what stands at positions
        `first` [U] and behind; see SlotCache.begin_prefill.
        """
        return self._decoder.prefill(token_ids, cache, first)

    def decode(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """Hidden states [N, D] of one token [N] of each sequence; see SlotCache.begin_decode."""
        return self._decode(token_ids, positions, cache)

    def take_experts(self) -> ExpertArray:
        """[U·T, L·K] or [N, L·K] of the tokens of the last pass, where routing is recorded."""
        assert self._recorder is not None
        assert self.routing is not None
        experts: ExpertArray = self._recorder.take().cpu().numpy().astype(self.routing.dtype)
        return experts

    @property
    def tensors(self) -> Tensors:
        """With the shapes of the model's, and without their numbers after `release`."""
        return self._shapes

    def release(self) -> None:
        """Let the memory of the weights go until the next `load`."""
        self.logits.release()
        if self._device.type == "cpu":
            for one in self._rows:
                one.release()
            self._forget()
        else:
            self._released = OffloadedMemory(model_tensors(self._model).values())

    def prepare(self, weights: Weights) -> Exchange | None:
        """Everything that can be done while the model runs, on any thread, for weights that fit
        `tensors`. None on GPUs, which have no room for two versions.
        """
        if self._device.type != "cpu":
            return None
        return exchange(self._rows, self._names, weights)

    def load(self, weights: Weights, prepared: Exchange | None) -> list[torch.Tensor]:
        """Replace the weights, by what `prepare` has made of these. Returns memory that is to be
        let go, which takes a while.
        """
        replaced = []
        if prepared is not None:
            replaced = prepared.switch()
        else:
            self._overwrite(weights)
        self._forget()
        return replaced

    def _forget(self) -> None:
        """What has been made of other weights."""
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
        """Bytes that the cache takes for a token."""
        device = next(self._model.parameters()).device
        cache = SlotCache(max_slots=1, max_tokens=ROW_BLOCK * room(1), device=str(device))
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
        # Padding may reach beyond the context, for which a model may have no position.
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
    """What is wrong with decoding the architecture's rows to their ends, each in a slot of its own,
    from two tokens on at the latest; None where all log-probabilities are as expected.
    """
    rows, head = architecture.rows, Head(architecture.miniature)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))  # the last ones end first
    longest = len(rows[order[0]])
    device = rows[0].device
    cache = SlotCache(
        max_slots=len(rows), max_tokens=ROW_BLOCK * room(longest + TOKEN_BLOCK), device=str(device)
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
    except Exception as error:  # noqa: BLE001 - it is the answer: the caller reports it
        return f"{type(error).__name__}: {error}"
    if cache.bytes_per_token == 0:
        return "no layer gives its keys and values to the cache"
    return None if worst <= TOLERANCE else f"they differ by {worst:.1g} nats"


@torch.no_grad()
def _fault_of_resuming(architecture: Architecture, decoder: _Decoder) -> str | None:
    """What is wrong with running the architecture's rows in two parts, the second behind the first
    one's keys and values; None where all log-probabilities are as expected.
    """
    head = Head(architecture.miniature)
    worst = 0.0
    try:
        for row, expected in zip(architecture.rows, architecture.expected, strict=True):
            for num_first in {1, len(row) // 2, len(row) - 1} - {0, -1, len(row)}:
                cache = SlotCache(
                    max_slots=2, max_tokens=ROW_BLOCK * room(len(row)), device=str(row.device)
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
    except Exception as error:  # noqa: BLE001 - it is the answer: the caller does without
        return f"{type(error).__name__}: {error}"
    return None if worst <= TOLERANCE else f"they differ by {worst:.1g} nats"


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
    with torch.no_grad():
        backbone(model)(input_ids=token_ids, use_cache=False, kv_cache=recorder)
    return recorder.rules
