"""Continuous batching: each step admits waiting requests and samples a token of each running one.

    submit ─► waiting ─► prefill, one pass for a batch ─► slots ─► decode, one pass a token ─► ended
                          ▲  ▲                                         │                       │
                          │  └───────── a free slot, at once ──────────┘                       │
                          └── keys and values of a prompt that continues one ◄──── parked ◄────┘

With speculation, a decode pass may also run drafted tokens, and record several (decode_rows.py).

Synchronous, without threads: the engine owns a batch and calls `step`.

The result of a request depends on its prompt, its seed and the weights, not on other requests or
timing. It has its own random numbers, and passes have shapes for which CPU kernels sum a row in the
same order whatever the other rows are. For matrices wider than a few hundred, and on GPUs, kernels
may depend on the number of rows; log-probabilities then differ in the last bits.

A prompt that continues an earlier completion reuses its keys and values (prefix_cache.py), which
differ in the last bits from those of a whole pass. Results of such a request depend on whether they
are still cached: until the next weights, if memory suffices for all conversations. Results of all
other requests do not depend on the cache.

Shape legend: N running requests, U distinct prompts of a prefill, T tokens of the longest one,
D hidden width, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlsys.engines.generation.constraint import Grammars, Matcher, check_request_structure
from rlsys.engines.generation.sampling import Allowed, Cut, sample
from rlsys.engines.generation.stopping import check_stop
from rlsys.engines.generation.torch.adapter_bank import AdapterBank, unknown_adapter
from rlsys.engines.generation.torch.admitted_request import Admitted, ParkedPrefix
from rlsys.engines.generation.torch.backbone import Backbone
from rlsys.engines.generation.torch.decode_rows import DecodeRows
from rlsys.engines.generation.torch.draft_policy import DraftPolicy
from rlsys.engines.generation.torch.kv_cache import (
    ROW_BLOCK,
    Kept,
    SlotCache,
    round_up,
    slot_capacity,
)
from rlsys.engines.generation.torch.prefix_cache import Prefixes
from rlsys.engines.generation.torch.request_queue import Waiting
from rlsys.engines.generation.torch.slots import Slots
from rlsys.engines.generation.torch.weight_buffers import Exchange
from rlsys.engines.models.attention_context import context_length
from rlsys.errors import InvalidValue, require
from rlsys.reallocation.transport.weight_views import Tensors, Weights
from rlsys.types import ExpertArray, FinishReason, Float32Array, Generation, GenerationRequest

# Limits the memory of a pass and the time until the next decode step; a longer prompt runs alone.
PREFILL_TOKENS = 8192
# Limits the keys and values that rows with a cached prefix attend to in a pass, in tokens.
PREFIX_TOKENS = 65536


class ContinuousBatch:
    """The requests of an engine.

    `kv_cache_gib` limits the keys and values of all running requests: a request is admitted only if
    they fit up to its maximum length. Parked prefixes use the rest. `reuses_prefixes` enables
    parking, unless the model cannot run a prompt in parts. With `records_routing` generations have
    the experts of their tokens. `grammars` compile the structures of constrained requests.
    `draft_policy` turns speculation on.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_running: int,
        kv_cache_gib: float,
        stop_token_ids: Sequence[int],
        decode_text: Callable[[list[int]], str],
        records_routing: bool = False,
        reuses_prefixes: bool = True,
        grammars: Grammars | None = None,
        draft_policy: DraftPolicy | None = None,
    ) -> None:
        self._grammars = grammars
        self._draft_policy = draft_policy
        self.policy_version = 0
        self.num_generated_tokens = 0
        self.num_prompt_tokens = 0
        self.num_reused_tokens = 0
        self._device = str(next(model.parameters()).device)
        self._max_running = max_running
        self._kv_cache_gib = kv_cache_gib
        config = model.config.get_text_config()
        self.context = context_length(config)
        self._vocabulary: int = config.vocab_size
        self._waiting = Waiting()
        self._backbone = Backbone(model, records_routing=records_routing)
        self._records_routing = records_routing
        self._parks = reuses_prefixes and self._backbone.resumes
        self._parked: Prefixes[tuple[Kept, ExpertArray | None]] = Prefixes()
        self._slots = Slots(
            context=self.context,
            stop_token_ids=stop_token_ids,
            decode_text=decode_text,
            routing=self._backbone.routing,
        )
        self._max_cached_tokens = int(kv_cache_gib * 2**30) // self._backbone.bytes_per_token
        self._cache = self._empty_cache()

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return self._slots.num_running

    @property
    def has_work(self) -> bool:
        """True if any request waits or runs."""
        return len(self._waiting) > 0 or self.num_running > 0

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError for a request that can never run. Any thread may call it."""
        name, sampling = f"request {request.request_id!r}", request.sampling
        num_tokens = len(request.prompt_token_ids)
        if not 0 < num_tokens < self.context:
            raise InvalidValue(
                f"{name}: prompt_token_ids",
                rule=f"has {num_tokens} tokens, but the model's context of {self.context} allows "
                f"1 to {self.context - 1}",
                fix="Shorten the prompt (data.max_prompt_tokens), or give at least one token.",
            )
        lowest, highest = min(request.prompt_token_ids), max(request.prompt_token_ids)
        require(
            lowest >= 0 and highest < self._vocabulary,
            f"{name}: prompt_token_ids",
            rule=f"has token ids from {lowest} to {highest}, but the model's are 0 to "
            f"{self._vocabulary - 1}",
            fix="Use the model's own tokenizer.",
        )
        require(
            sampling.max_tokens >= 1,
            f"{name}: max_tokens",
            sampling.max_tokens,
            rule="must be at least 1",
            fix="Use 1 or more.",
        )
        require(
            sampling.temperature > 0,
            f"{name}: temperature",
            sampling.temperature,
            rule="must be above 0",
            fix="Use a larger value.",
        )
        check_stop(request)
        if sampling.structure:
            has_end = self._grammars is not None and bool(self._slots.stop_ids(request))
            check_request_structure(request, has_end=has_end)
        bank = self._backbone.adapters
        if request.adapter and (bank is None or request.adapter not in bank):
            raise unknown_adapter(name, request.adapter)
        limit = slot_capacity(self._slots.limit(request))
        require(
            limit <= self._max_cached_tokens,
            "rollout.kv_cache_gib",
            self._kv_cache_gib,
            rule=f"holds {self._max_cached_tokens} tokens, but {name} may have {limit}",
            fix="Raise it, or lower sampling.max_tokens.",
        )

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests that passed `check`."""
        self._waiting.extend(map(_apart, requests))

    def progress(self) -> list[Generation]:
        """Return what the running requests have so far, as ABORTED; they continue."""
        return self._slots.progress()

    @torch.inference_mode()
    def abort(self, request_ids: Collection[str]) -> list[Generation]:
        """Remove requests and return what they have; unknown ids are ignored."""
        wanted = set(request_ids)
        waiting = self._waiting.remove(wanted)
        running = self._remove(dict.fromkeys(self._slots.find(wanted), FinishReason.ABORTED))
        return running + [
            Generation.of_nothing(request.request_id, FinishReason.ABORTED) for request in waiting
        ]

    def open_adapters(self) -> AdapterBank:
        """Return the adapters of the model; see `Backbone.open_adapters`."""
        return self._backbone.open_adapters()

    @property
    def tensors(self) -> Tensors:
        """Meta tensors of the model by Hugging Face name."""
        return self._backbone.tensors

    @property
    def kv_usage(self) -> float:
        """Return the share of the memory for keys and values that running requests hold."""
        return self._cache.num_slots * self._cache.capacity / max(1, self._max_cached_tokens)

    def _empty_cache(self) -> SlotCache:
        return SlotCache(
            max_slots=self._max_running, max_tokens=self._max_cached_tokens, device=self._device
        )

    def release(self) -> None:
        """Free the memory of weights, keys and values until the next `load`."""
        assert not self.has_work, "running requests need them"
        self._cache = self._empty_cache()
        self._parked.clear()
        self._backbone.release()

    def prepare(self, weights: Weights) -> Exchange | None:
        """Prepare an update; see `Backbone.prepare`."""
        return self._backbone.prepare(weights)

    def load(self, weights: Weights, prepared: Exchange | None) -> list[torch.Tensor]:
        """Replace the weights; see `Backbone.load`.

        Keys and values of running requests stay; parked ones are discarded.
        """
        self._parked.clear()
        replaced = self._backbone.load(weights, prepared)
        self.policy_version = weights.version
        return replaced

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Admit what fits, sample one token per running request, and return those that ended."""
        admitted = sorted(self._admissible(), key=lambda one: one.shape)
        ended: list[Generation] = []
        for (num_places, num_tokens), group in itertools.groupby(admitted, lambda one: one.shape):
            one_shape = [*group]
            most = max(1, PREFIX_TOKENS // num_places) if num_places else len(one_shape)
            for start in range(0, len(one_shape), most):
                ended += self._prefill(one_shape[start : start + most], num_tokens, num_places)
        if self.num_running > 0:
            ended += self._decode()
        return ended

    def _admissible(self) -> list[Admitted]:
        """Take from the queue, in order, the requests that can run now."""
        admitted: list[Admitted] = []
        prefixes: dict[tuple[str, tuple[int, ...]], ParkedPrefix | None] = {}
        num_prompt_tokens = 0
        longest = int(self._slots.running("limit").max(initial=0))
        while len(self._waiting) and self.num_running + len(admitted) < self._max_running:
            request = self._waiting.first
            longest = max(longest, self._slots.limit(request))
            num_running = self.num_running + len(admitted) + 1
            if num_running * slot_capacity(longest) > self._max_cached_tokens:
                break
            one = Admitted(request, None)
            if one.prompt in prefixes:
                one = Admitted(request, prefixes[one.prompt])
            else:
                prefix = self._parked.find(request)
                prefixes[one.prompt] = prefix
                one = Admitted(request, prefix)
                num_prompt_tokens += one.num_tokens
                if admitted and num_prompt_tokens > PREFILL_TOKENS:
                    break
            admitted.append(one)
            self._waiting.pop()
        return admitted

    def _prefill(
        self, admitted: Sequence[Admitted], num_tokens: int, num_places: int
    ) -> list[Generation]:
        """Run the new part of prompts, padded to `num_tokens`, and sample each first token.

        `num_places` are the places of a slot that rows with a cached prefix see; 0 without one.
        """
        first_slot = self.num_running
        rows: dict[tuple[str, tuple[int, ...]], int] = {}  # samples of a group share one row
        source = []
        for one in admitted:
            self._slots.add(one.request, self._matcher(one.request))
            source.append(rows.setdefault(one.prompt, len(rows)))
        num_rows = max(len(rows), ROW_BLOCK // num_tokens)
        token_ids = np.zeros((num_rows, num_tokens), np.int64)  # [U, T]
        first = np.zeros(num_rows, np.int64)  # [U]
        adapters = np.zeros(len(rows), np.int64)  # [U]
        for one, row in zip(admitted, source, strict=True):
            adapters[row] = one.request.adapter
            new = one.request.prompt_token_ids[one.num_reused :]
            token_ids[row, : len(new)] = new
            first[row] = one.num_reused
        longest = int(self._slots.running("length").max())
        self._reserve(max(longest, num_tokens, num_places))
        if num_places:
            self._restore(first_slot, admitted)
        after = self._tensor(first) if num_places else None
        self._cache.begin_prefill(first_slot, self._tensor(np.array(source)), after, num_places)
        self._select(adapters, num_rows)
        hidden = self._backbone.prefill(self._tensor(token_ids), self._cache, after)  # [U, T, D]
        if self._records_routing:
            self._record_prompts(first_slot, admitted, source, num_tokens)
        last = [len(one.request.prompt_token_ids) - one.num_reused - 1 for one in admitted]
        num_padded = round_up(len(admitted), ROW_BLOCK)
        hidden = hidden[_padded(source, num_padded), _padded(last, num_padded)]  # [N, D]
        self.num_prompt_tokens += sum(len(one.request.prompt_token_ids) for one in admitted)
        self.num_reused_tokens += sum(one.num_reused for one in admitted)
        slots = np.arange(first_slot, self.num_running)
        lasts = DecodeRows.of(slots, self._slots.last_tokens()[slots], None)
        return self._remove(self._record(lasts, hidden, None))

    def _matcher(self, request: GenerationRequest) -> Matcher | None:
        structure = request.sampling.structure
        if not structure:
            return None
        assert self._grammars is not None
        start = len(request.prompt_token_ids) - request.num_prior_tokens
        prior = request.prompt_token_ids[start:]
        return self._grammars.matcher(structure, self._slots.stop_ids(request), prior)

    def _reserve(self, longest: int) -> None:
        """Make room for the running requests, the longest of `longest` tokens.

        Parked prefixes are dropped if necessary.
        """
        slots, capacity = self._cache.size(self.num_running, longest)
        self._parked.shrink_to(self._max_cached_tokens - slots * capacity)
        self._cache.reserve(self.num_running, longest)

    def _restore(self, first_slot: int, admitted: Sequence[Admitted]) -> None:
        """Copy cached keys and values of the prompts' first tokens into the slots."""
        for slot, one in enumerate(admitted, first_slot):
            assert one.prefix is not None
            for start, end, (kept, experts) in one.prefix.pieces:
                self._cache.restore(slot, start, end, kept)
                if experts is not None:
                    positions = np.arange(start, end)
                    self._slots.record_experts(
                        np.full(len(positions), slot), positions, experts[: end - start]
                    )

    def _park(self, slot: int) -> None:
        """Park what a request leaves, if it was computed with the current weights only."""
        request = self._slots.request(slot)
        is_wanted = self._parks and request.goes_on
        version = request.adapter or self.policy_version
        if not is_wanted or self._slots.first_version(slot) != version:
            return
        self._parked.park(
            self._slots.tokens(slot),
            first_sampled=len(request.prompt_token_ids) - request.num_prior_tokens,
            salt=request.cache_salt,
            max_tokens=self._max_cached_tokens - self._cache.num_slots * self._cache.capacity,
            copy=lambda start, end: (
                self._cache.copy(slot, start, end),
                self._slots.experts(slot, start, end),
            ),
        )

    def _decode(self) -> list[Generation]:
        policy = self._draft_policy
        drafts = None if policy is None else policy.propose(self._slots)
        slots = np.arange(self.num_running)
        rows = DecodeRows.of(slots, self._slots.last_tokens(), drafts)
        hidden = self._run(rows)
        experts = self._backbone.take_experts() if self._records_routing else None
        lengths = self._slots.running("length").copy()
        reasons = self._record(rows, hidden, experts)
        if policy is None:
            return self._remove(reasons)
        policy.observe(self._slots, drafts, self._slots.running("length") - lengths - 1)
        return self._remove(reasons)

    def _run(self, rows: DecodeRows) -> torch.Tensor:
        """Return hidden states [P, D] of the rows, padded."""
        lengths = self._slots.running("length")
        self._reserve(int((lengths[rows.slots] + rows.offsets).max()))
        firsts = self._tensor(_padded(lengths - 1, self._cache.padded(len(lengths))))  # [N]
        if rows.num_levels == 1:
            self._cache.begin_decode(firsts)
            self._select(self._slots.running("adapter"), len(firsts))
            token_ids = self._tensor(_padded(rows.tokens, len(firsts)))
            return self._backbone.decode(token_ids, firsts, self._cache)
        order = rows.padded(round_up(len(rows.slots), ROW_BLOCK))  # [P]
        row_slots, offsets = self._tensor(rows.slots[order]), self._tensor(rows.offsets[order])
        self._cache.begin_decode(firsts, (rows.num_levels, row_slots, offsets))
        self._select(self._slots.running("adapter")[rows.slots[order]], len(order))
        token_ids = self._tensor(rows.tokens[order].astype(np.int64))
        return self._backbone.decode(token_ids, firsts[row_slots] + offsets, self._cache)

    def _select(self, adapters: npt.NDArray[Any], num_rows: int) -> None:
        """Set the adapter of the first rows of the next pass, which has `num_rows`."""
        if self._backbone.adapters is not None:
            self._backbone.adapters.select(adapters, self._slots.running("adapter"), num_rows)

    def _record_prompts(
        self,
        first: int,
        admitted: Sequence[Admitted],
        source: Sequence[int],
        num_tokens: int,
    ) -> None:
        """Record the experts of new prompt tokens, which requests with the same prompt share."""
        experts = self._backbone.take_experts()
        for slot, (one, row) in enumerate(zip(admitted, source, strict=True), first):
            positions = np.arange(one.num_reused, len(one.request.prompt_token_ids))
            places = row * num_tokens + positions - one.num_reused
            self._slots.record_experts(np.full(len(positions), slot), positions, experts[places])

    def _record(
        self, rows: DecodeRows, hidden: torch.Tensor, experts: ExpertArray | None
    ) -> dict[int, FinishReason]:
        """Sample the token after each row and record it, if all drafted ones before it are right.

        `hidden` [P, D] may have padding at its end. `experts` [P, L·K] are those of the inputs.
        Returns the slots that have ended.
        """
        tokens, logprobs = self._draw(rows, hidden)
        ended: dict[int, FinishReason] = {}
        goes_on = np.ones(self.num_running, np.bool_)  # [N]
        for level in rows.levels():
            slots, sampled = rows.slots[level], tokens[level]
            right = goes_on[slots]
            if level.start:
                right = right & (rows.tokens[level] == self._slots.last_tokens()[slots])
            goes_on[:] = False
            if not right.any():
                break
            slots = slots[right]
            if experts is not None:
                positions = self._slots.running("length")[slots] - 1
                self._slots.record_experts(slots, positions, experts[level][right])
            self._slots.record(slots, sampled[right], logprobs[level][right], self.policy_version)
            self.num_generated_tokens += len(slots)
            now = self._slots.ended(slots)
            goes_on[slots] = True
            goes_on[list(now)] = False
            ended |= now
        return ended

    def _draw(
        self, rows: DecodeRows, hidden: torch.Tensor
    ) -> tuple[npt.NDArray[np.int64], Float32Array]:
        """Return the token after each row and its log-probability, [R]."""
        temperature, top_k, top_p = (
            self._slots.running(name)[rows.slots] for name in ("temperature", "top_k", "top_p")
        )
        cut = np.flatnonzero((top_k > 0) | (top_p < 1))  # [C]
        logits = self._backbone.logits(hidden)[: len(rows.slots)]
        tokens, logprobs = sample(
            logits,
            self._tensor(self._slots.uniforms(rows.slots, rows.offsets)),
            temperature=self._tensor(temperature),
            cut=Cut(*map(self._tensor, (cut, top_k[cut], top_p[cut]))) if len(cut) else None,
            allowed=self._allowed(int(rows.slots[0]), logits.shape[1]),
        )
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _allowed(self, first: int, num_tokens: int) -> Allowed | None:
        constrained = self._slots.masks(first)
        if constrained is None:
            return None
        rows, masks = map(self._tensor, constrained)
        return Allowed.of(rows, masks, num_tokens)

    def _remove(self, reasons: dict[int, FinishReason]) -> list[Generation]:
        if not reasons:
            return []
        for slot, reason in reasons.items():
            if reason is FinishReason.FAILED:
                self._cache.clear(slot)
            else:
                self._park(slot)
        generations, moves = self._slots.remove(reasons)
        lengths = self._slots.running("length")
        for target, source in moves:
            self._cache.move(target, source, int(lengths[target]))
        return generations

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self._device)


def _apart(request: GenerationRequest) -> GenerationRequest:
    """Return a request that shares no keys and values with requests of other adapters."""
    if not request.adapter:
        return request
    return replace(request, cache_salt=f"adapter {request.adapter} {request.cache_salt}")


def _padded(values: npt.ArrayLike, length: int) -> npt.NDArray[np.int64]:
    """Return an array of `length` with zeros at the end."""
    array = np.asarray(values)
    padded = np.zeros(length, np.int64)
    padded[: len(array)] = array
    return padded
