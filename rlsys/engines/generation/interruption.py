"""Thinking that is brought to its end: length control by forced interruption.

    first `after` tokens ── closed the thinking, or ended ──► as it is
                         └─ else: + phrase ──► the answer, in what is left of max_tokens

The phrase's tokens carry the version INJECTED, so that nothing is trained on them. ScaleRL,
2510.13786, section 3, after Qwen3's thinking budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlsys.config import SamplingConfig, require
from rlsys.engines.generation.continuation import continued, merged
from rlsys.engines.generation.generation_protocol import EngineStats, GenerationEngine
from rlsys.text.tokenizer_boundary import TokenizerBoundary
from rlsys.types import INJECTED, FinishReason, Generation, GenerationRequest, WeightManifest


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """After `after` completion tokens `phrase` follows, unless `closed_by` is in the text by then.
    Made by `interruption_of`.
    """

    after: int
    phrase: tuple[int, ...]
    closed_by: str
    decode: Callable[[Sequence[int]], str]  # of a completion's tokens

    def is_due(self, completion: Sequence[int]) -> bool:
        return self.closed_by not in self.decode(completion)


def interruption_of(sampling: SamplingConfig, tokenizer: Any) -> Interruption | None:
    """Return what the configuration asks for. Raises ValueError where it leaves no token for an
    answer, and where no tokens stand for exactly the phrase.
    """
    if sampling.interrupt_after is None:
        return None
    boundary = TokenizerBoundary(tokenizer)
    (phrase,) = boundary.encode_written([sampling.interruption], "sampling.interruption")
    require(
        sampling.interrupt_after + len(phrase) < sampling.max_tokens,
        f"sampling.interrupt_after={sampling.interrupt_after} and the {len(phrase)} tokens of "
        f"sampling.interruption leave nothing of sampling.max_tokens={sampling.max_tokens} for an "
        "answer; use a larger max_tokens.",
    )
    return Interruption(
        after=sampling.interrupt_after,
        phrase=tuple(phrase),
        closed_by=sampling.interruption.split()[-1],
        decode=boundary.decode_written,
    )


class InterruptingEngine:
    """A GenerationEngine around another one."""

    def __init__(self, engine: GenerationEngine, interruption: Interruption) -> None:
        self._engine = engine
        self._interruption = interruption
        self._thinking: dict[str, GenerationRequest] = {}  # as they were submitted
        self._said: dict[str, Generation] = {}  # what came before that which is sampled now

    async def start(self) -> None:
        await self._engine.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._engine.submit([self._first_part(request) for request in requests])

    async def collect(self) -> list[Generation]:
        while True:
            ended: list[Generation] = []
            going_on: list[GenerationRequest] = []
            for generation in await self._engine.collect():
                request = self._thinking.pop(generation.request_id, None)
                if request is not None and self._is_at_the_budget(request, generation):
                    going_on.append(self._second_part(request, generation))
                else:
                    ended.append(self._whole(generation, self._said.pop))
            if going_on:
                self._engine.submit(going_on)
            if ended:
                return ended

    async def progress(self) -> list[Generation]:
        return [self._whole(g, self._said.get) for g in await self._engine.progress()]

    async def abort(self, request_ids: Collection[str]) -> None:
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        await self._engine.pause()

    async def prepare(self, manifest: WeightManifest) -> None:
        await self._engine.prepare(manifest)

    async def load(self) -> None:
        await self._engine.load()

    async def resume(self) -> None:
        await self._engine.resume()

    async def release(self) -> None:
        await self._engine.release()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()

    def _first_part(self, request: GenerationRequest) -> GenerationRequest:
        """Return the part up to the budget. A request that continues another replica's tokens may
        be beyond it. A constrained one stays whole: the phrase may not fit its structure.
        """
        if request.sampling.structure:
            return request
        left = self._interruption.after - request.num_prior_tokens
        if left < 0 or request.sampling.max_tokens <= left:
            return request
        if left == 0:
            return self._second_part(
                request, Generation.of_nothing(request.request_id, FinishReason.LENGTH)
            )
        self._thinking[request.request_id] = request
        return replace(request, sampling=replace(request.sampling, max_tokens=left))

    def _is_at_the_budget(self, request: GenerationRequest, generation: Generation) -> bool:
        """The model's own context may end it before."""
        num_tokens = request.num_prior_tokens + len(generation.token_ids)
        is_cut = generation.finish_reason is FinishReason.LENGTH
        return is_cut and num_tokens == self._interruption.after

    def _second_part(self, request: GenerationRequest, generation: Generation) -> GenerationRequest:
        start = len(request.prompt_token_ids) - request.num_prior_tokens
        completion = [*request.prompt_token_ids[start:], *generation.token_ids.tolist()]
        said = generation
        if self._interruption.is_due(completion):
            said = merged(generation, self._phrase(generation))
        self._said[request.request_id] = said
        return continued(request, said)

    def _phrase(self, generation: Generation) -> Generation:
        phrase = np.array(self._interruption.phrase, np.int32)
        return replace(
            generation,
            token_ids=phrase,
            sampler_logprobs=np.zeros(len(phrase), np.float32),
            policy_versions=np.full(len(phrase), INJECTED, np.int32),
        )

    def _whole(self, generation: Generation, attribute_of: Any) -> Generation:
        said = attribute_of(generation.request_id, None)
        return generation if said is None else merged(said, generation)
