"""The running requests in arrays, one slot each, so that a token costs no Python per request.

    add(request) ─► record(tokens, logprobs), once per pass ─► ended() ─► remove(...) ─► generations

Running requests are always in slots 0 .. num_running − 1: the last ones move to the places of those
that are removed.

Shape legend: S slots, C capacity in tokens (prompt and completion), E stop tokens, N rows recorded,
L·K experts of a token (rlsys.engines.models.routing), M constrained rows, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlsys.engines.generation.constraint import Matcher, num_allowed, with_forced
from rlsys.engines.generation.sampling import stream_key, uniforms
from rlsys.engines.generation.stopping import stop_ids, text_after
from rlsys.engines.models.expert_layout import Routing
from rlsys.types import (
    ExpertArray,
    FinishReason,
    Float32Array,
    Generation,
    GenerationRequest,
    Int32Array,
)

IntArray = npt.NDArray[np.integer[Any]]

SLOT = np.dtype(
    [
        ("length", np.int32),  # tokens so far, prompt and completion
        ("prompt_length", np.int32),
        ("limit", np.int32),  # maximum length
        ("num_prior_tokens", np.int32),
        ("adapter", np.int32),
        ("stream", np.uint64),  # key of its random stream
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("has_stop_strings", np.bool_),
        ("is_constrained", np.bool_),
        # Of speculation (draft_policy.py):
        ("reach", np.int32),  # length of the next draft
        ("rest", np.int32),  # passes until the next draft
        ("misses", np.int32),  # drafts that were rejected whole, since the last other one
    ]
)
NO_TOKEN = -1
FIRST_REACH = 4

# Tokens decoded in addition to those that a stop string can span: the first of a text may begin
# within a character, or lose its leading space.
STOP_STRING_MARGIN = 8

UNFINISHED = "\ufffd"  # decoded from the first bytes of a character


class Slots:
    """State of the running requests.

    `context` is the model's limit in tokens, and `stop_token_ids` are the model's own ends.
    `decode_text` is called for requests with stop strings only. With `routing` the experts of every
    token are recorded.
    """

    def __init__(
        self,
        *,
        context: int,
        stop_token_ids: Sequence[int],
        decode_text: Callable[[list[int]], str],
        routing: Routing | None = None,
    ) -> None:
        self.num_running = 0
        self._context = context
        self._stop_token_ids = tuple(stop_token_ids)
        self._decode_text = decode_text
        self._requests: list[GenerationRequest] = []
        self._matchers: list[Matcher | None] = []
        self._state = np.zeros(0, SLOT)  # [S]
        self._stop_ids = np.zeros((0, 0), np.int32)  # [S, E], filled up with NO_TOKEN
        self._tokens = np.zeros((0, 0), np.int32)  # [S, C]
        self._logprobs = np.zeros((0, 0), np.float32)  # [S, C]
        self._versions = np.zeros((0, 0), np.int32)  # [S, C]
        self._forced = np.zeros((0, 0), np.bool_)  # [S, C]: the token had no alternative
        self._is_forced = np.zeros(0, np.bool_)  # [S]: the next token has no alternative
        self._experts: ExpertArray | None = None  # [S, C, L·K]
        if routing is not None:
            self._experts = np.zeros((0, 0, routing.width), routing.dtype)

    def limit(self, request: GenerationRequest) -> int:
        """Return the maximum length of a request, prompt included."""
        return min(len(request.prompt_token_ids) + request.sampling.max_tokens, self._context)

    def running(self, field: str) -> npt.NDArray[Any]:
        """Return one field of SLOT over the running requests, as a view."""
        return self._state[field][: self.num_running]

    def find(self, request_ids: set[str]) -> list[int]:
        """Return the slots of those of the requests that are running."""
        return [i for i, request in enumerate(self._requests) if request.request_id in request_ids]

    def stop_ids(self, request: GenerationRequest) -> list[int]:
        """Return the tokens that end a request, sorted."""
        return stop_ids(request, self._stop_token_ids)

    def add(self, request: GenerationRequest, matcher: Matcher | None = None) -> None:
        """Put a request into the next slot."""
        slot, sampling = self.num_running, request.sampling
        end_ids = self.stop_ids(request)
        prompt_length = len(request.prompt_token_ids)
        self._reserve(slot + 1, prompt_length + 1, len(end_ids))
        self._state[slot] = (
            prompt_length,
            prompt_length,
            self.limit(request),
            request.num_prior_tokens,
            request.adapter,
            stream_key(request.seed),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            bool(sampling.stop),
            matcher is not None,
            FIRST_REACH,
            0,
            0,
        )
        self._stop_ids[slot] = NO_TOKEN
        self._stop_ids[slot, : len(end_ids)] = end_ids
        self._tokens[slot, :prompt_length] = request.prompt_token_ids
        self._requests.append(request)
        self._matchers.append(matcher)
        self._is_forced[slot] = False
        self.num_running += 1

    def last_tokens(self) -> Int32Array:
        """Return the last token of each running request, [num_running]."""
        tokens: Int32Array = self._tokens[np.arange(self.num_running), self.running("length") - 1]
        return tokens

    def all_tokens(self, slots: IntArray) -> Int32Array:
        """Return the tokens [N, C] of slots [N]; those after a slot's own length are undefined."""
        longest = int(self._state["length"][slots].max())
        tokens: Int32Array = self._tokens[slots, :longest]
        return tokens

    def uniforms(self, slots: IntArray, offsets: IntArray) -> Float32Array:
        """Return the numbers that draw tokens of slots [N], `offsets` [N] after the next one."""
        state = self._state[slots]
        index = state["num_prior_tokens"] + state["length"] - state["prompt_length"]
        return uniforms(state["stream"], index + offsets)

    def masks(self, first: int) -> tuple[IntArray, Int32Array] | None:
        """Return constrained rows and masks of the tokens that they may sample next.

        Rows [M] are counted from slot `first`; masks are [M, W]. Returns None if no row is
        constrained. Call it once before each `record`.
        """
        rows = np.flatnonzero(self._state["is_constrained"][first : self.num_running])
        if not len(rows):
            return None
        masks = np.stack([self._matcher(first + row).next_mask() for row in rows])
        self._is_forced[first + rows] = [num_allowed(mask) == 1 for mask in masks]
        return rows, masks

    def _matcher(self, slot: int) -> Matcher:
        matcher = self._matchers[slot]
        assert matcher is not None
        return matcher

    def record(
        self, slots: IntArray, tokens: npt.NDArray[Any], logprobs: Float32Array, version: int
    ) -> None:
        """Append a token [N] to each of the slots [N], which differ.

        `version` is that of slots without an adapter.
        """
        lengths = self._state["length"][slots]
        self._reserve(self.num_running, int(lengths.max()) + 1, 0)
        self._tokens[slots, lengths] = tokens
        self._logprobs[slots, lengths] = logprobs
        adapters = self._state["adapter"][slots]
        self._versions[slots, lengths] = np.where(adapters > 0, adapters, version)
        self._forced[slots, lengths] = self._is_forced[slots]
        for row in np.flatnonzero(self._state["is_constrained"][slots]):
            self._matcher(int(slots[row])).accept(int(tokens[row]))
        self._state["length"][slots] += 1

    def record_experts(self, slots: IntArray, positions: IntArray, experts: ExpertArray) -> None:
        """Record experts [N, L·K] of the tokens at these slots and positions [N]."""
        assert self._experts is not None
        self._experts[slots, positions] = experts

    def ended(self, slots: IntArray) -> dict[int, FinishReason]:
        """Return those of the slots [N] that their last token has ended.

        A request fails with the first token that has no finite log-probability.
        """
        state = self._state[slots]
        newest = self._tokens[slots, state["length"] - 1]
        stopped = (newest[:, None] == self._stop_ids[slots]).any(1)
        for row in np.flatnonzero(state["has_stop_strings"] & ~stopped):
            stopped[row] = self._has_stop_string(int(slots[row]))
        full = state["length"] >= state["limit"]
        failed = ~np.isfinite(self._logprobs[slots, state["length"] - 1])
        reasons = {
            int(slots[row]): FinishReason.STOP if stopped[row] else FinishReason.LENGTH
            for row in np.flatnonzero(stopped | full)
        }
        return reasons | {int(slots[row]): FinishReason.FAILED for row in np.flatnonzero(failed)}

    def request(self, slot: int) -> GenerationRequest:
        """Return the request of a slot."""
        return self._requests[slot]

    def tokens(self, slot: int) -> Int32Array:
        """Return prompt and completion so far, [T], as a copy."""
        tokens: Int32Array = self._tokens[slot, : self._state["length"][slot]].copy()
        return tokens

    def first_version(self, slot: int) -> int:
        """Return the policy_version of the weights that ran the prompt."""
        return int(self._versions[slot, self._state["prompt_length"][slot]])

    def experts(self, slot: int, start: int, end: int) -> ExpertArray | None:
        """Return a copy of the experts [N, L·K] of tokens `start` .. `end`, if recorded."""
        return None if self._experts is None else self._experts[slot, start:end].copy()

    def progress(self) -> list[Generation]:
        """Return what the running requests have so far; they stay."""
        return [self._generation(slot, FinishReason.ABORTED) for slot in range(self.num_running)]

    def remove(
        self, reasons: Mapping[int, FinishReason]
    ) -> tuple[list[Generation], list[tuple[int, int]]]:
        """Remove requests. Returns them, and the moves (to, from) that filled the gaps."""
        generations = [self._generation(slot, reason) for slot, reason in reasons.items()]
        num_left = self.num_running - len(reasons)
        gaps = sorted(slot for slot in reasons if slot < num_left)
        last = [slot for slot in range(num_left, self.num_running) if slot not in reasons]
        moves = list(zip(gaps, last, strict=True))
        for target, source in moves:
            for array in (
                self._state,
                self._stop_ids,
                self._tokens,
                self._logprobs,
                self._versions,
                self._forced,
                self._is_forced,
                self._experts,
            ):
                if array is not None:
                    array[target] = array[source]
            self._requests[target] = self._requests[source]
            self._matchers[target] = self._matchers[source]
        del self._requests[num_left:]
        del self._matchers[num_left:]
        self.num_running = num_left
        return generations, moves

    def _generation(self, slot: int, reason: FinishReason) -> Generation:
        completion = slice(self._state["prompt_length"][slot], self._state["length"][slot])
        sampled = Generation(
            request_id=self._requests[slot].request_id,
            token_ids=self._tokens[slot, completion].copy(),
            sampler_logprobs=self._logprobs[slot, completion].copy(),
            policy_versions=self._versions[slot, completion].copy(),
            finish_reason=reason,
            routed_experts=None
            if self._experts is None
            else self._experts[slot, : completion.stop - 1].copy(),
        )
        sampled = sampled.until_failure()
        if self._matchers[slot] is not None:
            forced = self._forced[slot, completion][: len(sampled.token_ids)]
            return with_forced(sampled, forced)
        return sampled

    def _has_stop_string(self, slot: int) -> bool:
        stop = self._requests[slot].sampling.stop
        state = self._state[slot]
        # A token has at least one byte, so this many hold the longest stop string.
        num_tokens = max(len(text.encode()) for text in stop) + STOP_STRING_MARGIN
        completion = int(state["prompt_length"] - state["num_prior_tokens"])
        start = max(completion, int(state["length"]) - num_tokens)
        tail = self._tokens[slot, start : state["length"]].tolist()

        def read(tokens: list[int]) -> str:
            if start > completion:
                return self._decode_text(tokens)
            return text_after(self._decode_text, self._tokens[slot, :start].tolist(), tokens)

        text = read(tail)
        if not any(string in text for string in stop):
            return False
        # A string that was there before the newest token is in injected text and ends nothing.
        num_known = len(read(tail[:-1]).rstrip(UNFINISHED))
        return any(
            text.rfind(string) + len(string) > num_known for string in stop if string in text
        )

    def _reserve(self, num_slots: int, num_tokens: int, num_stop_ids: int) -> None:
        slots, capacity = self._tokens.shape
        stop_ids = self._stop_ids.shape[1]
        if num_slots <= slots and num_tokens <= capacity and num_stop_ids <= stop_ids:
            return
        slots = slots if num_slots <= slots else max(num_slots, 2 * slots)
        capacity = capacity if num_tokens <= capacity else max(num_tokens, 2 * capacity)
        self._state = _grown(self._state, (slots,))
        self._stop_ids = _grown(self._stop_ids, (slots, max(num_stop_ids, stop_ids)), NO_TOKEN)
        self._tokens = _grown(self._tokens, (slots, capacity))
        self._logprobs = _grown(self._logprobs, (slots, capacity))
        self._versions = _grown(self._versions, (slots, capacity))
        self._forced = _grown(self._forced, (slots, capacity))
        self._is_forced = _grown(self._is_forced, (slots,))
        if self._experts is not None:
            self._experts = _grown(self._experts, (slots, capacity, self._experts.shape[2]))


def _grown(
    array: npt.NDArray[Any], shape: tuple[int, ...], fill: int | None = None
) -> npt.NDArray[Any]:
    grown = np.zeros(shape, array.dtype) if fill is None else np.full(shape, fill, array.dtype)
    grown[tuple(slice(size) for size in array.shape)] = array
    return grown
