"""Continuous batching: each step admits waiting requests and samples a token of each running one.

    submit ─► waiting ─► prefill, one pass for a batch ─► slots ─► decode, one pass a token ─► ended
                             ▲                                         │
                             └───────── a free slot, at once ──────────┘

Plain and synchronous, without threads: the engine owns one and calls `step`. What a request yields
depends on its prompt, its seed and the weights alone, neither on its companions nor on the timing.

Shape legend: N running requests, U distinct prompts of a prefill, T tokens of the longest one,
D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlsys.engines.causal_lm import check_head, head_logits
from rlsys.engines.generation.kv_cache import ROW_BLOCK, TOKEN_BLOCK, SlotCache, round_up
from rlsys.engines.generation.manifest_check import check_manifest
from rlsys.engines.generation.sampling import sample
from rlsys.engines.generation.slots import Slots
from rlsys.layout.transport.shm import open_weights
from rlsys.types import FinishReason, Generation, GenerationRequest, WeightManifest

# Bounds the memory and the time of one pass; a longer prompt gets a pass of its own.
PREFILL_TOKENS = 8192


class ContinuousBatch:
    """`kv_cache_gib` bounds the keys and values of all running requests together: one is admitted
    only when they fit up to the length at which each must end."""

    def __init__(
        self,
        model: Any,
        *,
        max_running: int,
        kv_cache_gib: float,
        stop_token_ids: Sequence[int],
        decode_text: Callable[[list[int]], str],
    ) -> None:
        self.policy_version = 0
        self.num_generated_tokens = 0
        self._model = model
        self._device = str(next(model.parameters()).device)
        self._max_running = max_running
        self._kv_cache_gib = kv_cache_gib
        config = model.config.get_text_config()
        self._context: int = config.max_position_embeddings
        self._vocabulary: int = config.vocab_size
        self._waiting: deque[GenerationRequest] = deque()
        self._slots = Slots(
            context=self._context, stop_token_ids=stop_token_ids, decode_text=decode_text
        )
        with torch.inference_mode():
            check_head(model)
            bytes_per_token = check_decode(model)
        self._max_cached_tokens = int(kv_cache_gib * 2**30) // bytes_per_token
        self._cache = SlotCache(
            max_slots=max_running, max_tokens=self._max_cached_tokens, device=self._device
        )

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
        limit = round_up(self._slots.limit(request), TOKEN_BLOCK)
        if limit > self._max_cached_tokens:
            raise ValueError(
                f"{name} may grow to {limit} tokens, but keys and values of only "
                f"{self._max_cached_tokens} fit into rollout.kv_cache_gib={self._kv_cache_gib}; "
                "raise it, or lower sampling.max_tokens."
            )

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests that passed `check`."""
        self._waiting.extend(requests)

    def abort(self, request_ids: Collection[str]) -> list[Generation]:
        """Take requests out, with what they have; unknown ids are ignored."""
        wanted = set(request_ids)
        waiting = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = deque(r for r in self._waiting if r.request_id not in wanted)
        running = self._remove(dict.fromkeys(self._slots.find(wanted), FinishReason.ABORTED))
        return running + [_never_started(request) for request in waiting]

    def load(self, manifest: WeightManifest) -> None:
        """Overwrite the weights; the keys and values of running requests stay.

        Raises ValueError, and changes nothing, if names or shapes do not fit the model or the bytes
        are not those that were published.
        """
        parameters = dict(self._model.named_parameters())  # tied ones appear once
        check_manifest(manifest, {name: tuple(p.shape) for name, p in parameters.items()})
        with torch.no_grad():
            for name, tensor in open_weights(manifest).items():
                parameters[name].copy_(tensor)
        self.policy_version = manifest.version

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Admit what fits, sample one token of each running request; returns those that ended."""
        ended: list[Generation] = []
        admitted = self._admissible()
        if admitted:
            ended += self._prefill(admitted)
        if self.num_running > 0:
            ended += self._decode()
        return ended

    def _admissible(self) -> list[GenerationRequest]:
        """Take from the queue, in order, what the next prefill can run."""
        admitted: list[GenerationRequest] = []
        prompts: set[tuple[int, ...]] = set()
        longest_prompt = 0
        longest = int(self._slots.running("limit").max(initial=0))
        while self._waiting and self.num_running + len(admitted) < self._max_running:
            request = self._waiting[0]
            longest = max(longest, self._slots.limit(request))
            num_rows = self.num_running + len(admitted) + 1
            if num_rows * round_up(longest, TOKEN_BLOCK) > self._max_cached_tokens:
                break
            prompts.add(tuple(request.prompt_token_ids))
            longest_prompt = max(longest_prompt, len(request.prompt_token_ids))
            if admitted and len(prompts) * longest_prompt > PREFILL_TOKENS:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        first = self.num_running
        rows: dict[tuple[int, ...], int] = {}  # the samples of a group share one row of the pass
        source = []
        for request in requests:
            self._slots.add(request)
            source.append(rows.setdefault(tuple(request.prompt_token_ids), len(rows)))
        num_tokens = round_up(max(map(len, rows)), ROW_BLOCK)
        token_ids = np.zeros((len(rows), num_tokens), np.int64)  # [U, T]
        for prompt, row in rows.items():
            token_ids[row, : len(prompt)] = prompt
        self._cache.reserve(self.num_running, num_tokens)
        self._cache.begin_prefill(first, self._tensor(np.array(source)))
        hidden = self._backbone(token_ids, np.arange(num_tokens)[None])  # [U, T, D]
        last = np.array([len(request.prompt_token_ids) - 1 for request in requests])
        padding = round_up(len(requests), ROW_BLOCK) - len(requests)
        hidden = hidden[np.pad(source, (0, padding)), np.pad(last, (0, padding))]
        return self._sample(first, hidden)

    def _decode(self) -> list[Generation]:
        lengths = self._slots.running("length")
        self._cache.reserve(len(lengths), int(lengths.max()))
        padding = (0, self._cache.padded(len(lengths)) - len(lengths))
        positions = np.pad(lengths - 1, padding)  # [N]
        self._cache.begin_decode(positions)
        token_ids = np.pad(self._slots.last_tokens(), padding)
        hidden = self._backbone(token_ids[:, None], positions[:, None])  # [N, 1, D]
        return self._sample(0, hidden[:, 0])

    def _backbone(self, token_ids: npt.NDArray[Any], positions: npt.NDArray[Any]) -> torch.Tensor:
        return run_backbone(
            self._model, self._tensor(token_ids), self._tensor(positions), self._cache
        )

    def _sample(self, first: int, hidden: torch.Tensor) -> list[Generation]:
        """Sample and record a token of the slots from `first` on; `hidden` [N, D] may have padding
        at its end. Returns the requests that this ended."""
        num_rows = self.num_running - first
        tokens, logprobs = sample(
            head_logits(self._model, hidden)[:num_rows],
            self._tensor(self._slots.uniforms(first)),
            **{
                name: self._tensor(self._slots.running(name)[first:])
                for name in ("temperature", "top_k", "top_p")
            },
        )
        self._slots.record(first, tokens.cpu().numpy(), logprobs.cpu().numpy(), self.policy_version)
        self.num_generated_tokens += num_rows
        return self._remove(self._slots.ended(first))

    def _remove(self, reasons: dict[int, FinishReason]) -> list[Generation]:
        generations, moves = self._slots.remove(reasons)
        lengths = self._slots.running("length")
        for target, source in moves:
            self._cache.move(target, source, int(lengths[target]))
        return generations

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self._device)


def run_backbone(
    model: Any, token_ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache
) -> torch.Tensor:
    """Hidden states [N, T, D] of token_ids [N, T] at positions [N or 1, T], through the cache."""
    hidden: torch.Tensor = model.get_decoder()(
        input_ids=token_ids, position_ids=positions, use_cache=False, kv_cache=cache
    ).last_hidden_state
    return hidden


def check_decode(model: Any) -> int:
    """Raise ValueError if decoding through the cache differs from a whole forward pass; returns the
    bytes that the cache takes for one token."""
    num_tokens = 6
    device = next(model.parameters()).device
    token_ids = torch.arange(num_tokens, device=device)[None]
    positions = torch.arange(num_tokens, device=device)[None]
    cache = SlotCache(max_slots=1, max_tokens=ROW_BLOCK * TOKEN_BLOCK, device=str(device))
    cache.reserve(1, num_tokens)
    expected = model.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
    try:
        cache.begin_prefill(0, torch.zeros(1, dtype=torch.long, device=device))
        run_backbone(model, token_ids[:, :-1], positions[:, :-1], cache)
        cache.begin_decode(np.array([num_tokens - 1], np.int32))
        found = run_backbone(model, token_ids[:, -1:], positions[:, -1:], cache)
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__} does not hand keyword arguments through to its attention "
            f'({error}), which the torch engine needs; use rollout.engine="vllm".'
        ) from error
    difference = float((found[:, -1] - expected[:, -1]).abs().max() / expected.abs().max())
    if difference > (1e-3 if expected.dtype == torch.float32 else 5e-2):
        raise ValueError(
            f"{type(model).__name__} decodes token by token to other hidden states than at once "
            f"(relative difference {difference:.2g}): it keeps state that the torch engine does "
            'not know, such as convolutions or recurrences; use rollout.engine="vllm".'
        )
    return cache.bytes_per_token


def _never_started(request: GenerationRequest) -> Generation:
    return Generation(
        request_id=request.request_id,
        token_ids=np.empty(0, np.int32),
        sampler_logprobs=np.empty(0, np.float32),
        policy_versions=np.empty(0, np.int32),
        finish_reason=FinishReason.ABORTED,
    )
