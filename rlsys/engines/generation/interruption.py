"""Length control by forced interruption: ends the thinking of a completion after some tokens.

    first `after` tokens ── thinking closed, or ended ──► unchanged
                         └─ else: + phrase ──► the answer, within the rest of max_tokens

The phrase's tokens carry the version INJECTED, so they are not trained on. ScaleRL, 2510.13786,
section 3, after Qwen3's thinking budget.

A request is interrupted only if the phrase and one token of an answer fit behind `after` tokens,
within its own max_tokens and within the engine's context. Other requests are sampled to their end
as without an interruption, such as the last turns of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlsys.config import SamplingConfig
from rlsys.engines.generation.continuation import continued, merged
from rlsys.engines.generation.generation_protocol import EngineStats, GenerationEngine
from rlsys.errors import require
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import INJECTED, FinishReason, Generation, GenerationRequest, WeightManifest


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """A phrase that follows `after` completion tokens unless the text contains `closed_by`.

    Created by `interruption_of`.
    """

    after: int
    phrase: tuple[int, ...]
    closed_by: str
    decode: Callable[[Sequence[int]], str]  # of a completion's tokens

    @property
    def shortest(self) -> int:
        """Return the number of tokens of an interrupted completion with an answer of one token."""
        return self.after + len(self.phrase) + 1

    def is_due(self, completion: Sequence[int]) -> bool:
        """Return whether the phrase must be inserted after these tokens."""
        return self.closed_by not in self.decode(completion)


def interruption_of(sampling: SamplingConfig, tokenizer: Any) -> Interruption | None:
    """Return the configured interruption, None if there is none.

    Raises ValueError if it leaves no token for an answer, or if no tokens decode to exactly the
    phrase.
    """
    if sampling.interrupt_after is None:
        return None
    boundary = TokenizerBoundary(tokenizer)
    (phrase,) = boundary.encode_written(
        [sampling.interruption], "sampling.interruption", change="the phrase"
    )
    require(
        sampling.interrupt_after + len(phrase) < sampling.max_tokens,
        "sampling.interrupt_after",
        sampling.interrupt_after,
        rule=f"with the {len(phrase)} tokens of sampling.interruption it leaves none of "
        f"sampling.max_tokens={sampling.max_tokens} for an answer",
        fix="Use a larger max_tokens.",
    )
    return Interruption(
        after=sampling.interrupt_after,
        phrase=tuple(phrase),
        closed_by=sampling.interruption.split()[-1],
        decode=boundary.decode_written,
    )


class InterruptingEngine:
    """A GenerationEngine that wraps another one and inserts the phrase."""

    def __init__(self, engine: GenerationEngine, interruption: Interruption) -> None:
        self._engine = engine
        self._interruption = interruption
        self._thinking: dict[str, GenerationRequest] = {}  # as submitted
        self._earlier: dict[str, Generation] = {}  # tokens before the part that is sampled now
        self._aborted: set[str] = set()  # those of `_thinking` that may have reached the budget

    @property
    def context(self) -> int:
        """See `GenerationEngine.context`."""
        return self._engine.context

    async def start(self) -> None:
        """See `GenerationEngine.start`."""
        await self._engine.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See `GenerationEngine.submit`."""
        self._engine.submit([self._first_part(request) for request in requests])

    async def collect(self) -> list[Generation]:
        """See `GenerationEngine.collect`."""
        while True:
            ended: list[Generation] = []
            continuing: list[GenerationRequest] = []
            for generation in await self._engine.collect():
                request = self._thinking.pop(generation.request_id, None)
                is_aborted = generation.request_id in self._aborted
                self._aborted.discard(generation.request_id)
                if request is None or not self._is_at_the_budget(request, generation):
                    ended.append(self._whole(generation, self._earlier.pop))
                elif is_aborted:
                    ended.append(replace(generation, finish_reason=FinishReason.ABORTED))
                else:
                    continuing.append(self._second_part(request, generation))
            if continuing:
                self._engine.submit(continuing)
            if ended:
                return ended

    async def progress(self) -> list[Generation]:
        """See `GenerationEngine.progress`."""
        return [self._whole(g, self._earlier.get) for g in await self._engine.progress()]

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `GenerationEngine.abort`.

        A request may have reached the budget already, so that the engine does not know it.
        """
        self._aborted |= self._thinking.keys() & set(request_ids)
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        """See `GenerationEngine.pause`."""
        await self._engine.pause()

    async def prepare(self, manifest: WeightManifest) -> None:
        """See `GenerationEngine.prepare`."""
        await self._engine.prepare(manifest)

    async def load(self) -> None:
        """See `GenerationEngine.load`."""
        await self._engine.load()

    async def resume(self) -> None:
        """See `GenerationEngine.resume`."""
        await self._engine.resume()

    async def release(self) -> None:
        """See `GenerationEngine.release`."""
        await self._engine.release()

    def stats(self) -> EngineStats:
        """See `GenerationEngine.stats`."""
        return self._engine.stats()

    async def close(self) -> None:
        """See `GenerationEngine.close`."""
        await self._engine.close()

    def _first_part(self, request: GenerationRequest) -> GenerationRequest:
        """Return the part up to the budget.

        A request that continues another replica's tokens may be beyond it.
        """
        left = self._interruption.after - request.num_prior_tokens
        if left < 0 or not self._may_be_interrupted(request):
            return request
        if left == 0:
            return self._second_part(
                request, Generation.of_nothing(request.request_id, FinishReason.LENGTH)
            )
        self._thinking[request.request_id] = request
        return replace(request, sampling=replace(request.sampling, max_tokens=left))

    def _may_be_interrupted(self, request: GenerationRequest) -> bool:
        """Return whether phrase and answer fit, counted from the request's original prompt.

        A constrained request stays whole, because the phrase may not fit its structure.
        """
        num_prompt_tokens = len(request.prompt_token_ids) - request.num_prior_tokens
        limit = min(
            request.num_prior_tokens + request.sampling.max_tokens,
            self.context - num_prompt_tokens,
        )
        return not request.sampling.structure and self._interruption.shortest <= limit

    def _is_at_the_budget(self, request: GenerationRequest, generation: Generation) -> bool:
        """Return whether the budget ended it, not a stop token or an abort."""
        num_tokens = request.num_prior_tokens + len(generation.token_ids)
        is_cut = generation.finish_reason is FinishReason.LENGTH
        return is_cut and num_tokens == self._interruption.after

    def _second_part(self, request: GenerationRequest, generation: Generation) -> GenerationRequest:
        start = len(request.prompt_token_ids) - request.num_prior_tokens
        completion = [*request.prompt_token_ids[start:], *generation.token_ids.tolist()]
        earlier = generation
        if self._interruption.is_due(completion):
            earlier = merged(generation, self._phrase(generation))
        self._earlier[request.request_id] = earlier
        return continued(request, earlier)

    def _phrase(self, generation: Generation) -> Generation:
        phrase = np.array(self._interruption.phrase, np.int32)
        return replace(
            generation,
            token_ids=phrase,
            sampler_logprobs=np.zeros(len(phrase), np.float32),
            policy_versions=np.full(len(phrase), INJECTED, np.int32),
        )

    def _whole(self, generation: Generation, earlier_of: Any) -> Generation:
        earlier = earlier_of(generation.request_id, None)
        return generation if earlier is None else merged(earlier, generation)
