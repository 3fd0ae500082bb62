"""Continuous batching: each step admits waiting requests and samples a token of each running one.

    submit ─► waiting ─► prefill, one pass for a batch ─► slots ─► decode, one pass a token ─► ended
                             ▲                                         │
                             └───────── a free slot, at once ──────────┘

Plain and synchronous, without threads: the engine owns one and calls `step`.

What a request yields depends on its prompt, its seed and the weights, not on its companions or on
timing: its random numbers are its own, and passes come in shapes for which CPU kernels do the sums
of a row in the same order whatever the other rows are. For matrices wider than a few hundred, and
on GPUs, kernels may choose by the number of rows; log-probabilities then differ in the last bits.

Shape legend: N running requests, U distinct prompts of a prefill, T tokens of the longest one,
D hidden width, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlsys.engines.context import context_length
from rlsys.engines.generation.backbone import Backbone
from rlsys.engines.generation.kv_cache import ROW_BLOCK, SlotCache, room, round_up
from rlsys.engines.generation.rows import Exchange
from rlsys.engines.generation.sampling import Cut, sample
from rlsys.engines.generation.slots import Slots
from rlsys.layout.transport.weights import Tensors, Weights
from rlsys.types import FinishReason, Generation, GenerationRequest

# Bounds the memory of a pass and the time until the next decode step; a longer prompt runs alone.
PREFILL_TOKENS = 8192
# Prompts are padded to a multiple of this.
PROMPT_BLOCK = 8


class ContinuousBatch:
    """`kv_cache_gib` bounds the keys and values of all running requests together: one is admitted
    only when they fit up to the length at which each must end. With `records_routing` generations
    tell the experts of their tokens."""

    def __init__(
        self,
        model: Any,
        *,
        max_running: int,
        kv_cache_gib: float,
        stop_token_ids: Sequence[int],
        decode_text: Callable[[list[int]], str],
        records_routing: bool = False,
    ) -> None:
        self.policy_version = 0
        self.num_generated_tokens = 0
        self._device = str(next(model.parameters()).device)
        self._max_running = max_running
        self._kv_cache_gib = kv_cache_gib
        config = model.config.get_text_config()
        self._context = context_length(config)
        self._vocabulary: int = config.vocab_size
        self._waiting: deque[GenerationRequest] = deque()
        self._backbone = Backbone(model, records_routing=records_routing)
        self._records_routing = records_routing
        self._slots = Slots(
            context=self._context,
            stop_token_ids=stop_token_ids,
            decode_text=decode_text,
            routing=self._backbone.routing,
        )
        self._max_cached_tokens = int(kv_cache_gib * 2**30) // self._backbone.bytes_per_token
        self._cache = self._empty_cache()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self.num_running > 0

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError for a request that can never run. Safe to call from any thread."""
        name, sampling = f"request {request.request_id!r}", request.sampling
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise ValueError(f"{name} has an empty prompt; give at least one token.")
        if num_tokens >= self._context:
            raise ValueError(
                f"{name} has a prompt of {num_tokens} tokens, which leaves no room in the model's "
                f"context of {self._context}; shorten the prompt (data.max_prompt_tokens) to at "
                f"most {self._context - 1}."
            )
        lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        if lowest < 0 or highest >= self._vocabulary:
            raise ValueError(
                f"{name} has token ids from {lowest} to {highest}, the model knows 0 to "
                f"{self._vocabulary - 1}; use the model's own tokenizer."
            )
        if sampling.max_tokens < 1:
            raise ValueError(f"{name} asks for max_tokens={sampling.max_tokens}; use at least 1.")
        if not sampling.temperature > 0:
            raise ValueError(
                f"{name} asks for temperature={sampling.temperature}; use a value above 0."
            )
        limit = room(self._slots.limit(request))
        if limit > self._max_cached_tokens:
            raise ValueError(
                f"{name} may grow to {limit} tokens, but keys and values of only "
                f"{self._max_cached_tokens} fit into rollout.kv_cache_gib={self._kv_cache_gib}; "
                "raise it, or lower sampling.max_tokens."
            )

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests that passed `check`."""
        self._waiting.extend(requests)

    def progress(self) -> list[Generation]:
        """What the running requests have so far, as ABORTED; they run on."""
        return self._slots.progress()

    @torch.inference_mode()
    def abort(self, request_ids: Collection[str]) -> list[Generation]:
        """Take requests out, with what they have; unknown ids are ignored."""
        wanted = set(request_ids)
        waiting = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(r for r in self._waiting if r.request_id not in wanted)
        running = self._remove(dict.fromkeys(self._slots.find(wanted), FinishReason.ABORTED))
        return running + [
            Generation.of_nothing(request.request_id, FinishReason.ABORTED) for request in waiting
        ]

    @property
    def tensors(self) -> Tensors:
        """Of the model, by Hugging Face name."""
        return self._backbone.tensors

    def _empty_cache(self) -> SlotCache:
        return SlotCache(
            max_slots=self._max_running, max_tokens=self._max_cached_tokens, device=self._device
        )

    def release(self) -> None:
        """Let the memory of weights, keys and values go until the next `load`."""
        assert not self.has_work, "what runs needs them"
        self._cache = self._empty_cache()
        self._backbone.release()

    def prepare(self, weights: Weights) -> Exchange | None:
        """See `Backbone.prepare`."""
        return self._backbone.prepare(weights)

    def load(self, weights: Weights, prepared: Exchange | None) -> list[torch.Tensor]:
        """See `Backbone.load`; the keys and values of running requests stay."""
        replaced = self._backbone.load(weights, prepared)
        self.policy_version = weights.version
        return replaced

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Admit what fits, sample one token of each running request; returns those that ended."""
        admitted = sorted(self._admissible(), key=_padded_length)
        ended: list[Generation] = []
        # A pass takes prompts of one length: how attention rounds depends on the padding.
        for num_tokens, requests in itertools.groupby(admitted, key=_padded_length):
            ended += self._prefill(list(requests), num_tokens)
        if self.num_running > 0:
            ended += self._decode()
        return ended

    def _admissible(self) -> list[GenerationRequest]:
        """Take from the queue, in order, what can run now."""
        admitted: list[GenerationRequest] = []
        prompts: set[tuple[int, ...]] = set()
        num_prompt_tokens = 0
        longest = int(self._slots.running("limit").max(initial=0))
        while self._waiting and self.num_running + len(admitted) < self._max_running:
            request = self._waiting[0]
            longest = max(longest, self._slots.limit(request))
            num_running = self.num_running + len(admitted) + 1
            if num_running * room(longest) > self._max_cached_tokens:
                break
            prompt = tuple(request.prompt_token_ids)
            if prompt not in prompts:
                prompts.add(prompt)
                num_prompt_tokens += _padded_length(request)
                if admitted and num_prompt_tokens > PREFILL_TOKENS:
                    break
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, requests: Sequence[GenerationRequest], num_tokens: int) -> list[Generation]:
        """Run prompts, each padded to `num_tokens`, and sample the first token of each request."""
        first = self.num_running
        rows: dict[tuple[int, ...], int] = {}  # the samples of a group share one row of the pass
        source = []
        for request in requests:
            self._slots.add(request)
            source.append(rows.setdefault(tuple(request.prompt_token_ids), len(rows)))
        num_rows = max(len(rows), ROW_BLOCK // num_tokens)
        token_ids = np.zeros((num_rows, num_tokens), np.int64)  # [U, T]
        for prompt, row in rows.items():
            token_ids[row, : len(prompt)] = prompt
        longest = int(self._slots.running("length").max())
        self._cache.reserve(self.num_running, max(longest, num_tokens))
        self._cache.begin_prefill(first, self._tensor(np.array(source)))
        hidden = self._backbone.prefill(self._tensor(token_ids), self._cache)  # [U, T, D]
        if self._records_routing:
            self._record_prompts(first, requests, source, num_tokens)
        last = [len(request.prompt_token_ids) - 1 for request in requests]
        num_padded = round_up(len(requests), ROW_BLOCK)
        hidden = hidden[_padded(source, num_padded), _padded(last, num_padded)]  # [N, D]
        return self._sample(first, hidden)

    def _decode(self) -> list[Generation]:
        lengths = self._slots.running("length")
        self._cache.reserve(len(lengths), int(lengths.max()))
        num_padded = self._cache.padded(len(lengths))
        positions = self._tensor(_padded(lengths - 1, num_padded))  # [N]
        token_ids = self._tensor(_padded(self._slots.last_tokens(), num_padded))
        self._cache.begin_decode(positions)
        hidden = self._backbone.decode(token_ids, positions, self._cache)
        if self._records_routing:
            slots = np.arange(len(lengths))
            experts = self._backbone.take_experts()[: len(lengths)]
            self._slots.record_experts(slots, lengths - 1, experts)
        return self._sample(0, hidden)

    def _record_prompts(
        self,
        first: int,
        requests: Sequence[GenerationRequest],
        source: Sequence[int],
        num_tokens: int,
    ) -> None:
        """The experts of prompts, which requests of one prompt have in common."""
        experts = self._backbone.take_experts()
        for slot, (request, row) in enumerate(zip(requests, source, strict=True), first):
            positions = np.arange(len(request.prompt_token_ids))
            self._slots.record_experts(
                np.full(len(positions), slot), positions, experts[row * num_tokens + positions]
            )

    def _sample(self, first: int, hidden: torch.Tensor) -> list[Generation]:
        """Sample and record a token of the slots from `first` on; `hidden` [N, D] may have padding
        at its end. Returns the requests that this ended."""
        num_rows = self.num_running - first
        temperature, top_k, top_p = (
            self._slots.running(name)[first:] for name in ("temperature", "top_k", "top_p")
        )
        cut = np.flatnonzero((top_k > 0) | (top_p < 1))  # [C]
        tokens, logprobs = sample(
            self._backbone.logits(hidden)[:num_rows],
            self._tensor(self._slots.uniforms(first)),
            temperature=self._tensor(temperature),
            cut=Cut(*map(self._tensor, (cut, top_k[cut], top_p[cut]))) if len(cut) else None,
        )
        self._slots.record(first, tokens.cpu().numpy(), logprobs.cpu().numpy(), self.policy_version)
        self.num_generated_tokens += num_rows
        return self._remove(self._slots.ended(first))

    def _remove(self, reasons: dict[int, FinishReason]) -> list[Generation]:
        if not reasons:
            return []
        generations, moves = self._slots.remove(reasons)
        lengths = self._slots.running("length")
        for target, source in moves:
            self._cache.move(target, source, int(lengths[target]))
        return generations

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self._device)


def _padded_length(request: GenerationRequest) -> int:
    return round_up(len(request.prompt_token_ids), PROMPT_BLOCK)


def _padded(values: npt.ArrayLike, length: int) -> npt.NDArray[np.int64]:
    """With zeros at the end."""
    array = np.asarray(values)
    padded = np.zeros(length, np.int64)
    padded[: len(array)] = array
    return padded
