"""One sample request: from what was asked to the bytes of its answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlsys.tinker_server.protobuf_messages import MASK_LOGPROB, TopK, WireSequence, encode_sample
from rlsys.tinker_server.request_checks import SampleRequest
from rlsys.tinker_server.server_backend import Backend, Scores
from rlsys.tinker_server.server_checkpoints import SamplerWeights
from rlsys.types import FinishReason, Float32Array, Generation, GenerationRequest

MAX_ENGINE_SEED = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """Result of one sample request. `body`: a SampleResponse."""

    body: bytes
    generations: Sequence[Generation]


async def sampled(
    backend: Backend, name: str, weights: SamplerWeights, asked: SampleRequest
) -> SampledSequence:
    """Sample a request. `name`: of the request, unique. Raises as the backend does."""
    seed = secrets.randbelow(MAX_ENGINE_SEED) if asked.seed is None else asked.seed
    generations = await backend.sample(
        weights,
        [
            GenerationRequest(
                request_id=f"{name}:{index}",
                prompt_token_ids=tuple(asked.prompt.tolist()),
                sampling=asked.sampling,
                seed=(seed + index) % MAX_ENGINE_SEED,
            )
            for index in range(asked.num_samples)
        ],
    )
    for one in generations:
        others = set(one.policy_versions.tolist()) - {weights.number}
        assert not others, f"{one.request_id} was sampled by weights {others}, not {weights}"
    prompt, of_samples = await _scores(backend, weights, asked, generations)
    sequences = [
        WireSequence(
            token_ids=one.token_ids,
            logprobs=one.sampler_logprobs,
            is_stopped=one.finish_reason is FinishReason.STOP,
            top_k=top_k,
        )
        for one, top_k in zip(generations, of_samples, strict=True)
    ]
    body = encode_sample(
        sequences,
        prompt_logprobs=_prompt_logprobs(asked, prompt),
        prompt_top_k=None
        if prompt is None or prompt.top_k is None
        else _last_top_k(prompt.top_k, asked.last_n),
    )
    return SampledSequence(body=body, generations=generations)


def _prompt_logprobs(asked: SampleRequest, scores: Scores | None) -> Float32Array | None:
    """Return the log-probability of each prompt token, NaN where it was not scored; None where
    they were not asked for. [P]
    """
    if not asked.prompt_logprobs:
        return None
    found = np.full(len(asked.prompt), np.nan, np.float32)
    if scores is not None:
        found[-asked.last_n :] = scores.logprobs[-asked.last_n :]
    return found


async def _scores(
    backend: Backend,
    weights: SamplerWeights,
    asked: SampleRequest,
    generations: Sequence[Generation],
) -> tuple[Scores | None, list[TopK | None]]:
    """Of the prompt, and the likeliest tokens at each place of each completion."""
    nothing: list[TopK | None] = [None] * len(generations)
    prompt = None
    if asked.last_n:
        (prompt,) = await backend.score(weights, [asked.prompt], asked.prompt_top_k)
    if not asked.sample_top_k:
        return prompt, nothing
    whole = [np.concatenate((asked.prompt, one.token_ids)) for one in generations]
    scores = await backend.score(weights, whole, asked.sample_top_k)
    start = len(asked.prompt) - 1
    tops: list[TopK | None] = []
    for one in scores:
        assert one.top_k is not None
        tops.append(
            TopK(token_ids=one.top_k.token_ids[start:], logprobs=one.top_k.logprobs[start:])
        )
    return prompt, tops


def _last_top_k(top_k: TopK, last_n: int) -> TopK:
    """[P, K]."""
    size, k = top_k.token_ids.shape
    tokens = np.zeros((size + 1, k), np.int32)
    logprobs = np.full((size + 1, k), MASK_LOGPROB, np.float32)
    tokens[-last_n:], logprobs[-last_n:] = top_k.token_ids[-last_n:], top_k.logprobs[-last_n:]
    return TopK(token_ids=tokens, logprobs=logprobs)


async def gathered(calls: Sequence[asyncio.Future[Generation]]) -> list[Generation]:
    """All of them; where one fails, or this is cancelled, none is waited for any more."""
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()
